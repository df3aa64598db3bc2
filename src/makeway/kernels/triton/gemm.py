"""Matrix products of a piece of experts with all rows that chose them, on tensor cores.

Owns the tile configuration and the map from programs to tiles. Never waits for the device: how many rows an expert has
is read there, and the grid is the most that can be needed.
Hazard: numbers that change from call to call must not be specialised, or Triton would compile again in the middle of a
prompt. Weights are bf16 here; a quantised piece is decoded first (`decode`).
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.sort import SortedPairs

VARYING = ["first", "n_experts", "skip", "capacity"]  # from launch to launch


@dataclass(frozen=True)
class Tile:
    """A program's part: `rows` of the left matrix by `columns` of the product, `depth` of the sum at a time.
    `described`: operands that lie in whole rows are loaded through tensor descriptors (on Hopper: by its memory
    accelerator), which spares the threads all addresses.

    A row's bits depend on `depth` and the instruction, not on the rows beside it: the tile is fixed by kernel, matrix
    and architecture, whatever the number of rows.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    described: bool = False


@dataclass(frozen=True)
class Tiles:
    """The tiles of an architecture: experts' `gate_up` (two products at once) and `down`; `linear`, and `narrow` for
    linears of few outputs or rows, which would leave most of the GPU idle with large tiles."""

    gate_up: Tile
    down: Tile
    linear: Tile
    narrow: Tile


AMPERE = Tiles(
    gate_up=Tile(64, 64, 64, warps=4, stages=3),
    down=Tile(64, 128, 64, warps=4, stages=3),
    linear=Tile(64, 128, 64, warps=4, stages=3),
    narrow=Tile(64, 64, 64, warps=4, stages=3),
)
HOPPER = Tiles(
    gate_up=Tile(128, 128, 64, warps=8, stages=4, described=True),
    down=Tile(128, 256, 64, warps=8, stages=4, described=True),
    linear=Tile(128, 256, 64, warps=8, stages=3, described=True),
    narrow=Tile(128, 64, 64, warps=4, stages=4, described=True),
)


