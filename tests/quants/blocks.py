"""Blocks to decode: golden ones, random ones, and what the `gguf` package makes of them."""

from functools import cache
from pathlib import Path

import numpy as np
import torch
from gguf import GGMLQuantizationType
from gguf import quants as gguf_quants

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.quants import QUANT_TYPES

ALL_TYPES = list(QUANT_TYPES)
GOLDEN = Path(__file__).parent.parent / "data" / "dequant.npz"


@cache
def golden() -> dict[str, np.ndarray]:
    """`TYPE_raw`, `TYPE_val`, `TYPE_rand_raw`, `TYPE_rand_val`: bytes and llama.cpp's values."""
    with np.load(GOLDEN) as stored:
        return {name: stored[name] for name in stored.files}


def random_blocks(ggml_type: GGMLType, n: int, seed: int = 0) -> torch.Tensor:
    """u8 [n, block_bytes] of random bytes: every field takes any value, non-finite scales included."""
    generator = torch.Generator().manual_seed(seed * 1000 + ggml_type)
    shape = (n, BLOCK_SIZES[ggml_type].n_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)


def gguf_values(blocks: torch.Tensor, ggml_type: GGMLType) -> torch.Tensor:
    """f32 [n, block_elements] of the `gguf` package."""
    with np.errstate(all="ignore"):
        flat = np.ascontiguousarray(blocks.numpy()).reshape(1, -1)
        if ggml_type in (GGMLType.F32, GGMLType.F16):  # the package only views these
            flat = flat.view(np.float32 if ggml_type == GGMLType.F32 else np.float16)
            values = flat.astype(np.float32)
        else:
            values = gguf_quants.dequantize(flat, GGMLQuantizationType(int(ggml_type)))
    return torch.from_numpy(values.reshape(blocks.shape[0], -1))


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal float32 bits, signs of zero included; any NaN equals any NaN."""
    assert actual.dtype == torch.float32
    assert actual.shape == expected.shape
    equal = actual.contiguous().view(torch.int32) == expected.contiguous().view(torch.int32)
    equal |= actual.isnan() & expected.isnan()
    assert bool(equal.all()), f"{int((~equal).sum())} of {equal.numel()} values differ"
