"""The full Flash-Next model as a header with a hole behind it: real shapes and types, no disk space."""

from dataclasses import replace
from pathlib import Path

from makeway.bench.gguf_writer import write_gguf
from makeway.bench.shapes import Qwen4ExpShape

SHAPE = replace(Qwen4ExpShape(), n_draft=1, ple_rows=320_001_536)


def write_flash_next(path: Path) -> Path:
    """Writes the sparse file; 49 blocks, 512 experts each, PLE at block 1."""
    tensors = {name: (spec.type, spec.shape, None) for name, spec in SHAPE.tensors().items()}
    write_gguf(path, SHAPE.metadata(), tensors, sparse=True)
    return path
