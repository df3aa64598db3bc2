"""Types with super-blocks of 256 weights and quantised sub-block scales: Q2_K, Q3_K, Q4_K, Q5_K, Q6_K.

Owns their layout and decode; never chooses when to decode.
Hazard: float32 order is part of the format: the sub-block scale d * sc is rounded first, then times q, then
minus dmin * m; a fused multiply-add changes bits.
Source: ggml's block structs. Bytes are handled several at a time as int32 or int64 words; arithmetic shifts
smear the sign bit into the top byte, so a mask always follows a shift.
"""

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, f16_scales, words


def _every_byte(value: int) -> int:
    """A (non-negative) int64 with `value` < 128 in every byte."""
    return value * 0x0101010101010101


def _scales_and_mins(blocks: Tensor, offset: int) -> tuple[Tensor, Tensor]:
    """The eight 6-bit scales and mins of Q4_K and Q5_K: 12 bytes at `offset` -> two f32 [n, 8].

    In 32-bit words a, b, c: a and b hold scales 0..3 and mins 0..3 in six bits, and in their top two bits the
    top bits of scales and mins 4..7, whose low four bits are the halves of c.
    """
    packed = words(blocks, offset, 12, torch.int32)  # [n, 3]
    first = packed & 0x3F3F3F3F
    top = (packed[:, :2] >> 2).bitwise_and_(0x30303030)
    low = packed[:, 2] & 0x0F0F0F0F
    high = (packed[:, 2] >> 4).bitwise_and_(0x0F0F0F0F)
    scales = torch.stack((first[:, 0], low.bitwise_or_(top[:, 0])), dim=1)
    mins = torch.stack((first[:, 1], high.bitwise_or_(top[:, 1])), dim=1)
    return scales.view(torch.int8).float(), mins.view(torch.int8).float()


