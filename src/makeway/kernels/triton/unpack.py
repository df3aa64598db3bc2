"""Device functions that turn the block bytes of a tile of rows into numbers, one function per type, and their table.

Owns the layouts as the kernels read them (`quants/` is the truth). Never multiplies by activations or writes memory.
Hazard: the codes of a plane come in *plane order*, not weight order; activations go through `plane_order`, or the codes
through `weight_order`.

A *plane* is 16 or 32 consecutive weights of each row that share one scale: weight = (code - bias) * scale + shift.
Codes are small integers, exact in bf16, so that they go to the tensor cores as they are and the scale is applied to
32-bit sums. A type's function gets u8 pointers [R, 1] to the rows, a step number and the table of `code_table`, and
returns the planes of the step in weight order: plane p of step s holds weights s * step + p * width and on, as a tuple
(codes [R, width], scale f32 [R, 1], shift f32 [R, 1]); what a type lacks (see `Planes`) is left out.

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

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels.triton import super_blocks
from makeway.kernels.triton.codes import (
    e2m1,
    f16_at,
    f16_of,
    later,
    looked_up,
    nibbles,
    nibbles_and_fifth,
    plane_order,
    signed_bytes,
    single_words,
    weight_order,
    words,
)
from makeway.quants.codebook4 import IQ4_VALUES

# ---- blocks of 32 ---------------------------------------------------------------------------------------------------


@triton.jit
def _q4_0_block(at, SKEW: tl.constexpr, table):
    d = f16_at(at)
    q = words(at + 2, 4, later(SKEW, 2))
    return (nibbles(q, 0), d), (nibbles(q, 4), d)


@triton.jit
def _q4_0(row, step, table):
    return _q4_0_block(row + step * 18, -1, table)


@triton.jit
def _q4_0_wide(row, step, table):
    at = row + step * 36
    return _q4_0_block(at, 0, table) + _q4_0_block(at + 18, 2, table)


@triton.jit
def _q4_1(row, step, table):
    at = row + step * 20
    head = words(at, 1, 0)
    d = f16_of(head)
    m = f16_of(head >> 16)
    q = single_words(at + 4, 4)
    return (nibbles(q, 0), d, m), (nibbles(q, 4), d, m)


@triton.jit
def _q5_0_block(at, SKEW: tl.constexpr, table):
    d = f16_at(at)
    qh = words(at + 2, 1, later(SKEW, 2))
    q = words(at + 6, 4, later(SKEW, 6))
    return (nibbles_and_fifth(q, 0, qh, 0), d), (nibbles_and_fifth(q, 4, qh, 16), d)


@triton.jit
def _q5_0(row, step, table):
    return _q5_0_block(row + step * 22, -1, table)


@triton.jit
def _q5_0_wide(row, step, table):
    at = row + step * 44
    return _q5_0_block(at, 0, table) + _q5_0_block(at + 22, 2, table)


@triton.jit
def _q5_1(row, step, table):
    at = row + step * 24
    head = words(at, 1, 0)
    d = f16_of(head)
    m = f16_of(head >> 16)
    qh = words(at + 4, 1, 0)
    q = single_words(at + 8, 4)
    return (nibbles_and_fifth(q, 0, qh, 0), d, m), (nibbles_and_fifth(q, 4, qh, 16), d, m)


@triton.jit
def _q8_0_block(at, SKEW: tl.constexpr, table):
    return ((signed_bytes(words(at + 2, 8, later(SKEW, 2))), f16_at(at)),)


@triton.jit
def _q8_0(row, step, table):
    return _q8_0_block(row + step * 34, -1, table)


@triton.jit
def _q8_0_wide(row, step, table):
    at = row + step * 68
    return _q8_0_block(at, 0, table) + _q8_0_block(at + 34, 2, table)


@triton.jit
def _iq4_nl_block(at, SKEW: tl.constexpr, table):
    d = f16_at(at)
    q = words(at + 2, 4, later(SKEW, 2))
    return (looked_up(q, 0, table), d), (looked_up(q, 4, table), d)


@triton.jit
def _iq4_nl(row, step, table):
    return _iq4_nl_block(row + step * 18, -1, table)


@triton.jit
def _iq4_nl_wide(row, step, table):
    at = row + step * 36
    return _iq4_nl_block(at, 0, table) + _iq4_nl_block(at + 18, 2, table)


@triton.jit
def _mxfp4_block(at, SKEW: tl.constexpr, table):
    e = tl.load(at).to(tl.int32)
    # half of 2^(e - 127) as f32 bits; the two smallest are subnormal
    d = tl.where(e < 2, 0x00200000 << tl.minimum(e, 1), (e - 1) << 23).to(tl.float32, bitcast=True)
    q = words(at + 1, 4, later(SKEW, 1))
    return (e2m1(q, 0), d), (e2m1(q, 4), d)


@triton.jit
def _mxfp4(row, step, table):
    return _mxfp4_block(row + step * 17, -1, table)


@triton.jit
def _mxfp4_wide(row, step, table):
    at = row + step * 68
    first = _mxfp4_block(at, 0, table) + _mxfp4_block(at + 17, 1, table)
    return first + _mxfp4_block(at + 34, 2, table) + _mxfp4_block(at + 51, 3, table)


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

    The bits of `quants/` up to the sign of zeros, provided the kernel is compiled with `enable_fp_fusion=False` (the
    product is rounded first).
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

    group: how many planes in a row share scale and shift. bias: what codes are too large by. has_scale, has_shift:
    whether planes carry them (no scale: the codes are the weights). plane_order: codes are not in weight order. parts:
    codes are bf16 (1), or f32 that this many bf16 add up to exactly. align: what every row's first byte must be a
    multiple of.
    """

    unpack: Any
    step: int
    width: int
    group: int
    bias: int
    has_scale: bool = True
    has_shift: bool = False
    plane_order: bool = True
    parts: int = 1
    align: int = 2

    def arguments(self, prefix: str = "") -> dict[str, Any]:
        """The compile-time arguments by which a kernel is told all this, each name with `prefix` before it."""
        values = {
            "UNPACK": self.unpack,
            "STEP": self.step,
            "WIDTH": self.width,
            "GROUP": self.group,
            "BIAS": self.bias,
            "HAS_SCALE": self.has_scale,
            "HAS_SHIFT": self.has_shift,
            "PLANE_ORDER": self.plane_order,
            "PARTS": self.parts,
        }
        return {prefix + name: value for name, value in values.items()}


