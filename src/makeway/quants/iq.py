"""Codebook types with super-blocks of 256 weights: IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S.

Owns their layout and decode; the codebooks themselves live in `grids.py`.
Hazard: where the signs of eight weights are stored in seven bits, the eighth is their parity.
Source: ggml's block structs. A codebook entry and its signs are int8 values in one word, multiplied bytewise;
that product is exact, so only the scale is rounded, in ggml's order.
"""

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, f16_scales, words
from makeway.quants.grids import even_sign_words, grid_words, look_up, sign_words


def _bytes(blocks: Tensor, offset: int, count: int) -> Tensor:
    """Bytes of every block as int32 [n, count]."""
    return blocks[:, offset : offset + count].int()


def _u16(blocks: Tensor, offset: int, count: int) -> Tensor:
    """Little-endian u16 of every block as int32 [n, count]."""
    return words(blocks, offset, 2 * count, torch.int16).int().bitwise_and_(0xFFFF)


def _bit_fields(packed: Tensor, width: int, count: int) -> Tensor:
    """The `count` lowest fields of `width` bits of each word: int32 [n, k] -> int32 [n, k, count]."""
    shifts = torch.arange(0, width * count, width, dtype=torch.int32, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts).bitwise_and_((1 << width) - 1)


def _signed(grid: Tensor, signs: Tensor, scales: Tensor) -> Tensor:
    """Codebook words times sign words times f32 scales [n, groups] -> f32 [n, 256]."""
    n, groups = scales.shape
    q = grid.view(torch.int8).view(n, 256).mul_(signs.view(torch.int8).view(n, 256))
    return q.float().view(n, groups, 256 // groups).mul_(scales.unsqueeze(-1)).view(n, 256)


def _shifted(grid: Tensor, delta: Tensor, scales: Tensor) -> Tensor:
    """scale * (grid + delta) of the IQ1 types.

    int64 [n, 32] words of -1, 0, 1; int32 [n, k], 1 for delta -1/8 and 0 for +1/8; f32 [n, groups]
    -> f32 [n, 256].
    Eighths are summed as integers, which is exact.
    """
    n, groups = scales.shape
    eighths = (1 - 2 * delta).to(torch.int8).unsqueeze(-1)
    q = grid.view(torch.int8).view(n, delta.shape[1], 256 // delta.shape[1]).mul_(8).add_(eighths)
    w = q.float().mul_(0.125).view(n, groups, 256 // groups)
    return w.mul_(scales.unsqueeze(-1)).view(n, 256)


class IQ1_S(QuantType):
    """w = d * (2 sc + 1) * (grid +- 1/8), sc of 3 bits and the sign of 1/8 per 32 weights."""

    ggml = GGMLType.IQ1_S
    block_elements = 256
    block_bytes = 50
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 32, "low 8 bits of the codebook index of 8 weights"),
        Field("qh", 34, 16, "u16 per 32 weights: four times 3 index bits, 3-bit scale, sign of the shift"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        qh = _u16(blocks, 34, 8)
        scales = f16_scales(blocks, 0) * (qh >> 12).bitwise_and_(7).mul_(2).add_(1)
        index = _bit_fields(qh, 3, 4).flatten(1).bitwise_left_shift_(8).bitwise_or_(blocks[:, 2:34])
        grid = look_up(grid_words("iq1", blocks.device), index)
        return _shifted(grid, qh >> 15, scales)


class IQ1_M(QuantType):
    """w = d * (2 sc + 1) * (grid +- 1/8), sc of 3 bits per 16 weights, the sign of 1/8 per 8 weights."""

    ggml = GGMLType.IQ1_M
    block_elements = 256
    block_bytes = 56
    FIELDS = (
        Field("qs", 0, 32, "low 8 bits of the codebook index of 8 weights"),
        Field("qh", 32, 16, "4 bits per 8 weights: 3 index bits, sign of the shift"),
        Field(
            "scales",
            48,
            8,
            "four u16: four 3-bit scales each, and in the top 4 bits a quarter of the f16 scale",
        ),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        packed = _u16(blocks, 48, 4)
        quarters = (packed >> 12) << torch.arange(0, 16, 4, dtype=torch.int32, device=blocks.device)
        d = quarters.sum(dim=1, keepdim=True, dtype=torch.int32).to(torch.int16).view(torch.float16).float()
        scales = d * _bit_fields(packed, 3, 4).flatten(1).mul_(2).add_(1)  # [n, 16]
        qh = _bit_fields(_bytes(blocks, 32, 16), 4, 2).flatten(1)  # [n, 32]
        index = (qh & 7).bitwise_left_shift_(8).bitwise_or_(blocks[:, :32])
        grid = look_up(grid_words("iq1", blocks.device), index)
        return _shifted(grid, qh >> 3, scales)


class IQ2_XXS(QuantType):
    """w = d * (0.5 + sc) / 4 * sign * grid, sc of 4 bits per 32 weights."""

    ggml = GGMLType.IQ2_XXS
    block_elements = 256
    block_bytes = 66
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field(
            "qs",
            2,
            64,
            "per 32 weights 4 codebook indices of a byte, then u32: four 7-bit signs, 4-bit scale",
        ),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        packed = words(blocks, 2, 64, torch.int32)
        signs = packed[:, 1::2]
        scales = f16_scales(blocks, 0) * (signs >> 28).bitwise_and_(15).float().add_(0.5)
        index = blocks[:, 2:].view(-1, 8, 8)[:, :, :4].int()
        return _signed(
            look_up(grid_words("iq2_xxs", blocks.device), index),
            look_up(even_sign_words(blocks.device), _bit_fields(signs, 7, 4)),
            scales.mul_(0.25),
        )


class IQ2_XS(QuantType):
    """w = d * (0.5 + sc) / 4 * sign * grid, sc of 4 bits per 16 weights."""

    ggml = GGMLType.IQ2_XS
    block_elements = 256
    block_bytes = 74
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 64, "u16 per 8 weights: 9-bit codebook index, 7-bit signs"),
        Field("scales", 66, 8, "4-bit scale per 16 weights, low half first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        qs = _u16(blocks, 2, 32)
        scales = f16_scales(blocks, 0) * _bit_fields(_bytes(blocks, 66, 8), 4, 2).flatten(1).float().add_(0.5)
        return _signed(
            look_up(grid_words("iq2_xs", blocks.device), qs & 511),
            look_up(even_sign_words(blocks.device), qs >> 9),
            scales.mul_(0.25),
        )


class IQ2_S(QuantType):
    """w = d * (0.5 + sc) / 4 * sign * grid, sc of 4 bits per 16 weights, all signs stored."""

    ggml = GGMLType.IQ2_S
    block_elements = 256
    block_bytes = 82
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 32, "low 8 bits of the codebook index of 8 weights"),
        Field("signs", 34, 32, "bit i of byte j: weight 8j+i is negative"),
        Field("qh", 66, 8, "2 index bits per 8 weights, lowest first"),
        Field("scales", 74, 8, "4-bit scale per 16 weights, low half first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        scales = f16_scales(blocks, 0) * _bit_fields(_bytes(blocks, 74, 8), 4, 2).flatten(1).float().add_(0.5)
        top = _bit_fields(_bytes(blocks, 66, 8), 2, 4).flatten(1)
        return _signed(
            look_up(grid_words("iq2_s", blocks.device), top.bitwise_left_shift_(8).bitwise_or_(blocks[:, 2:34])),
            look_up(sign_words(blocks.device), _bytes(blocks, 34, 32)),
            scales.mul_(0.25),
        )


class IQ3_XXS(QuantType):
    """w = d * (0.5 + sc) / 2 * sign * grid, sc of 4 bits per 32 weights."""

    ggml = GGMLType.IQ3_XXS
    block_elements = 256
    block_bytes = 98
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 64, "codebook index of 4 weights"),
        Field("signs", 66, 32, "u32 per 32 weights: four 7-bit signs of 8 weights, 4-bit scale"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        signs = words(blocks, 66, 32, torch.int32)
        scales = f16_scales(blocks, 0) * (signs >> 28).bitwise_and_(15).float().add_(0.5)
        return _signed(
            look_up(grid_words("iq3_xxs", blocks.device), _bytes(blocks, 2, 64)),
            look_up(even_sign_words(blocks.device), _bit_fields(signs, 7, 4)),
            scales.mul_(0.5),
        )


class IQ3_S(QuantType):
    """w = d * (2 sc + 1) * sign * grid, sc of 4 bits per 32 weights, all signs stored."""

    ggml = GGMLType.IQ3_S
    block_elements = 256
    block_bytes = 110
    FIELDS = (
        Field("d", 0, 2, "f16 scale"),
        Field("qs", 2, 64, "low 8 bits of the codebook index of 4 weights"),
        Field("qh", 66, 8, "ninth index bits: bit i of byte j belongs to index 8j+i"),
        Field("signs", 74, 32, "bit i of byte j: weight 8j+i is negative"),
        Field("scales", 106, 4, "4-bit scale per 32 weights, low half first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        scales = f16_scales(blocks, 0) * _bit_fields(_bytes(blocks, 106, 4), 4, 2).flatten(1).mul_(2).add_(1)
        ninth = _bit_fields(_bytes(blocks, 66, 8), 1, 8).flatten(1)
        return _signed(
            look_up(grid_words("iq3_s", blocks.device), ninth.bitwise_left_shift_(8).bitwise_or_(blocks[:, 2:66])),
            look_up(sign_words(blocks.device), _bytes(blocks, 74, 32)),
            scales,
        )
