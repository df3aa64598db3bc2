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
from makeway.quants.base import Field, QuantType, f16_scales, words
from makeway.quants.grids import look_up

IQ4_VALUES = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
E2M1_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


@cache
def _quads(values: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [65536]: the int8 values of four 4-bit indices, lowest first, as one word."""
    index = torch.arange(1 << 16)[:, None] >> torch.arange(0, 16, 4) & 15
    return torch.tensor(values, dtype=torch.int8)[index].view(torch.int32)[:, 0].to(device)


def _values(packed: Tensor, half: int, values: tuple[int, ...]) -> Tensor:
    """int32 [n, words] -> f32 [n, groups, 2 * half]: of each `half` bytes the low, then the high ones.

    The 4-bit indices are brought into weight order, closed up to four a word, and looked up four at a time.
    """
    n, n_words = packed.shape
    n_groups = n_words * 4 // half
    group = packed.view(n, n_groups, half // 4)
    index = torch.empty((n, n_groups, 2, half // 4), dtype=torch.int32, device=packed.device)
    index[:, :, 0] = group
    torch.bitwise_right_shift(group, 4, out=index[:, :, 1])
    index.bitwise_and_(0x0F0F0F0F)
    index.bitwise_or_(index >> 4).bitwise_and_(0x00FF00FF)
    index.bitwise_or_(index >> 8).bitwise_and_(0x0000FFFF)
    return look_up(_quads(values, packed.device), index).view(torch.int8).float().view(n, n_groups, 2 * half)


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
        w = _values(words(blocks, 2, 16, torch.int32), 16, IQ4_VALUES).view(-1, 32)
        return w.mul_(f16_scales(blocks, 0))


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
        low = words(blocks, 4, 4, torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)  # [n, 1]
        top = words(blocks, 2, 2, torch.int16).to(torch.int64).bitwise_and_(0xFFFF)
        # 4-bit and 2-bit fields are moved apart, field i into byte i
        for shift, mask in ((16, 0x0000FFFF0000FFFF), (8, 0x00FF00FF00FF00FF), (4, 0x0F0F0F0F0F0F0F0F)):
            low.bitwise_or_(low << shift).bitwise_and_(mask)
        for shift, mask in ((24, 0x000000FF000000FF), (12, 0x000F000F000F000F), (6, 0x0303030303030303)):
            top.bitwise_or_(top << shift).bitwise_and_(mask)
        sc = low.bitwise_or_(top << 4).view(torch.int8).sub_(32)  # [n, 8]
        scales = sc.float().mul_(f16_scales(blocks, 0))
        w = _values(words(blocks, 8, 128, torch.int32), 16, IQ4_VALUES)
        return w.mul_(scales.unsqueeze(-1)).view(-1, 256)


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
        w = _values(words(blocks, 1, 16, torch.int32), 16, E2M1_DOUBLED).view(-1, 32)
        return w.mul_(bits.view(torch.float32))


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
        s = words(blocks, 0, 4, torch.int32).contiguous().view(torch.uint8).int()  # [n, 4]
        exponent, fraction = (s >> 3).bitwise_and_(15), s & 7
        normal = (exponent + 119 << 23 | fraction << 20).view(torch.float32)  # (1 + f/8) * 2^(e - 8)
        scales = torch.where(exponent == 0, fraction.float() * 2.0**-10, normal).masked_fill_(s == 0x7F, 0.0)
        w = _values(words(blocks, 4, 32, torch.int32), 8, E2M1_DOUBLED)
        return w.mul_(scales.unsqueeze(-1)).view(-1, 64)