PLANES: Mapping[GGMLType, Planes] = MappingProxyType(
    {
        GGMLType.Q4_0: Planes(_q4_0, 32, 16, 2, 128 + 8),
        GGMLType.Q4_1: Planes(_q4_1, 32, 16, 2, 128, has_shift=True, align=4),
        GGMLType.Q5_0: Planes(_q5_0, 32, 16, 2, 128 + 16),
        GGMLType.Q5_1: Planes(_q5_1, 32, 16, 2, 128, has_shift=True, align=4),
        GGMLType.Q8_0: Planes(_q8_0, 32, 32, 1, 0),
        GGMLType.Q2_K: Planes(super_blocks.q2_k, 128, 16, 1, 128, has_shift=True, align=4),
        GGMLType.Q3_K: Planes(super_blocks.q3_k, 128, 16, 1, 128 + 4),
        GGMLType.Q4_K: Planes(super_blocks.q4_k, 256, 32, 1, 128, has_shift=True, align=4),
        GGMLType.Q5_K: Planes(super_blocks.q5_k, 256, 32, 1, 128, has_shift=True, align=4),
        GGMLType.Q6_K: Planes(super_blocks.q6_k, 128, 16, 1, 128 + 32),
        GGMLType.IQ4_NL: Planes(_iq4_nl, 32, 16, 2, 0),
        GGMLType.IQ4_XS: Planes(super_blocks.iq4_xs, 128, 16, 2, 0, align=4),
        GGMLType.MXFP4: Planes(_mxfp4, 32, 16, 2, 0, align=1),
        GGMLType.BF16: Planes(_bf16, 32, 32, 1, 0, has_scale=False, plane_order=False),
        GGMLType.F16: Planes(_f16, 32, 32, 1, 0, has_scale=False, plane_order=False, parts=2),
        GGMLType.F32: Planes(_f32, 32, 32, 1, 0, has_scale=False, plane_order=False, parts=3, align=4),
    }
)
"""The types the kernels read; a new type is one function and one line here."""

_WIDE: Mapping[GGMLType, Planes] = MappingProxyType(
    {
        GGMLType.Q4_0: Planes(_q4_0_wide, 64, 16, 2, 128 + 8, align=4),
        GGMLType.Q5_0: Planes(_q5_0_wide, 64, 16, 2, 128 + 16, align=4),
        GGMLType.Q8_0: Planes(_q8_0_wide, 64, 32, 1, 0, align=4),
        GGMLType.Q3_K: Planes(super_blocks.q3_k_even, 128, 16, 1, 128 + 4, align=4),
        GGMLType.Q6_K: Planes(super_blocks.q6_k_even, 128, 16, 1, 128 + 32, align=4),
        GGMLType.IQ4_NL: Planes(_iq4_nl_wide, 64, 16, 2, 0, align=4),
        GGMLType.MXFP4: Planes(_mxfp4_wide, 128, 16, 2, 0, align=4),
    }
)


def planes_for(kind: GGMLType, n_cols: int) -> Planes:
    """How to unpack rows of n_cols weights that start at a multiple of 4.

    Where a row is a whole number of words, every row starts at a multiple of 4 too, so the compiler can know where the
    words of blocks with an odd number of bytes or half words lie: small ones are taken by twos or fours, large ones
    shifted alike for a whole tile. Raises KeyError for a type that is not in PLANES.
    """
    wide = _WIDE.get(kind)
    fits = wide is not None and n_cols % wide.step == 0 and row_bytes(kind, n_cols) % 4 == 0
    return wide if wide is not None and fits else PLANES[kind]


@cache
def code_table(device: torch.device) -> Tensor:
    """int32 [256] for IQ4_NL and IQ4_XS: the values of a byte's low and high half, two bf16 in one word, low first."""
    values = torch.tensor(IQ4_VALUES, dtype=torch.bfloat16).view(torch.int16)
    byte = torch.arange(256)
    both = torch.stack((values[byte & 15], values[byte >> 4]), dim=1)
    return both.view(torch.int32)[:, 0].contiguous().to(device)


__all__ = ["PLANES", "Planes", "code_table", "plane_order", "plane_values", "planes_for", "weight_order"]
