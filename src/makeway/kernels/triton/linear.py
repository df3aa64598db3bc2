"""Matrix times up to eight rows of activations, straight from the quantised bytes.

Owns the inner product that all decode kernels share, and the fixed table of tilings. Never tunes itself, and never
looks at the number of rows: a row's bits are the same with 1, 2, 4 or 8 rows.
Hazard: with a split the last program of a tile to arrive adds all parts; counters must be zero before, and are after.

The product runs on the tensor cores: integer codes, exact in bf16, times activations in bf16 (f32 activations as the
sum of two bf16, see `split`), sums in f32; scales and shifts are applied to the f32 sums, plane by plane, so nothing
of the weight is rounded. The sum of activations that the shift needs is a product with ones, for it comes out in place.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.unpack import PLANES, code_table, plane_order, planes_for
from makeway.kernels.weight import Weight

MAX_ROWS = 8  # of activations: the N of the tensor core's product


@triton.jit
def dot_parts(codes, x, acc, PARTS: tl.constexpr):
    """acc f32 [R, N] + codes [R, K] times x bf16 [K, N]; codes in f32 are multiplied as a sum of PARTS bf16."""
    rest = codes
    for j in tl.static_range(PARTS):
        part = rest.to(tl.bfloat16)
        if j < PARTS - 1:
            rest = rest - part.to(tl.float32)
        acc = tl.dot(part, x, acc)
    return acc


@triton.jit
def ones_like(codes):
    """Ones in bf16, made from the codes, so that the compiler lays both out alike and x once for both products."""
    return ((codes.to(tl.uint16, bitcast=True) | 0x3F80) & 0x3F80).to(tl.bfloat16, bitcast=True)


@triton.jit
def product(
    weights,
    x,
    x_part_stride,
    first,
    last,
    table,
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
):
    """Steps first .. last - 1 of a tile of rows times x: f32 [ROWS, N].

    weights: u8 pointers [ROWS, 1] to rows; x: pointers [N, 1] to rows of bf16 activations (any row where there is
    none: columns of the product do not mix), further parts of them x_part_stride on. last - first is a multiple of
    UNROLL.
    """
    acc = tl.zeros([ROWS, N], tl.float32)
    k = tl.arange(0, WIDTH)[None, :]
    for at in range(first, last, UNROLL):
        for u in tl.static_range(UNROLL):
            planes = UNPACK(weights, at + u, table)
            for g in tl.static_range(STEP // WIDTH // GROUP):
                total = tl.zeros([ROWS, N], tl.float32)
                sums = tl.zeros([ROWS, N], tl.float32)
                for j in tl.static_range(GROUP):
                    for i in tl.static_range(X_PARTS):
                        part = tl.load(x + i * x_part_stride + (at + u) * STEP + (g * GROUP + j) * WIDTH + k)
                        if PLANE_ORDER:
                            part = plane_order(part)
                        part = tl.trans(part)
                        total = dot_parts(planes[g * GROUP + j][0], part, total, PARTS)
                        if HAS_SHIFT or BIAS != 0:
                            sums = tl.dot(ones_like(planes[g * GROUP + j][0]), part, sums)
                if HAS_SCALE:
                    scale = planes[g * GROUP][1]
                    acc += total * scale
                    if HAS_SHIFT:
                        acc += sums * (planes[g * GROUP][2] - BIAS * scale)
                    elif BIAS != 0:
                        acc += sums * (-BIAS * scale)
                else:
                    acc += total
    return acc


@triton.jit
def arrived_last(counter, n_parts):
    """Whether this program is the last of n_parts to come here; then all that the others wrote before is visible.

    The counter is zero again afterwards, for the next launch.
    """
    tl.debug_barrier()  # every thread's writes come before the one that counts
    last = tl.atomic_add(counter, 1, sem="acq_rel") == n_parts - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def linear_tile(
    tile,
    part,
    place,
    x,
    raw,
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
):
    """One tile of ROWS rows and one of SPLIT parts of the columns; `place`: the tile's among all of the launch."""
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < n_rows)[:, None]
    row = tl.minimum(row, n_rows - 1)[:, None]
    n_steps = n_cols // STEP
    per_part = tl.cdiv(n_steps, SPLIT * UNROLL) * UNROLL
    first = part * per_part
    last = tl.minimum(first + per_part, n_steps)
    column = tl.arange(0, N)
    acc = product(
        raw + row.to(tl.int64) * row_bytes,
        x + tl.minimum(column, n - 1)[:, None] * x_stride,
        x_part_stride,
        first,
        last,
        table,
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
    )
    column = column[None, :]
    target = out + column * n_rows + row
    mask = inside & (column < n)
    if SPLIT == 1:
        tl.store(target, acc, mask=mask)
    else:
        part_at = parts + place * SPLIT * N * ROWS + column * ROWS + tl.arange(0, ROWS)[:, None]
        tl.store(part_at + part * N * ROWS, acc, mask=mask)
        if arrived_last(counters + place, SPLIT):
            acc = tl.load(part_at, mask=mask, other=0.0, cache_modifier=".cg")
            for i in tl.static_range(1, SPLIT):
                acc += tl.load(part_at + i * N * ROWS, mask=mask, other=0.0, cache_modifier=".cg")
            tl.store(target, acc, mask=mask)


