"""Device functions that unpack the types with super-blocks of 256 weights: Q2_K .. Q6_K, IQ4_XS.

Owns their layouts as the kernels read them; `unpack` says what a function gets and returns, and has the table.
Hazard: float32 order is part of the format: d * scale is rounded before it meets the code.
"""

import triton
import triton.language as tl

from makeway.kernels.triton.codes import (
    biased,
    byte_of,
    f16_at,
    f16_of,
    looked_up,
    moved,
    nibbles,
    single_words,
    skew_of,
    skewed_words,
    words,
)


@triton.jit
def _affine(d, scales, dmin, mins, B: tl.constexpr):
    return d * byte_of(scales, B).to(tl.float32), -(dmin * byte_of(mins, B).to(tl.float32))


@triton.jit
def _six_bits(at):
    """The eight scales and mins of Q4_K and Q5_K from 16 bytes of head: d, scales 0..3, 4..7, dmin, mins 0..3, 4..7."""
    head = words(at, 1, 0)
    s = words(at + 4, 1, 0)
    m = words(at + 8, 1, 0)
    halves = words(at + 12, 1, 0)
    scales = (halves & 0x0F0F0F0F) | ((s >> 2) & 0x30303030)
    mins = ((halves >> 4) & 0x0F0F0F0F) | ((m >> 2) & 0x30303030)
    return f16_of(head), s & 0x3F3F3F3F, scales, f16_of(head >> 16), m & 0x3F3F3F3F, mins


@triton.jit
def _q4_k_group(at, G: tl.constexpr, d, scales, dmin, mins):
    q = words(at + 16 + 32 * G, 8, 0)
    low = (nibbles(q, 0),) + _affine(d, scales, dmin, mins, 2 * G % 4)
    return low, (nibbles(q, 4),) + _affine(d, scales, dmin, mins, 2 * G % 4 + 1)


@triton.jit
def q4_k(row, step, table):
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
    q = words(at + 48 + 32 * G, 8, 0)
    low = (_five_bits(q, 0, qh, 2 * G),) + _affine(d, scales, dmin, mins, 2 * G % 4)
    return low, (_five_bits(q, 4, qh, 2 * G + 1),) + _affine(d, scales, dmin, mins, 2 * G % 4 + 1)


@triton.jit
def q5_k(row, step, table):
    at = row + step * 176
    d, s0, s1, dmin, m0, m1 = _six_bits(at)
    qh = words(at + 16, 8, 0)
    first = _q5_k_group(at, 0, qh, d, s0, dmin, m0) + _q5_k_group(at, 1, qh, d, s0, dmin, m0)
    return first + _q5_k_group(at, 2, qh, d, s1, dmin, m1) + _q5_k_group(at, 3, qh, d, s1, dmin, m1)


@triton.jit
def _q6_k_plane(ql, S: tl.constexpr, qh, K: tl.constexpr, d, scales, B: tl.constexpr):
    even = ((ql >> S) & 0x000F000F) | (moved(qh, 2 * K - 4) & 0x00300030)
    odd = ((ql >> (S + 8)) & 0x000F000F) | (moved(qh, 2 * K + 4) & 0x00300030)
    scale = (byte_of(scales, B) ^ 128) - 128
    return biased(even, odd), d * scale.to(tl.float32)


@triton.jit
def _q6_k_half(at, half, skew):
    """128 weights: weight 32 K + 16 T + j: low bits in byte 32 (K % 2) + 16 T + j of ql, top bits in 16 T + j of qh."""
    d = f16_at(at + 208)
    low = at + 64 * half
    a0 = skewed_words(low, skew, 4)
    a1 = skewed_words(low + 16, skew, 4)
    b0 = skewed_words(low + 32, skew, 4)
    b1 = skewed_words(low + 48, skew, 4)
    top = at + 128 + 32 * half
    h0 = skewed_words(top, skew, 4)
    h1 = skewed_words(top + 16, skew, 4)
    s0 = skewed_words(at + 192 + 8 * half, skew, 1)
    s1 = skewed_words(at + 196 + 8 * half, skew, 1)
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
def q6_k(row, step, table):
    at = row + step // 2 * 210
    return _q6_k_half(at, step % 2, skew_of(at))


