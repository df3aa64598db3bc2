"""Types with blocks of 32 weights and one scale: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0.

Owns their layout and decode; never chooses when to decode.
Hazard: nibbles are split in halves, not interleaved: byte j holds weight j (low) and weight j + 16 (high).
Source: ggml's block structs. Bytes are handled eight at a time as int64 words; arithmetic shifts smear the
sign bit into the top byte, so a mask always follows a shift.
"""

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, f16_scales, words

_LOW_NIBBLES = 0x0F0F0F0F0F0F0F0F
_ONES = 0x0101010101010101
_DIAGONAL = 0x8040201008040201 - (1 << 64)  # bit i of byte i
_SEVENS = 0x7F7F7F7F7F7F7F7F
_BIT4 = 0x1010101010101010


def _nibbles(qs: Tensor) -> Tensor:
    """Sixteen bytes of nibbles, int64 [n, 2] -> their 32 values in weight order, one a byte, int64 [n, 4]."""
    q = torch.empty((qs.shape[0], 4), dtype=torch.int64, device=qs.device)
    q[:, :2] = qs
    torch.bitwise_right_shift(qs, 4, out=q[:, 2:])
    return q.bitwise_and_(_LOW_NIBBLES)


def _fifth_bits(qh: Tensor) -> Tensor:
    """32 bits in words of any width, [n, k] -> 0x10 in byte j where bit j is set, int64 [n, 4].

    Each byte is copied eight times, bit i kept in copy i, carried to the top bit by an addition.
    """
    spread = qh.contiguous().view(torch.uint8).to(torch.int64).mul_(_ONES).bitwise_and_(_DIAGONAL).add_(_SEVENS)
    return spread.bitwise_right_shift_(3).bitwise_and_(_BIT4)


class Q4_0(QuantType):
    """w = d * (q - 8), q of 4 bits."""

    ggml = GGMLType.Q4_0
    block_elements = 32
    block_bytes = 18
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 16, "4-bit values: byte j holds weight j in its low and weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        q = _nibbles(words(blocks, 2, 16, torch.int64)).view(torch.int8).sub_(8)
        return q.float().mul_(f16_scales(blocks, 0))


class Q4_1(QuantType):
    """w = d * q + m, q of 4 bits."""

    ggml = GGMLType.Q4_1
    block_elements = 32
    block_bytes = 20
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("m", 2, 2, "f16 minimum"),
        Field("qs", 4, 16, "4-bit values: byte j holds weight j in its low and weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        q = _nibbles(words(blocks, 4, 16, torch.int64)).view(torch.int8)
        scales = f16_scales(blocks, 0, 2)
        return q.float().mul_(scales[:, :1]).add_(scales[:, 1:])


class Q5_0(QuantType):
    """w = d * (q - 16), q of 5 bits."""

    ggml = GGMLType.Q5_0
    block_elements = 32
    block_bytes = 22
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qh", 2, 4, "fifth bits: bit j of the little-endian u32 belongs to weight j"),
        Field("qs", 6, 16, "low 4 bits: byte j holds weight j in its low and weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        q = _nibbles(words(blocks, 6, 16, torch.int64)).bitwise_or_(_fifth_bits(words(blocks, 2, 4, torch.int16)))
        return q.view(torch.int8).sub_(16).float().mul_(f16_scales(blocks, 0))


class Q5_1(QuantType):
    """w = d * q + m, q of 5 bits."""

    ggml = GGMLType.Q5_1
    block_elements = 32
    block_bytes = 24
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("m", 2, 2, "f16 minimum"),
        Field("qh", 4, 4, "fifth bits: bit j of the little-endian u32 belongs to weight j"),
        Field("qs", 8, 16, "low 4 bits: byte j holds weight j in its low and weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        q = _nibbles(words(blocks, 8, 16, torch.int64)).bitwise_or_(_fifth_bits(words(blocks, 4, 4, torch.int32)))
        scales = f16_scales(blocks, 0, 2)
        return q.view(torch.int8).float().mul_(scales[:, :1]).add_(scales[:, 1:])


class Q8_0(QuantType):
    """w = d * q, q a signed byte."""

    ggml = GGMLType.Q8_0
    block_elements = 32
    block_bytes = 34
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 32, "signed 8-bit values in weight order"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        return blocks[:, 2:].view(torch.int8).float().mul_(f16_scales(blocks, 0))
