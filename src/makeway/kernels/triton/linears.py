"""Several small matrices times the same rows of activations in one launch, where their types allow it.

Owns which matrices go together. Never changes a row's bits with the number of rows; they depend on the company of the
matrices, which is the same in every step of a model.
Hazard: tiles of all matrices of a launch share the scratch, so they are numbered through.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS, Scratch, can_multiply, linear, linear_tile, tiling
from makeway.kernels.triton.unpack import code_table, planes_for
from makeway.kernels.weight import Weight

TOGETHER = 4  # matrices of a launch
SMALL_ROWS = 2048  # of a matrix that does not fill the machine alone


@triton.jit(do_not_specialize=["n"])
def linears_kernel(
    x,
    raw0,
    raw1,
    raw2,
    raw3,
    out0,
    out1,
    out2,
    out3,
    rows0,
    rows1,
    rows2,
    rows3,
    parts,
    counters,
    table,
    n,
    n_cols,
    row_bytes,
    x_stride,
    x_part_stride,
    UNPACK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
    PARTS: tl.constexpr,
    X_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Up to four matrices of one type and width; a missing one has no rows."""
    begin(PDL)
    place = tl.program_id(0)
    end0 = tl.cdiv(rows0, ROWS)
    end1 = end0 + tl.cdiv(rows1, ROWS)
    end2 = end1 + tl.cdiv(rows2, ROWS)
    raw = tl.where(place < end0, raw0, tl.where(place < end1, raw1, tl.where(place < end2, raw2, raw3)))
    out = tl.where(place < end0, out0, tl.where(place < end1, out1, tl.where(place < end2, out2, out3)))
    n_rows = tl.where(place < end0, rows0, tl.where(place < end1, rows1, tl.where(place < end2, rows2, rows3)))
    before = tl.where(place < end0, 0, tl.where(place < end1, end0, tl.where(place < end2, end1, end2)))
    linear_tile(
        place - before,
        tl.program_id(1),
        place,
        x,
        tl.multiple_of(raw, 16),
        out,
        parts,
        counters,
        table,
        n,
        n_rows,
        n_cols,
        row_bytes,
        x_stride,
        x_part_stride,
        UNPACK,
        STEP,
        WIDTH,
        GROUP,
        BIAS,
        HAS_SCALE,
        HAS_SHIFT,
        PLANE_ORDER,
        PARTS,
        X_PARTS,
        ROWS,
        N,
        UNROLL,
        SPLIT,
    )


def groups(weights: Sequence[Weight]) -> list[list[int]]:
    """Which of the matrices go together, by index: small ones of one type."""
    found: list[list[int]] = []
    for i, w in enumerate(weights):
        for group in found:
            first = weights[group[0]]
            is_small = max(w.n_rows, first.n_rows) <= SMALL_ROWS
            if is_small and first.type == w.type and first.n_cols == w.n_cols and len(group) < TOGETHER:
                group.append(i)
                break
        else:
            found.append([i])
    return found


def linears(x: Tensor, weights: Sequence[Weight], *, scratch: Scratch) -> list[Tensor]:
    """x bf16 [parts, n <= 8, n_cols] times each transposed weight: f32 [n, n_rows] each; as `linear.linear` takes them,
    of at most SMALL_ROWS rows each unless there is only one."""
    outs: dict[int, Tensor] = {}
    for group in groups(weights):
        if len(group) == 1:
            outs[group[0]] = linear(x, weights[group[0]], scratch=scratch)
        else:
            outs |= dict(zip(group, _together(x, [weights[i] for i in group], scratch), strict=True))
    return [outs[i] for i in range(len(weights))]


def _together(x: Tensor, weights: list[Weight], scratch: Scratch) -> list[Tensor]:
    first = weights[0]
    x_parts, n, n_cols = x.shape
    assert 0 < n <= MAX_ROWS
    assert n_cols == first.n_cols
    assert x.stride(2) == 1
    assert all(can_multiply(w) and w.raw.is_contiguous() and w.raw.data_ptr() % 16 == 0 for w in weights)
    tiles = tiling(first.type, sum(w.n_rows for w in weights), n_cols)
    n_tiles = sum(-(-w.n_rows // tiles.rows) for w in weights)
    parts, counters = scratch.take(n_tiles * tiles.split * MAX_ROWS * tiles.rows if tiles.split > 1 else 0, n_tiles)
    outs = [torch.empty((n, w.n_rows), dtype=torch.float32, device=x.device) for w in weights]
    missing = TOGETHER - len(weights)
    linears_kernel[(n_tiles, tiles.split)](
        x,
        *[w.raw for w in weights],
        *[first.raw] * missing,
        *outs,
        *[outs[0]] * missing,
        *[w.n_rows for w in weights],
        *[0] * missing,
        parts,
        counters,
        code_table(x.device),
        n,
        n_cols,
        first.raw.shape[1],
        x.stride(1),
        x.stride(0),
        **planes_for(first.type, n_cols).arguments(),
        X_PARTS=x_parts,
        N=MAX_ROWS,
        **tiles.arguments(),
        enable_fp_fusion=True,
        **overlap(x.device),
    )
    return outs