@triton.jit
def q6_k_even(row, step, table):
    return _q6_k_half(row + step // 2 * 210, step % 2, step // 2 % 2 * 2)


@triton.jit
def _q2_k_plane(q, K: tl.constexpr, d, dmin, scales, B: tl.constexpr):
    code = biased(moved(q, 2 * K) & 0x00030003, moved(q, 2 * K + 8) & 0x00030003)
    both = byte_of(scales, B)
    return code, d * (both & 15).to(tl.float32), -(dmin * (both >> 4).to(tl.float32))


@triton.jit
def q2_k(row, step, table):
    at = row + step // 2 * 84
    half = step % 2
    head = words(at + 80, 1, 0)
    d = f16_of(head)
    dmin = f16_of(head >> 16)
    q0 = words(at + 16 + 32 * half, 4, 0)
    q1 = words(at + 32 + 32 * half, 4, 0)
    s0 = words(at + 8 * half, 1, 0)
    s1 = words(at + 8 * half + 4, 1, 0)
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
def _q3_k_plane(q, third, K: tl.constexpr, d, scales, B: tl.constexpr):
    even = (moved(q, 2 * K) & 0x00030003) | (moved(third, K - 2) & 0x00040004)
    odd = (moved(q, 2 * K + 8) & 0x00030003) | (moved(third, K + 6) & 0x00040004)
    return biased(even, odd), d * (byte_of(scales, B) - 32).to(tl.float32)


@triton.jit
def _q3_k_half(at, half, skew):
    d = f16_at(at + 108)
    third0 = skewed_words(at, skew, 4) >> (4 * half)
    third1 = skewed_words(at + 16, skew, 4) >> (4 * half)
    q0 = skewed_words(at + 32 + 32 * half, skew, 4)
    q1 = skewed_words(at + 48 + 32 * half, skew, 4)
    a = skewed_words(at + 96, skew, 1)
    b = skewed_words(at + 100, skew, 1)
    top = skewed_words(at + 104, skew, 1)
    s0 = ((a >> (4 * half)) & 0x0F0F0F0F) | (tl.where(half == 0, top << 4, top) & 0x30303030)
    s1 = ((b >> (4 * half)) & 0x0F0F0F0F) | (tl.where(half == 0, top << 2, top >> 2) & 0x30303030)
    return (
        _q3_k_plane(q0, third0, 0, d, s0, 0),
        _q3_k_plane(q1, third1, 0, d, s0, 1),
        _q3_k_plane(q0, third0, 1, d, s0, 2),
        _q3_k_plane(q1, third1, 1, d, s0, 3),
        _q3_k_plane(q0, third0, 2, d, s1, 0),
        _q3_k_plane(q1, third1, 2, d, s1, 1),
        _q3_k_plane(q0, third0, 3, d, s1, 2),
        _q3_k_plane(q1, third1, 3, d, s1, 3),
    )


@triton.jit
def q3_k(row, step, table):
    at = row + step // 2 * 110
    return _q3_k_half(at, step % 2, skew_of(at))


@triton.jit
def q3_k_even(row, step, table):
    return _q3_k_half(row + step // 2 * 110, step % 2, step // 2 % 2 * 2)


@triton.jit
def _iq4_xs_group(at, G: tl.constexpr, d, top, low, table):
    scale = (((low >> (4 * G)) & 15) | (((top >> (2 * G)) & 3) << 4)).to(tl.int32) - 32
    s = d * scale.to(tl.float32)
    q = single_words(at + 16 * G, 4)
    return (looked_up(q, 0, table), s), (looked_up(q, 4, table), s)


@triton.jit
def iq4_xs(row, step, table):
    block = row + step // 2 * 136
    half = step % 2
    head = words(block, 1, 0)
    d = f16_of(head)
    top = head >> (16 + 8 * half)
    low = words(block + 4, 1, 0) >> (16 * half)
    at = block + 8 + 64 * half
    first = _iq4_xs_group(at, 0, d, top, low, table) + _iq4_xs_group(at, 1, d, top, low, table)
    return first + _iq4_xs_group(at, 2, d, top, low, table) + _iq4_xs_group(at, 3, d, top, low, table)
