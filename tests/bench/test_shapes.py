"""Full shapes: bytes as in the packs they imitate, and hash constants that fit."""

from dataclasses import replace

import numpy as np
import pytest

from makeway.bench.shapes import SHAPES, Qwen4ExpShape
from makeway.gguf import row_bytes

REAL = replace(Qwen4ExpShape(), n_draft=1, ple_rows=320_001_536)


def n_bytes(shape, part):
    specs = ((name, spec) for name, spec in shape.tensors().items() if part in name)
    return sum(int(np.prod(s.shape[:-1], dtype=np.int64)) * row_bytes(s.type, s.shape[-1]) for _, s in specs)


def test_flash_next_is_as_big_as_the_real_one():
    """Experts of 3,072,000 bytes, and a file of about 111 GB."""
    assert n_bytes(REAL, "_exps") == 49 * 512 * 3_072_000
    assert n_bytes(REAL, "per_layer_token_embd") == pytest.approx(28.8e9, rel=0.001)
    assert n_bytes(REAL, "") == pytest.approx(111e9, rel=0.02)


def test_the_30b_has_16_gb_of_experts_or_19_of_bf16_in_16_layers():
    assert n_bytes(SHAPES["qwen3-30b-a3b"], "_exps") == pytest.approx(16.3e9, rel=0.01)
    assert n_bytes(SHAPES["qwen3-30b-a3b-bf16"], "_exps") == pytest.approx(19.3e9, rel=0.01)


@pytest.mark.parametrize("shape", [REAL, SHAPES["tiny-flash-next"]], ids=["real", "tiny"])
def test_hash_constants_fit_the_table_and_64_bits(shape):
    keys = shape.metadata()
    sizes = [int(v) for v in keys["qwen4exp.ple.head_vocab_sizes"]]
    offsets = [int(v) for v in keys["qwen4exp.ple.head_offsets"]]
    assert len(set(sizes)) == 2 * shape.heads_per_ngram
    assert offsets == [sum(sizes[:i]) for i in range(len(sizes))]
    assert offsets[-1] + sizes[-1] <= shape.ple_rows
    assert max(int(v) for v in keys["qwen4exp.ple.layer_multipliers"]) * (shape.n_vocab - 1) < 1 << 63
