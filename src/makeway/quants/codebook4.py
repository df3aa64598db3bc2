"""Types of 4-bit indices into 16 fixed values: IQ4_NL, IQ4_XS, MXFP4, NVFP4.

Owns their layout, values and decode; never chooses when to decode.
Hazard: the E2M1 values are stored doubled (0, 1, 2, 3, 4, 6, 8, 12), so both FP4 types halve their scale; the
smallest MXFP4 scales are subnormal and vanish when the CPU is set to flush them.
Source: ggml's block structs; OCP Microscaling Formats 1.0 (E2M1, E8M0), FP8 E4M3.
"""

from functools import cache

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, f16_scales
from makeway.quants.grids import look_up

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def _halves(values: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """f32 [256] twice: the values of the low and of the high four bits of a byte."""
    table = torch.tensor(values, dtype=torch.float32, device=device)
    return table.repeat(16), table.repeat_interleave(16)


def _values(qs: Tensor, half: int, values: tuple[int, ...]) -> Tensor:
    """u8 [n, groups * half] -> f32 [n, groups, 2 * half]: of each group the low, then the high four bits."""
    index = qs.int().view(qs.shape[0], qs.shape[1] // half, half)
    low, high = _halves(values, qs.device)
    return torch.cat((look_up(low, index), look_up(high, index)), dim=2)


class IQ4_NL(QuantType):
    """w = d * IQ4_VALUES[q], q of 4 bits."""

    ggml = GGMLType.IQ4_NL
    block_elements = 32
    block_bytes = 18
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 16, "4-bit indices: byte j: weight j in its low, weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        return _values(blocks[:, 2:], 16, IQ4_VALUES).view(-1, 32).mul_(f16_scales(blocks, 0))


class IQ4_XS(QuantType):
    """w = d * (sc - 32) * IQ4_VALUES[q], q of 4 bits, sc of 6 bits per 32 weights."""

    ggml = GGMLType.IQ4_XS
    block_elements = 256
    block_bytes = 136
    FIELDS = (
        Field("d", 0, 2, "f16 scale of the scales"),
        Field("scales_h", 2, 2, "top 2 bits of the eight scales, lowest first"),
        Field("scales_l", 4, 4, "low 4 bits of the eight scales, low half first"),
        Field("qs", 8, 128, "4-bit indices: per 32 weights 16 bytes, low halves first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        four = torch.arange(0, 8, 4, dtype=torch.uint8, device=blocks.device)
        two = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
        low = (blocks[:, 4:8, None] >> four).bitwise_and_(0x0F).flatten(1)
        top = (blocks[:, 2:4, None] >> two).bitwise_and_(0x03).bitwise_left_shift_(4).flatten(1)
        scales = low.bitwise_or_(top).view(torch.int8).sub_(32).float().mul_(f16_scales(blocks, 0))
        return _values(blocks[:, 8:], 16, IQ4_VALUES).mul_(scales.unsqueeze(-1)).view(-1, 256)


class MXFP4(QuantType):
    """w = 2^(e - 128) * E2M1_DOUBLED[q], q of 4 bits."""

    ggml = GGMLType.MXFP4
    block_elements = 32
    block_bytes = 17
    FIELDS = (
        Field("e", 0, 1, "E8M0 scale: the exponent with bias 127"),
        Field("qs", 1, 16, "E2M1 values: byte j: weight j in its low, weight j+16 in its high half"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        e = blocks[:, :1].int()
        # half of 2^(e - 127) as f32 bits; the two smallest are subnormal: one bit of the fraction
        bits = torch.where(e < 2, 0x00200000 << e, (e - 1) << 23)
        return _values(blocks[:, 1:], 16, E2M1_DOUBLED).view(-1, 32).mul_(bits.view(torch.float32))


class NVFP4(QuantType):
    """w = s / 2 * E2M1_DOUBLED[q], q of 4 bits, s an E4M3 number per 16 weights."""

    ggml = GGMLType.NVFP4
    block_elements = 64
    block_bytes = 36
    FIELDS = (
        Field("d", 0, 4, "four E4M3 scales (bias 7; the sign bit is ignored, 0x7F means 0)"),
        Field("qs", 4, 32, "E2M1 values: per 16 weights 8 bytes, low halves first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        s = blocks[:, :4].int()
        exponent, fraction = (s >> 3).bitwise_and_(15), s & 7
        normal = (exponent + 119 << 23 | fraction << 20).view(torch.float32)  # (1 + f/8) * 2^(e - 8)
        scales = torch.where(exponent == 0, fraction.float() * 2.0**-10, normal).masked_fill_(s == 0x7F, 0.0)
        return _values(blocks[:, 4:], 8, E2M1_DOUBLED).mul_(scales.unsqueeze(-1)).view(-1, 64)