@triton.jit(do_not_specialize=["n"])  # one binary for every number of rows
def linear_kernel(
    x,
    raw,
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
    """One matrix."""
    begin(PDL)
    tile = tl.program_id(0)
    linear_tile(
        tile,
        tl.program_id(1),
        tile,
        x,
        raw,
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


@dataclass(frozen=True)
class Tiling:
    """rows of the matrix in a tile; parts its columns are split into; steps unrolled; warps and pipeline stages."""

    rows: int
    split: int
    unroll: int
    warps: int
    stages: int

    def arguments(self) -> dict[str, int]:
        """As keyword arguments of a kernel."""
        return {
            "ROWS": self.rows,
            "UNROLL": self.unroll,
            "SPLIT": self.split,
            "num_warps": self.warps,
            "num_stages": self.stages,
        }


def divisor(n: int, most: int) -> int:
    """The largest divisor of n that is no larger than `most`."""
    return max(d for d in range(1, min(n, most) + 1) if n % d == 0)


PROGRAMS = 1056  # of 16 rows, wanted in flight: eight for each of the H200's 132 multiprocessors


def rows_and_stages(kind: GGMLType) -> tuple[int, int]:
    """Rows of a tile (a warp for every 16) and pipeline stages.

    Copies to shared memory ahead of their use pay only where much of a row is read at a time; blocks of single words
    go straight to registers, in tiles of one warp (docs/kernels.md has what was measured).
    """
    if not PLANES[kind].has_scale:
        return 32, 3
    return (32, 2) if kind in (GGMLType.Q4_K, GGMLType.Q5_K) else (16, 1)


def tiling(kind: GGMLType, n_rows: int, n_cols: int) -> Tiling:
    """The fixed tiling of a matrix: a function of its type and shape only."""
    planes = planes_for(kind, n_cols)
    n_steps = n_cols // planes.step
    rows, stages = rows_and_stages(kind)
    tiles = -(-n_rows // rows)
    unroll = divisor(n_steps, max(1, 128 // planes.step))
    split = divisor(n_steps // unroll, max(1, -(-PROGRAMS * 16 // (rows * tiles))))
    return Tiling(rows=rows, split=split, unroll=unroll, warps=rows // 16, stages=stages)


class Scratch:
    """Room for the parts of split products, used by one launch at a time on one stream."""

    def __init__(self, device: torch.device, *, n_parts: int = 1 << 22, n_tiles: int = 1 << 14) -> None:
        """n_parts: float32 values; n_tiles: counters. Raises EngineFailed through `take` when a launch needs more."""
        self.parts = torch.empty(n_parts, dtype=torch.float32, device=device)
        self.counters = torch.zeros(n_tiles, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.parts.nbytes + self.counters.nbytes

    def take(self, n_parts: int, n_tiles: int) -> tuple[Tensor, Tensor]:
        """parts and counters, large enough."""
        assert n_parts <= self.parts.numel()
        assert n_tiles <= self.counters.numel()
        return self.parts, self.counters


def can_multiply(weight: Weight) -> bool:
    """Whether `linear` has this type and shape."""
    return weight.type in PLANES and weight.n_cols % PLANES[weight.type].step == 0 and weight.n_cols > 0


@triton.jit(do_not_specialize=["n"])
def split_kernel(x, out, n, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out bf16 [2, n]: x f32 [n] rounded, and the rest rounded."""
    begin(PDL)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    rounded = value.to(tl.bfloat16)
    tl.store(out + i, rounded, mask=i < n)
    tl.store(out + n + i, (value - rounded.to(tl.float32)).to(tl.bfloat16), mask=i < n)


def split(x: Tensor) -> Tensor:
    """f32 [n, d] as a sum of two bf16, good to 2^-17 of each value: bf16 [2, n, d]."""
    assert x.dtype == torch.float32
    assert x.is_contiguous()
    out = torch.empty((2, *x.shape), dtype=torch.bfloat16, device=x.device)
    split_kernel[(triton.cdiv(x.numel(), 1024),)](x, out, x.numel(), BLOCK=1024, num_warps=4, **overlap(x.device))
    return out


def as_parts(x: Tensor) -> Tensor:
    """Activations as kernels take them: bf16 [parts, n, d] from bf16 or f32 [n, d], or as they are."""
    if x.dtype == torch.float32:
        return split(x)
    assert x.dtype == torch.bfloat16
    return x if x.dim() == 3 else x[None]


def linear(x: Tensor, weight: Weight, *, scratch: Scratch, out: Tensor | None = None, **options: Any) -> Tensor:
    """x times the transposed weight: f32 [n, n_rows]. x: bf16 or f32 [n <= 8, n_cols], or bf16 [parts, n, n_cols].

    The weight is on the device, its first byte at a multiple of 16. `options` replace fields of the tiling (benches).
    """
    x = as_parts(x)
    x_parts, n, n_cols = x.shape
    assert 0 < n <= MAX_ROWS
    assert n_cols == weight.n_cols
    assert x.stride(2) == 1
    assert can_multiply(weight)
    assert weight.raw.is_contiguous()
    assert weight.raw.data_ptr() % 16 == 0
    planes = planes_for(weight.type, n_cols)
    n_rows = weight.n_rows
    tiles = tiling(weight.type, n_rows, n_cols)
    if options:
        tiles = Tiling(**{**vars(tiles), **options})
    n_tiles = -(-n_rows // tiles.rows)
    parts, counters = scratch.take(n_tiles * tiles.split * MAX_ROWS * tiles.rows if tiles.split > 1 else 0, n_tiles)
    if out is None:
        out = torch.empty((n, n_rows), dtype=torch.float32, device=x.device)
    assert out.shape == (n, n_rows)
    assert out.is_contiguous()
    linear_kernel[(n_tiles, tiles.split)](
        x,
        weight.raw,
        out,
        parts,
        counters,
        code_table(x.device),
        n,
        n_rows,
        n_cols,
        weight.raw.shape[1],
        x.stride(1),
        x.stride(0),
        **planes.arguments(),
        X_PARTS=x_parts,
        N=MAX_ROWS,
        **tiles.arguments(),
        enable_fp_fusion=True,
        **overlap(x.device),
    )
    return out
