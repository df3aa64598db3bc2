"""Unquantised types as blocks of one element: F32, F16, BF16.

Owns their layout and decode; never rounds.
Hazard: F32 decode may be a view of the input, so writing to the result could write to the file's memory.
"""

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, words


class F32(QuantType):
    """IEEE binary32; decode is a view (a copy when misaligned)."""

    ggml = GGMLType.F32
    block_elements = 1
    block_bytes = 4
    FIELDS = (Field("value", 0, 4, "f32 weight"),)

    def decode(self, blocks: Tensor) -> Tensor:
        return words(blocks, 0, 4, torch.float32)


class F16(QuantType):
    """IEEE binary16."""

    ggml = GGMLType.F16
    block_elements = 1
    block_bytes = 2
    FIELDS = (Field("value", 0, 2, "f16 weight"),)

    def decode(self, blocks: Tensor) -> Tensor:
        return words(blocks, 0, 2, torch.float16).float()


class BF16(QuantType):
    """The upper 16 bits of an f32."""

    ggml = GGMLType.BF16
    block_elements = 1
    block_bytes = 2
    FIELDS = (Field("value", 0, 2, "bf16 weight"),)

    def decode(self, blocks: Tensor) -> Tensor:
        return words(blocks, 0, 2, torch.bfloat16).float()