def _affine(q: Tensor, scales: Tensor, mins: Tensor) -> Tensor:
    """q * scales - mins, one of each per sub-block: int8 256 n, f32 [n, g], f32 [n, g] -> f32 [n, 256]."""
    w = q.float().view(scales.shape[0], scales.shape[1], 256 // scales.shape[1])
    return w.mul_(scales.unsqueeze(-1)).sub_(mins.unsqueeze(-1)).view(-1, 256)


def _scaled(q: Tensor, scales: Tensor) -> Tensor:
    """q * scales, one scale per sub-block: int8 256 n, f32 [n, g] -> f32 [n, 256]."""
    w = q.float().view(scales.shape[0], scales.shape[1], 256 // scales.shape[1])
    return w.mul_(scales.unsqueeze(-1)).view(-1, 256)


def _crumbs(qs: Tensor) -> Tensor:
    """2-bit values of two halves, bits 2k of byte j: weight 32k + j; int64 [n, 8] -> int64 [n, 2, 4, 4]."""
    half = qs.view(-1, 2, 4)
    q = torch.empty((qs.shape[0], 2, 4, 4), dtype=torch.int64, device=qs.device)
    q[:, :, 0] = half
    for k in (1, 2, 3):
        torch.bitwise_right_shift(half, 2 * k, out=q[:, :, k])
    return q.bitwise_and_(_every_byte(3))


class Q2_K(QuantType):
    """w = (d * sc) * q - (dmin * m), q of 2 bits, sc and m of 4 bits per 16 weights."""

    ggml = GGMLType.Q2_K
    block_elements = 256
    block_bytes = 84
    FIELDS = (
        Field("scales", 0, 16, "per 16 weights: scale in the low, min in the high 4 bits"),
        Field("qs", 16, 64, "2-bit values: half h of 128 weights in 32 bytes, bits 2k of byte j: weight 32k+j"),
        Field("d", 80, 2, "f16 scale of the scales"),
        Field("dmin", 82, 2, "f16 scale of the mins"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        packed = blocks[:, :16]
        d = f16_scales(blocks, 80, 2)
        scales = (packed & 0x0F).float().mul_(d[:, :1])
        mins = (packed >> 4).float().mul_(d[:, 1:])
        qs = words(blocks, 16, 64, torch.int64).contiguous()
        return _affine(_crumbs(qs).view(torch.int8), scales, mins)


class Q3_K(QuantType):
    """w = (d * (sc - 32)) * (q - 4), q of 3 bits, sc of 6 bits per 16 weights."""

    ggml = GGMLType.Q3_K
    block_elements = 256
    block_bytes = 110
    FIELDS = (
        Field("hmask", 0, 32, "third bits: bit k of byte j belongs to weight 32k+j"),
        Field("qs", 32, 64, "low 2 bits: half h of 128 weights in 32 bytes, bits 2k of byte j: weight 32k+j"),
        Field("scales", 96, 12, "sixteen 6-bit scales: low 4 bits in 8 bytes, high 2 bits in 4 bytes"),
        Field("d", 108, 2, "f16 scale of the scales"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        packed = words(blocks, 96, 12, torch.int32)  # [n, 3]
        low, top = packed[:, :2], packed[:, 2]
        halves = torch.cat((low, low >> 4), dim=1).bitwise_and_(0x0F0F0F0F)
        tops = torch.stack((top << 4, top << 2, top, top >> 2), dim=1).bitwise_and_(0x30303030)
        scales = halves.bitwise_or_(tops).view(torch.int8).sub_(32).float()

        q = _crumbs(words(blocks, 32, 64, torch.int64).contiguous())
        mask = words(blocks, 0, 32, torch.int64)  # [n, 4]
        third = torch.empty((blocks.shape[0], 8, 4), dtype=torch.int64, device=blocks.device)
        for k in range(8):
            third[:, k] = mask << 2 - k if k < 2 else mask >> k - 2
        q.bitwise_or_(third.bitwise_and_(_every_byte(4)).view(-1, 2, 4, 4))
        return _scaled(q.view(torch.int8).sub_(4), scales.mul_(f16_scales(blocks, 108)))


class Q4_K(QuantType):
    """w = (d * sc) * q - (dmin * m), q of 4 bits, sc and m of 6 bits per 32 weights."""

    ggml = GGMLType.Q4_K
    block_elements = 256
    block_bytes = 144
    FIELDS = (
        Field("d", 0, 2, "f16 scale of the scales"),
        Field("dmin", 2, 2, "f16 scale of the mins"),
        Field("scales", 4, 12, "eight 6-bit scales and mins: 4 + 4 bytes (six bits, top bits of 4..7), 4 bytes"),
        Field("qs", 16, 128, "4-bit values: group g of 64 weights in 32 bytes, low halves first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        scales, mins = _scales_and_mins(blocks, 4)
        d = f16_scales(blocks, 0, 2)
        qs = words(blocks, 16, 128, torch.int64).view(-1, 4, 4)  # [n, 4, 4]
        q = torch.empty((blocks.shape[0], 4, 2, 4), dtype=torch.int64, device=blocks.device)
        q[:, :, 0] = qs
        torch.bitwise_right_shift(qs, 4, out=q[:, :, 1])
        q.bitwise_and_(_every_byte(0x0F))
        return _affine(q.view(torch.int8), scales.mul_(d[:, :1]), mins.mul_(d[:, 1:]))


class Q5_K(QuantType):
    """w = (d * sc) * q - (dmin * m), q of 5 bits, sc and m of 6 bits per 32 weights."""

    ggml = GGMLType.Q5_K
    block_elements = 256
    block_bytes = 176
    FIELDS = (
        Field("d", 0, 2, "f16 scale of the scales"),
        Field("dmin", 2, 2, "f16 scale of the mins"),
        Field("scales", 4, 12, "eight 6-bit scales and mins: 4 + 4 bytes (six bits, top bits of 4..7), 4 bytes"),
        Field("qh", 16, 32, "fifth bits: bit k of byte j belongs to weight 32k+j"),
        Field("qs", 48, 128, "low 4 bits: group g of 64 weights in 32 bytes, low halves first"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        scales, mins = _scales_and_mins(blocks, 4)
        d = f16_scales(blocks, 0, 2)
        qs = words(blocks, 48, 128, torch.int64).view(-1, 4, 4)
        qh = words(blocks, 16, 32, torch.int64)  # [n, 4]
        q = torch.empty((blocks.shape[0], 4, 2, 4), dtype=torch.int64, device=blocks.device)
        q[:, :, 0] = qs
        torch.bitwise_right_shift(qs, 4, out=q[:, :, 1])
        q.bitwise_and_(_every_byte(0x0F))
        fifth = torch.empty((blocks.shape[0], 8, 4), dtype=torch.int64, device=blocks.device)
        for k in range(8):
            fifth[:, k] = qh << 4 - k if k < 4 else qh >> k - 4
        q.bitwise_or_(fifth.bitwise_and_(_every_byte(0x10)).view(-1, 4, 2, 4))
        return _affine(q.view(torch.int8), scales.mul_(d[:, :1]), mins.mul_(d[:, 1:]))


class Q6_K(QuantType):
    """w = (d * sc) * (q - 32), q of 6 bits, sc a signed byte per 16 weights."""

    ggml = GGMLType.Q6_K
    block_elements = 256
    block_bytes = 210
    FIELDS = (
        Field("ql", 0, 128, "low 4 bits: half h of 128 weights in 64 bytes, low halves first"),
        Field("qh", 128, 64, "top 2 bits: half h of 128 weights in 32 bytes, bits 2k of byte j: weight 32k+j"),
        Field("scales", 192, 16, "signed 8-bit scale per 16 weights"),
        Field("d", 208, 2, "f16 scale of the scales"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        scales = blocks[:, 192:208].view(torch.int8).float().mul_(f16_scales(blocks, 208))
        packed = words(blocks, 0, 192, torch.int64)  # [n, 24]
        ql = packed[:, :16].view(-1, 2, 2, 4)  # [n, half, 2, 4]
        qh = packed[:, 16:].contiguous().view(-1, 2, 4)  # [n, half, 4]
        q = torch.empty((blocks.shape[0], 2, 4, 4), dtype=torch.int64, device=blocks.device)
        q[:, :, :2] = ql
        torch.bitwise_right_shift(ql, 4, out=q[:, :, 2:])
        q.bitwise_and_(_every_byte(0x0F))
        top = torch.stack((qh << 4, qh << 2, qh, qh >> 2), dim=2).bitwise_and_(_every_byte(0x30))
        return _scaled(q.bitwise_or_(top).view(torch.int8).sub_(32), scales)
