"""Quantised matrices of many experts, or one matrix, decoded to bf16 scratch for the tensor cores.

Owns where a matrix lies in an expert's bytes, and the rounding. Never multiplies; never reads an expert nobody chose.
Hazard: compiled without fused multiply-adds, for the order of float32 operations is part of a quantised format.
"""

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.unpack import code_table, plane_values, planes_for, weight_order


@dataclass(frozen=True)
class QuantMatrix:
    """One matrix of many experts: [n_rows, n_cols] of `type`, `inside` bytes behind each expert's first byte."""

    type: GGMLType
    n_rows: int
    n_cols: int
    inside: int = 0

    @property
    def nbytes(self) -> int:
        return self.n_rows * row_bytes(self.type, self.n_cols)

    @property
    def n_values(self) -> int:
        return self.n_rows * self.n_cols


DECODE_ROWS = 32
DECODE_STEPS = 256  # weights of a row in one program, at least


def decode_matrices(
    room: Tensor,
    where: Tensor,
    matrix: QuantMatrix,
    *,
    out: Tensor,
    counted: Tensor,
    terms: int = 1,
    term_stride: int = 0,
) -> None:
    """out bf16 [experts, >= n_rows * n_cols]: the matrix of each expert, rounded from `quants/`'s float32.

    With more `terms`, `term_stride` values further on the rounded rest that the first leaves, and so on: float32 is the
    sum of three.

    room u8: the arena; where int64 [experts]: an expert's first byte in it, a multiple of 16. counted int32
    [experts + 1]: offsets of the sort; an expert without pairs is neither read nor written.
    """
    tiles, sizes, constants = _launch(matrix)
    decode_kernel[(*tiles, where.shape[0])](
        room,
        where,
        counted,
        out,
        code_table(room.device),
        *sizes,
        out.stride(0),
        term_stride,
        **constants,
        TERMS=terms,
        STACKED=False,
    )


def decode_stack(
    room: Tensor,
    where: Tensor,
    highest: QuantMatrix,
    *,
    out: Tensor,
    rows: Tensor,
    terms: int,
    term_stride: int,
) -> None:
    """As `decode_matrices` for matrices of one type and width that have different numbers of rows, `highest` the most:
    out bf16 [values] gets them one below the other. rows int32 [matrices + 1]: the first row of each in `out`, and the
    end.
    """
    tiles, sizes, constants = _launch(highest)
    decode_kernel[(*tiles, where.shape[0])](
        room,
        where,
        rows,
        out,
        code_table(room.device),
        *sizes,
        0,
        term_stride,
        **constants,
        TERMS=terms,
        STACKED=True,
    )


@cache
def _launch(matrix: QuantMatrix) -> tuple[tuple[int, int], tuple[int, ...], dict[str, Any]]:
    """Programs by rows and steps, sizes and compile-time arguments of the kernel for a matrix."""
    planes = planes_for(matrix.type, matrix.n_cols)
    aligned = math.gcd(16, matrix.inside)
    bytes_of_row = row_bytes(matrix.type, matrix.n_cols)
    assert aligned % planes.align == 0
    assert bytes_of_row % planes.align == 0
    assert matrix.n_cols % planes.step == 0
    n_steps = matrix.n_cols // planes.step
    per_program = min(n_steps, max(1, DECODE_STEPS // planes.step))
    constants = planes.arguments() | {
        "ALIGNED": aligned,
        "TOGETHER": math.gcd(4, planes.step // planes.width),
        "STEPS": per_program,
        "ROWS": DECODE_ROWS,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    del constants["GROUP"], constants["PARTS"]
    tiles = -(-matrix.n_rows // DECODE_ROWS), -(-n_steps // per_program)
    return tiles, (matrix.inside, bytes_of_row, matrix.n_rows, matrix.n_cols, n_steps), constants


@triton.jit
def rounded(
    plane,
    TERM: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
):
    """A plane's weights, in weight order, as bf16 [R, width]; TERM 1: the rest that 0 leaves, and so on."""
    rest = plane_values(plane, BIAS, HAS_SCALE, HAS_SHIFT, False).to(tl.float32)
    for _ in tl.static_range(TERM):
        rest -= rest.to(tl.bfloat16).to(tl.float32)
    values = rest.to(tl.bfloat16)
    if PLANE_ORDER:
        values = weight_order(values)
    return values


@triton.jit
def beside(a, b):
    """a, b [n, width] -> [n, 2 width]."""
    n: tl.constexpr = a.shape[0]
    width: tl.constexpr = a.shape[1]
    return tl.join(a, b).permute(0, 2, 1).reshape(n, 2 * width)


@quick
@triton.jit(do_not_specialize=["n_rows"], do_not_specialize_on_alignment=["where", "counted"])
def decode_kernel(
    room,
    where,
    counted,
    out,
    table,
    inside,
    row_bytes,
    n_rows,
    n_cols,
    n_steps,
    out_stride,
    term_stride,
    UNPACK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TERMS: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
    STACKED: tl.constexpr,
):
    """STEPS steps of ROWS rows of one expert's matrix, as bf16. STACKED: `counted` tells which rows of `out` it has."""
    expert = tl.program_id(2)
    begin = tl.load(counted + expert)
    end = tl.load(counted + expert + 1)
    if begin == end:
        return
    to = expert.to(tl.int64) * out_stride
    if STACKED:
        n_rows = end - begin
        to = begin.to(tl.int64) * n_cols
        if tl.program_id(0) * ROWS >= n_rows:
            return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    start = tl.multiple_of(tl.load(where + expert) + inside, ALIGNED)
    source = room + start + tl.minimum(rows, n_rows - 1) * row_bytes
    columns = tl.arange(0, WIDTH * TOGETHER)[None, :]
    target = out + to + rows * n_cols + columns
    for i in range(STEPS):
        step = tl.program_id(1) * STEPS + i
        planes = UNPACK(source, tl.minimum(step, n_steps - 1), table)
        valid = (rows < n_rows) & (columns + step * STEP < n_cols)
        for p in tl.static_range(0, STEP // WIDTH, TOGETHER):
            for term in tl.static_range(TERMS):
                values = rounded(planes[p], term, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
                if TOGETHER > 1:
                    values = beside(values, rounded(planes[p + 1], term, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER))
                if TOGETHER > 2:
                    c = rounded(planes[p + 2], term, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
                    d = rounded(planes[p + 3], term, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
                    values = beside(values, beside(c, d))
                tl.store(target + term * term_stride + step * STEP + p * WIDTH, values, mask=valid)