def described(matrix: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of bf16 [n, m], rows of any stride, for loads of [rows, columns]; what lies outside is zero."""
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns])


def tiles_of(device: torch.device) -> Tiles:
    """The one table of tile configurations, by architecture; Triton's interpreter (CPU tensors) takes the smaller."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return HOPPER
    return AMPERE


@dataclass(frozen=True)
class Round:
    """Places offsets[first] + skip ... below offsets[last], at most `capacity` of them, at a time in scratch.
    `bins`: at least last - first, a power of two; by it kernels are compiled, so it should be one of few. `n_used`: how
    many experts from first to last have rows, where the host knows."""

    pairs: SortedPairs
    first: int
    last: int
    skip: int
    capacity: int
    bins: int
    n_used: int | None = None

    def n_tiles(self, tile: Tile) -> int:
        """The most row tiles the round can have: every expert may leave one unfilled."""
        return -(-self.capacity // tile.rows) + (self.last - self.first if self.n_used is None else self.n_used)


@dataclass(frozen=True)
class PlainMatrices:
    """bf16 matrices of the experts of a part. flat bf16: the memory; starts int64 [experts]: the byte in it where what
    belongs to an expert starts; inside: bytes from there to the matrix; next: values from the matrix to its second one.
    All are multiples of 16 bytes; `in_rows`: of a matrix's row too, counted from the start of the memory."""

    flat: Tensor
    starts: Tensor
    inside: int = 0
    next: int = 0
    in_rows: bool = False

    def operand(self, n_cols: int, tile: Tile) -> Tensor | TensorDescriptor:
        """What a kernel loads tiles of [tile.columns, tile.depth] from."""
        if not (tile.described and self.in_rows):
            return self.flat
        n_rows = self.flat.numel() // n_cols
        return described(self.flat[: n_rows * n_cols].view(n_rows, n_cols), tile.columns, tile.depth)


def gate_up(x: Tensor, weights: PlainMatrices, *, d_ff: int, part: Round, out: Tensor) -> None:
    """out bf16 [capacity, d_ff] = silu(x gate^T) * (x up^T) for the rows of a round.

    x bf16 [n, d]; weights: gate [d_ff, d], and up [d_ff, d] as the second matrix.
    """
    tile = tiles_of(x.device).gate_up
    n_columns = -(-d_ff // tile.columns)
    gate_up_kernel[(part.n_tiles(tile) * n_columns,)](
        x,
        weights.operand(x.shape[1], tile),
        weights.starts,
        part.pairs.order,
        part.pairs.offsets,
        out,
        part.first,
        part.last - part.first,
        part.skip,
        part.capacity,
        part.pairs.places.shape[1],
        x.shape[1],
        d_ff,
        weights.inside,
        weights.next,
        n_columns,
        EXPERTS=part.bins,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=x.shape[1] % tile.depth == 0,
        DESCRIBED=tile.described and weights.in_rows,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def down(x: Tensor, weights: PlainMatrices, *, part: Round, pair_weights: Tensor, out: Tensor) -> None:
    """out bf16 or f32 [capacity, d] = (x down^T) * the pair's weight, for the rows of a round.

    x bf16 [capacity, d_ff] as `gate_up` left it; weights: down [d, d_ff]; pair_weights f32 [n, k].
    """
    tile = tiles_of(x.device).down
    d, d_ff = out.shape[1], x.shape[1]
    n_columns = -(-d // tile.columns)
    uses_descriptors = tile.described and weights.in_rows
    down_kernel[(part.n_tiles(tile) * n_columns,)](
        described(x, tile.rows, tile.depth) if uses_descriptors else x,
        weights.operand(d_ff, tile),
        weights.starts,
        part.pairs.order,
        part.pairs.offsets,
        pair_weights,
        out,
        part.first,
        part.last - part.first,
        part.skip,
        part.capacity,
        d,
        d_ff,
        weights.inside,
        n_columns,
        EXPERTS=part.bins,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=d_ff % tile.depth == 0,
        DESCRIBED=uses_descriptors,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def find_tile(tile, offsets, first, n_experts, low, high, EXPERTS: tl.constexpr, ROWS: tl.constexpr):
    """Which rows a tile has: (expert counted from `first`, n_experts when there is no such tile; first row; end)."""
    e = tl.arange(0, EXPERTS)
    starts = tl.maximum(tl.load(offsets + first + e, mask=e < n_experts, other=high), low)
    ends = tl.minimum(tl.load(offsets + first + e + 1, mask=e < n_experts, other=high), high)
    n_tiles = tl.cdiv(tl.maximum(ends - starts, 0), ROWS)
    after = tl.cumsum(n_tiles, axis=0)
    expert = tl.sum((after <= tile).to(tl.int32), axis=0)
    start = tl.sum(tl.where(e == expert, starts + (tile - after + n_tiles) * ROWS, 0), axis=0)
    end = tl.sum(tl.where(e == expert, ends, 0), axis=0)
    return expert, start, end


@quick
@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["starts"])
def gate_up_kernel(
    x,
    weights,
    starts,
    order,
    offsets,
    out,
    first,
    n_experts,
    skip,
    capacity,
    top_k,
    d,
    d_ff,
    inside_bytes,
    up_after,
    n_columns,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One tile of silu(x gate^T) * (x up^T)."""
    low = tl.load(offsets + first) + skip
    high = tl.minimum(tl.load(offsets + first + n_experts), low + capacity)
    tile = tl.program_id(0) // n_columns
    expert, start, end = find_tile(tile, offsets, first, n_experts, low, high, EXPERTS, ROWS)
    if expert >= n_experts:
        return
    places = start + tl.arange(0, ROWS)
    token = tl.load(order + tl.minimum(places, end - 1)) // top_k
    columns = tl.program_id(0) % n_columns * COLUMNS + tl.arange(0, COLUMNS)
    depth = tl.arange(0, DEPTH)
    left = x + token.to(tl.int64)[:, None] * d + depth[None, :]
    begin = tl.multiple_of((tl.load(starts + expert) + inside_bytes) // 2, 8)
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
    if DESCRIBED:
        gate_row = (begin // d).to(tl.int32) + tl.program_id(0) % n_columns * COLUMNS
        up_row = gate_row + up_after // d
        for at in range(0, d, DEPTH):
            if EVEN:
                a = tl.load(left)
            else:
                a = tl.load(left, mask=(depth < d - at)[None, :], other=0.0)
            gates = tl.dot(a, weights.load([gate_row, at]).T, gates)
            ups = tl.dot(a, weights.load([up_row, at]).T, ups)
            left += DEPTH
    else:
        gate = weights + begin + tl.minimum(columns, d_ff - 1)[None, :] * d + depth[:, None]
        up = gate + up_after
        for at in range(0, d, DEPTH):
            if EVEN:
                a = tl.load(left)
                g = tl.load(gate)
                u = tl.load(up)
            else:
                inside = depth < d - at
                a = tl.load(left, mask=inside[None, :], other=0.0)
                g = tl.load(gate, mask=inside[:, None], other=0.0)
                u = tl.load(up, mask=inside[:, None], other=0.0)
            gates = tl.dot(a, g, gates)
            ups = tl.dot(a, u, ups)
            left += DEPTH
            gate += DEPTH
            up += DEPTH
    value = gates / (1.0 + tl.exp(-gates)) * ups
    target = out + (places - low).to(tl.int64)[:, None] * d_ff + columns[None, :]
    tl.store(target, value.to(tl.bfloat16), mask=(places < end)[:, None] & (columns < d_ff)[None, :])


@triton.jit
def multiply(left, right, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """f32 [ROWS, COLUMNS] = left [ROWS, length] right [length, COLUMNS]; pointers to the first DEPTH of both."""
    depth = tl.arange(0, DEPTH)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, length, DEPTH):
        if EVEN:
            a = tl.load(left)
            b = tl.load(right)
        else:
            inside = depth < length - at
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left += DEPTH
        right += DEPTH
    return total


@triton.jit
def multiply_described(
    left, right, row, column, length, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr
):
    """f32 [ROWS, COLUMNS] = rows of left [.., length] times rows of right [.., length] transposed; descriptors."""
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for at in range(0, length, DEPTH):
        total = tl.dot(left.load([row, at]), right.load([column, at]).T, total)
    return total


@quick
@triton.jit(do_not_specialize=VARYING, do_not_specialize_on_alignment=["starts", "pair_weights"])
def down_kernel(
    x,
    weights,
    starts,
    order,
    offsets,
    pair_weights,
    out,
    first,
    n_experts,
    skip,
    capacity,
    d,
    d_ff,
    inside_bytes,
    n_columns,
    EXPERTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One tile of (x down^T), each row times its pair's weight."""
    low = tl.load(offsets + first) + skip
    high = tl.minimum(tl.load(offsets + first + n_experts), low + capacity)
    tile = tl.program_id(0) // n_columns
    expert, start, end = find_tile(tile, offsets, first, n_experts, low, high, EXPERTS, ROWS)
    if expert >= n_experts:
        return
    places = start + tl.arange(0, ROWS)
    rows = tl.minimum(places, end - 1)
    columns = tl.program_id(0) % n_columns * COLUMNS + tl.arange(0, COLUMNS)
    begin = tl.multiple_of((tl.load(starts + expert) + inside_bytes) // 2, 8)
    if DESCRIBED:
        column = (begin // d_ff).to(tl.int32) + tl.program_id(0) % n_columns * COLUMNS
        value = multiply_described(x, weights, start - low, column, d_ff, ROWS, COLUMNS, DEPTH)
    else:
        depth = tl.arange(0, DEPTH)
        left = x + (rows - low).to(tl.int64)[:, None] * d_ff + depth[None, :]
        right = weights + begin + tl.minimum(columns, d - 1)[None, :] * d_ff + depth[:, None]
        value = multiply(left, right, d_ff, ROWS, COLUMNS, DEPTH, EVEN)
    value *= tl.load(pair_weights + tl.load(order + rows))[:, None]
    target = out + (places - low).to(tl.int64)[:, None] * d + columns[None, :]
    tl.store(target, value.to(out.dtype.element_ty), mask=(places < end)[:, None] & (columns < d)[None, :])
