"""Device functions that turn the block bytes of a tile of rows into numbers, one function per type, and their table.

Owns the layouts as the kernels read them (`quants/` is the truth). Never multiplies by activations or writes memory.
Hazard: the codes of a plane come in *plane order*, not weight order; activations go through `plane_order`, or the codes
through `weight_order`.

A *plane* is 16 or 32 consecutive weights of each row that share one scale: weight = (code - bias) * scale + shift.
Codes are small integers, exact in bf16, so that they go to the tensor cores as they are and the scale is applied to
32-bit sums. A type's function gets u8 pointers [R, 1] to the rows, a step number and the table of `code_table`, and
returns the planes of the step in weight order: plane p of step s holds weights s * step + p * width and on, as a tuple
(codes [R, width], scale f32 [R, 1], shift f32 [R, 1]); what a type lacks (see `Planes`) is left out.

Plane order follows the bytes: two codes of 16 bits share one 32-bit word of the block, so unpacking handles two at a
time: of the four bytes of every word the even ones come first, then the odd ones.
Source: ggml's block structs, by way of `quants/*.FIELDS`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.codebook4 import IQ4_VALUES

# ---- order ----------------------------------------------------------------------------------------------------------


@triton.jit
def plane_order(x):
    """x [n, width] in weight order -> plane order."""
    n: tl.constexpr = x.shape[0]
    width: tl.constexpr = x.shape[1]
    return x.reshape(n, width // 4, 2, 2).permute(0, 3, 1, 2).reshape(n, width)


@triton.jit
def weight_order(codes):
    """codes [n, width] in plane order -> weight order."""
    n: tl.constexpr = codes.shape[0]
    width: tl.constexpr = codes.shape[1]
    return codes.reshape(n, 2, width // 4, 2).permute(0, 2, 3, 1).reshape(n, width)


# ---- bytes ----------------------------------------------------------------------------------------------------------


@triton.jit
def words(at, N: tl.constexpr, ALIGN: tl.constexpr):
    """N little-endian words from u8 pointers `at` [R, 1] on: u32 [R, N].

    ALIGN is 4 where every pointer is a multiple of 4; else the aligned words around are read (none outside the range)
    and shifted together.
    """
    i = tl.arange(0, N)[None, :]
    if ALIGN == 4:
        return tl.load(at.to(tl.pointer_type(tl.uint32)) + i)
    skew = (at.to(tl.int64) & 3).to(tl.int32)
    base = (at - skew).to(tl.pointer_type(tl.uint32)) + i
    first = tl.load(base)
    second = tl.load(base + 1, mask=skew > 0, other=0)
    shift = (skew * 8).to(tl.uint32)
    return (first >> shift) | ((second << 1) << (31 - shift))


@triton.jit
def f16_at(at):
    """f16 at u8 pointers (multiples of 2), as f32."""
    return tl.load(at.to(tl.pointer_type(tl.float16))).to(tl.float32)


@triton.jit
def f16_of(word):
    """The f16 in the low half of u32, as f32."""
    return (word & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def moved(word, S: tl.constexpr):
    """u32 shifted right by S, or left by -S."""
    if S >= 0:
        return word >> S
    else:
        return word << -S


@triton.jit
def byte_of(word, B: tl.constexpr):
    """Byte B of u32 as i32, 0..255."""
    return ((word >> (8 * B)) & 0xFF).to(tl.int32)


# ---- codes ----------------------------------------------------------------------------------------------------------


@triton.jit
def pairs(even, odd):
    """bf16 bit patterns, two in each u32 [R, W] -> bf16 [R, 4 W] in plane order."""
    rows: tl.constexpr = even.shape[0]
    n: tl.constexpr = even.shape[1]
    e = tl.join(even.to(tl.uint16), (even >> 16).to(tl.uint16))
    o = tl.join(odd.to(tl.uint16), (odd >> 16).to(tl.uint16))
    return tl.join(e, o).permute(0, 3, 1, 2).reshape(rows, 4 * n).to(tl.bfloat16, bitcast=True)


@triton.jit
def biased(even, odd):
    """Codes 0..127, at bits 0 and 16 of u32 [R, W] -> bf16 [R, 4 W] of 128 + code: 0x4300 is 128 with a unit of 1."""
    return pairs(even | 0x43004300, odd | 0x43004300)


@triton.jit
def nibbles(q, S: tl.constexpr):
    """The low (S = 0) or high (S = 4) halves of all bytes of q u32 [R, W], biased."""
    return biased((q >> S) & 0x000F000F, (q >> (S + 8)) & 0x000F000F)


@triton.jit
def nibbles_and_fifth(q, S: tl.constexpr, qh, F: tl.constexpr):
    """As `nibbles`, with the fifth bit of weight j (of 16) at bit F + j of qh u32 [R, 1]."""
    j = tl.arange(0, 4)[None, :] * 4 + F
    # bits 0 and 2 go to 4 and 20; the product's other bits are masked off
    even = ((((qh >> j) & 5) * 0x40010) & 0x00100010) | ((q >> S) & 0x000F000F)
    odd = ((((qh >> (j + 1)) & 5) * 0x40010) & 0x00100010) | ((q >> (S + 8)) & 0x000F000F)
    return biased(even, odd)


@triton.jit
def looked_up(q, S: tl.constexpr, table):
    """As `nibbles`, but the nibbles are indices into `code_table`; no bias."""
    even = (q >> S) & 0x000F000F
    odd = (q >> (S + 8)) & 0x000F000F
    return pairs(tl.load(table + ((even | (even >> 12)) & 0xFF)), tl.load(table + ((odd | (odd >> 12)) & 0xFF)))


@triton.jit
def e2m1(q, S: tl.constexpr):
    """As `nibbles`, but the nibbles are E2M1 numbers, doubled; no bias.

    Their exponent and fraction sit on top of bf16's: 2^-126 times the number, subnormal where it is 0.5. Its negative zero stays
    negative.
    """
    even = (q >> S) & 0x000F000F
    odd = (q >> (S + 8)) & 0x000F000F
    even = ((even & 0x00070007) << 6) | ((even & 0x00080008) << 12)
    odd = ((odd & 0x00070007) << 6) | ((odd & 0x00080008) << 12)
    return pairs(even, odd) * 1.7014118346046923e38  # 2^127


@triton.jit
def signed_bytes(q):
    """All bytes of q u32 [R, W] as signed numbers, exact in bf16: (128 + low seven bits) - (128 or 256)."""
    low = pairs((q & 0x007F007F) | 0x43004300, ((q >> 8) & 0x007F007F) | 0x43004300)
    return low - pairs((q & 0x00800080) | 0x43004300, ((q >> 8) & 0x00800080) | 0x43004300)


# ---- blocks of 32 ---------------------------------------------------------------------------------------------------


@triton.jit
def _q4_0(row, step, table):
    at = row + step * 18
    d = f16_at(at)
    q = words(at + 2, 4, 2)
    return (nibbles(q, 0), d), (nibbles(q, 4), d)


@triton.jit
def _q4_1(row, step, table):
    at = row + step * 20
    head = words(at, 1, 4)
    d = f16_of(head)
    m = f16_of(head >> 16)
    q = words(at + 4, 4, 4)
    return (nibbles(q, 0), d, m), (nibbles(q, 4), d, m)


@triton.jit
def _q5_0(row, step, table):
    at = row + step * 22
    d = f16_at(at)
    qh = words(at + 2, 1, 2)
    q = words(at + 6, 4, 2)
    return (nibbles_and_fifth(q, 0, qh, 0), d), (nibbles_and_fifth(q, 4, qh, 16), d)


@triton.jit
def _q5_1(row, step, table):
    at = row + step * 24
    head = words(at, 1, 4)
    d = f16_of(head)
    m = f16_of(head >> 16)
    qh = words(at + 4, 1, 4)
    q = words(at + 8, 4, 4)
    return (nibbles_and_fifth(q, 0, qh, 0), d, m), (nibbles_and_fifth(q, 4, qh, 16), d, m)


@triton.jit
def _q8_0(row, step, table):
    at = row + step * 34
    return ((signed_bytes(words(at + 2, 8, 2)), f16_at(at)),)


@triton.jit
def _iq4_nl(row, step, table):
    at = row + step * 18
    d = f16_at(at)
    q = words(at + 2, 4, 2)
    return (looked_up(q, 0, table), d), (looked_up(q, 4, table), d)


@triton.jit
def _mxfp4(row, step, table):
    at = row + step * 17
    e = tl.load(at).to(tl.int32)
    # half of 2^(e - 127) as f32 bits; the two smallest are subnormal
    d = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23).to(tl.float32, bitcast=True)
    q = words(at + 1, 4, 1)
    return (e2m1(q, 0), d), (e2m1(q, 4), d)


# ---- super-blocks of 256 --------------------------------------------------------------------------------------------


@triton.jit
def _affine(d, scales, dmin, mins, B: tl.constexpr):
    return d * byte_of(scales, B).to(tl.float32), -(dmin * byte_of(mins, B).to(tl.float32))


@triton.jit
def _six_bits(at):
    """The eight scales and mins of Q4_K and Q5_K from 16 bytes of head: d, scales 0..3, 4..7, dmin, mins 0..3, 4..7."""
    head = words(at, 1, 4)
    s = words(at + 4, 1, 4)
    m = words(at + 8, 1, 4)
    halves = words(at + 12, 1, 4)
    scales = (halves & 0x0F0F0F0F) | ((s >> 2) & 0x30303030)
    mins = ((halves >> 4) & 0x0F0F0F0F) | ((m >> 2) & 0x30303030)
    return f16_of(head), s & 0x3F3F3F3F, scales, f16_of(head >> 16), m & 0x3F3F3F3F, mins


@triton.jit
def _q4_k_group(at, G: tl.constexpr, d, scales, dmin, mins):
    q = words(at + 16 + 32 * G, 8, 4)
    low = (nibbles(q, 0),) + _affine(d, scales, dmin, mins, 2 * G % 4)
    return low, (nibbles(q, 4),) + _affine(d, scales, dmin, mins, 2 * G % 4 + 1)


@triton.jit
def _q4_k(row, step, table):
    at = row + step * 144
    d, s0, s1, dmin, m0, m1 = _six_bits(at)
    first = _q4_k_group(at, 0, d, s0, dmin, m0) + _q4_k_group(at, 1, d, s0, dmin, m0)
    return first + _q4_k_group(at, 2, d, s1, dmin, m1) + _q4_k_group(at, 3, d, s1, dmin, m1)


@triton.jit
def _five_bits(q, S: tl.constexpr, qh, K: tl.constexpr):
    even = ((q >> S) & 0x000F000F) | (moved(qh, K - 4) & 0x00100010)
    odd = ((q >> (S + 8)) & 0x000F000F) | (moved(qh, K + 4) & 0x00100010)
    return biased(even, odd)


@triton.jit
def _q5_k_group(at, G: tl.constexpr, qh, d, scales, dmin, mins):
    q = words(at + 48 + 32 * G, 8, 4)
    low = (_five_bits(q, 0, qh, 2 * G),) + _affine(d, scales, dmin, mins, 2 * G % 4)
    return low, (_five_bits(q, 4, qh, 2 * G + 1),) + _affine(d, scales, dmin, mins, 2 * G % 4 + 1)


@triton.jit
def _q5_k(row, step, table):
    at = row + step * 176
    d, s0, s1, dmin, m0, m1 = _six_bits(at)
    qh = words(at + 16, 8, 4)
    first = _q5_k_group(at, 0, qh, d, s0, dmin, m0) + _q5_k_group(at, 1, qh, d, s0, dmin, m0)
    return first + _q5_k_group(at, 2, qh, d, s1, dmin, m1) + _q5_k_group(at, 3, qh, d, s1, dmin, m1)


@triton.jit
def _q6_k_plane(ql, S: tl.constexpr, qh, K: tl.constexpr, d, scales, B: tl.constexpr):
    even = ((ql >> S) & 0x000F000F) | (moved(qh, 2 * K - 4) & 0x00300030)
    odd = ((ql >> (S + 8)) & 0x000F000F) | (moved(qh, 2 * K + 4) & 0x00300030)
    scale = (byte_of(scales, B) ^ 128) - 128
    return biased(even, odd), d * scale.to(tl.float32)


@triton.jit
def _q6_k_half(at, H: tl.constexpr, d):
    """128 weights: 32 K + 16 T + j has its low bits in byte 32 (K % 2) + 16 T + j of ql, its top bits in 16 T + j of qh."""
    a0 = words(at + 64 * H, 4, 2)
    a1 = words(at + 64 * H + 16, 4, 2)
    b0 = words(at + 64 * H + 32, 4, 2)
    b1 = words(at + 64 * H + 48, 4, 2)
    h0 = words(at + 128 + 32 * H, 4, 2)
    h1 = words(at + 128 + 32 * H + 16, 4, 2)
    s0 = words(at + 192 + 8 * H, 1, 2)
    s1 = words(at + 196 + 8 * H, 1, 2)
    return (
        _q6_k_plane(a0, 0, h0, 0, d, s0, 0),
        _q6_k_plane(a1, 0, h1, 0, d, s0, 1),
        _q6_k_plane(b0, 0, h0, 1, d, s0, 2),
        _q6_k_plane(b1, 0, h1, 1, d, s0, 3),
        _q6_k_plane(a0, 4, h0, 2, d, s1, 0),
        _q6_k_plane(a1, 4, h1, 2, d, s1, 1),
        _q6_k_plane(b0, 4, h0, 3, d, s1, 2),
        _q6_k_plane(b1, 4, h1, 3, d, s1, 3),
    )


@triton.jit
def _q6_k(row, step, table):
    at = row + step * 210
    d = f16_at(at + 208)
    return _q6_k_half(at, 0, d) + _q6_k_half(at, 1, d)


@triton.jit
def _q2_k_plane(q, K: tl.constexpr, d, dmin, scales, B: tl.constexpr):
    code = biased(moved(q, 2 * K) & 0x00030003, moved(q, 2 * K + 8) & 0x00030003)
    both = byte_of(scales, B)
    return code, d * (both & 15).to(tl.float32), -(dmin * (both >> 4).to(tl.float32))


@triton.jit
def _q2_k_half(at, H: tl.constexpr, d, dmin):
    q0 = words(at + 16 + 32 * H, 4, 4)
    q1 = words(at + 32 + 32 * H, 4, 4)
    s0 = words(at + 8 * H, 1, 4)
    s1 = words(at + 8 * H + 4, 1, 4)
    return (
        _q2_k_plane(q0, 0, d, dmin, s0, 0),
        _q2_k_plane(q1, 0, d, dmin, s0, 1),
        _q2_k_plane(q0, 1, d, dmin, s0, 2),
        _q2_k_plane(q1, 1, d, dmin, s0, 3),
        _q2_k_plane(q0, 2, d, dmin, s1, 0),
        _q2_k_plane(q1, 2, d, dmin, s1, 1),
        _q2_k_plane(q0, 3, d, dmin, s1, 2),
        _q2_k_plane(q1, 3, d, dmin, s1, 3),
    )


@triton.jit
def _q2_k(row, step, table):
    at = row + step * 84
    head = words(at + 80, 1, 4)
    d = f16_of(head)
    dmin = f16_of(head >> 16)
    return _q2_k_half(at, 0, d, dmin) + _q2_k_half(at, 1, d, dmin)


@triton.jit
def _q3_k_plane(q, K: tl.constexpr, third, T: tl.constexpr, d, scales, B: tl.constexpr):
    even = (moved(q, 2 * K) & 0x00030003) | (moved(third, T - 2) & 0x00040004)
    odd = (moved(q, 2 * K + 8) & 0x00030003) | (moved(third, T + 6) & 0x00040004)
    return biased(even, odd), d * (byte_of(scales, B) - 32).to(tl.float32)


@triton.jit
def _q3_k_half(at, H: tl.constexpr, third0, third1, d, s0, s1):
    q0 = words(at + 32 + 32 * H, 4, 2)
    q1 = words(at + 48 + 32 * H, 4, 2)
    return (
        _q3_k_plane(q0, 0, third0, 4 * H, d, s0, 0),
        _q3_k_plane(q1, 0, third1, 4 * H, d, s0, 1),
        _q3_k_plane(q0, 1, third0, 4 * H + 1, d, s0, 2),
        _q3_k_plane(q1, 1, third1, 4 * H + 1, d, s0, 3),
        _q3_k_plane(q0, 2, third0, 4 * H + 2, d, s1, 0),
        _q3_k_plane(q1, 2, third1, 4 * H + 2, d, s1, 1),
        _q3_k_plane(q0, 3, third0, 4 * H + 3, d, s1, 2),
        _q3_k_plane(q1, 3, third1, 4 * H + 3, d, s1, 3),
    )


@triton.jit
def _q3_k(row, step, table):
    at = row + step * 110
    d = f16_at(at + 108)
    third0 = words(at, 4, 2)
    third1 = words(at + 16, 4, 2)
    a = words(at + 96, 1, 2)
    b = words(at + 100, 1, 2)
    top = words(at + 104, 1, 2)
    s0 = (a & 0x0F0F0F0F) | ((top << 4) & 0x30303030)
    s1 = (b & 0x0F0F0F0F) | ((top << 2) & 0x30303030)
    s2 = ((a >> 4) & 0x0F0F0F0F) | (top & 0x30303030)
    s3 = ((b >> 4) & 0x0F0F0F0F) | ((top >> 2) & 0x30303030)
    return _q3_k_half(at, 0, third0, third1, d, s0, s1) + _q3_k_half(at, 1, third0, third1, d, s2, s3)


@triton.jit
def _iq4_xs_group(at, G: tl.constexpr, d, top, low, table):
    scale = (((low >> (4 * G)) & 15) | (((top >> (2 * G)) & 3) << 4)).to(tl.int32) - 32
    s = d * scale.to(tl.float32)
    q = words(at + 8 + 16 * G, 4, 4)
    return (looked_up(q, 0, table), s), (looked_up(q, 4, table), s)


@triton.jit
def _iq4_xs(row, step, table):
    at = row + step * 136
    head = words(at, 1, 4)
    d = f16_of(head)
    top = head >> 16
    low = words(at + 4, 1, 4)
    a = _iq4_xs_group(at, 0, d, top, low, table) + _iq4_xs_group(at, 1, d, top, low, table)
    b = _iq4_xs_group(at, 2, d, top, low, table) + _iq4_xs_group(at, 3, d, top, low, table)
    c = _iq4_xs_group(at, 4, d, top, low, table) + _iq4_xs_group(at, 5, d, top, low, table)
    return a + b + c + _iq4_xs_group(at, 6, d, top, low, table) + _iq4_xs_group(at, 7, d, top, low, table)


# ---- plain types ----------------------------------------------------------------------------------------------------


@triton.jit
def _bf16(row, step, table):
    at = (row + step * 64).to(tl.pointer_type(tl.bfloat16))
    return ((tl.load(at + tl.arange(0, 32)[None, :]),),)


@triton.jit
def _f16(row, step, table):
    at = (row + step * 64).to(tl.pointer_type(tl.float16))
    return ((tl.load(at + tl.arange(0, 32)[None, :]).to(tl.float32),),)


@triton.jit
def _f32(row, step, table):
    at = (row + step * 128).to(tl.pointer_type(tl.float32))
    return ((tl.load(at + tl.arange(0, 32)[None, :]),),)


# ---- numbers --------------------------------------------------------------------------------------------------------


@triton.jit
def plane_values(
    plane, BIAS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_SHIFT: tl.constexpr, PLANE_ORDER: tl.constexpr
):
    """The weights of a plane in weight order: f32 [R, width].

    The bits of `quants/`, provided the kernel is compiled with `enable_fp_fusion=False` (it rounds the product first).
    """
    values = plane[0].to(tl.float32)
    if HAS_SCALE:
        values = (values - BIAS) * plane[1]
    if HAS_SHIFT:
        values = values + plane[2]
    if PLANE_ORDER:
        values = weight_order(values)
    return values


# ---- the table ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Planes:
    """How a type is unpacked: `unpack(row, step, table)` gives the `step // width` planes of `step` weights.

    bias: what codes are too large by. has_scale, has_shift: whether planes carry them (no scale: the codes are the
    weights). plane_order: codes are not in weight order. parts: codes are bf16 (1), or f32 that this many bf16 add up
    to exactly. align: what every row's first byte must be a multiple of.
    """

    unpack: Any
    step: int
    width: int
    bias: int
    has_scale: bool = True
    has_shift: bool = False
    plane_order: bool = True
    parts: int = 1
    align: int = 2


PLANES: Mapping[GGMLType, Planes] = MappingProxyType(
    {
        GGMLType.Q4_0: Planes(_q4_0, 32, 16, 128 + 8),
        GGMLType.Q4_1: Planes(_q4_1, 32, 16, 128, has_shift=True, align=4),
        GGMLType.Q5_0: Planes(_q5_0, 32, 16, 128 + 16),
        GGMLType.Q5_1: Planes(_q5_1, 32, 16, 128, has_shift=True, align=4),
        GGMLType.Q8_0: Planes(_q8_0, 32, 32, 0),
        GGMLType.Q2_K: Planes(_q2_k, 256, 16, 128, has_shift=True, align=4),
        GGMLType.Q3_K: Planes(_q3_k, 256, 16, 128 + 4),
        GGMLType.Q4_K: Planes(_q4_k, 256, 32, 128, has_shift=True, align=4),
        GGMLType.Q5_K: Planes(_q5_k, 256, 32, 128, has_shift=True, align=4),
        GGMLType.Q6_K: Planes(_q6_k, 256, 16, 128 + 32),
        GGMLType.IQ4_NL: Planes(_iq4_nl, 32, 16, 0),
        GGMLType.IQ4_XS: Planes(_iq4_xs, 256, 16, 0, align=4),
        GGMLType.MXFP4: Planes(_mxfp4, 32, 16, 0, align=1),
        GGMLType.BF16: Planes(_bf16, 32, 32, 0, has_scale=False, plane_order=False),
        GGMLType.F16: Planes(_f16, 32, 32, 0, has_scale=False, plane_order=False, parts=2),
        GGMLType.F32: Planes(_f32, 32, 32, 0, has_scale=False, plane_order=False, parts=3, align=4),
    }
)
"""The types the kernels read; a new type is one function and one line here."""


@cache
def code_table(device: torch.device) -> Tensor:
    """int32 [256] for IQ4_NL and IQ4_XS: the values of a byte's low and high half, two bf16 in one word, low first."""
    values = torch.tensor(IQ4_VALUES, dtype=torch.bfloat16).view(torch.int16)
    byte = torch.arange(256)
    both = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    return both.view(torch.int32)[:, 0].contiguous().to(device)
