"""GGUF files: named, typed bytes. `open_gguf(path)` checks a file, or all shards of a set, and maps it.

Owns the file format; never decodes weights (`quants/`) or knows a model. No torch.
Hazard: a file is untrusted input; whatever is wrong with it must end in one clear UserError.
"""

from makeway.gguf.header import TensorInfo
from makeway.gguf.metadata import Metadata
from makeway.gguf.reader import GGUFFile, open_gguf
from makeway.gguf.types import BLOCK_SIZES, BlockSize, GGMLType, row_bytes
from makeway.gguf.values import Value, ValueType

__all__ = [
    "BLOCK_SIZES",
    "BlockSize",
    "GGMLType",
    "GGUFFile",
    "Metadata",
    "TensorInfo",
    "Value",
    "ValueType",
    "open_gguf",
    "row_bytes",
]
