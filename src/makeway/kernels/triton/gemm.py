"""Matrix products of a piece of experts with all rows that chose them, on tensor cores.

Owns the tile configuration and the map from programs to tiles. Never waits for the device: how many rows an expert has
is read there, and the grid is the most that can be needed.
Hazard: weights are bf16 here; a quantised piece is decoded into scratch first (`decode_matrices`). Numbers that change
from call to call must not be specialised, or Triton would compile again in the middle of a prompt.
"""

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels.triton.sort import SortedPairs
from makeway.kernels.triton.unpack import code_table, plane_values, planes_for, weight_order


@dataclass(frozen=True)
class Tile:
    """A program's part: `rows` of the left matrix by `columns` of the product, `depth` of the sum at a time.

    A row's bits depend on `depth` and the instruction, not on the rows beside it: the tile is fixed by kernel, matrix
    and architecture, whatever the number of rows.
    """

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int


@dataclass(frozen=True)
class Tiles:
    """The tiles of an architecture: experts' `gate_up` (two products at once) and `down`; `linear`, and `narrow` for
    linears of few outputs, which would leave most of the GPU idle with large tiles."""

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
    gate_up=Tile(128, 128, 64, warps=8, stages=4),
    down=Tile(128, 256, 64, warps=8, stages=3),
    linear=Tile(128, 128, 64, warps=8, stages=3),
    narrow=Tile(64, 64, 64, warps=4, stages=4),
)


def tiles_of(device: torch.device) -> Tiles:
    """The one table of tile configurations, by architecture; Triton's interpreter (CPU tensors) takes the smaller."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0):
        return HOPPER
    return AMPERE


@dataclass(frozen=True)
class Round:
    """Places offsets[first] + skip ... below offsets[last], at most `capacity` of them, at a time in scratch."""

    pairs: SortedPairs
    first: int
    last: int
    skip: int
    capacity: int

    def n_tiles(self, tile: Tile) -> int:
        """The most row tiles the round can have: every expert may leave one unfilled."""
        return -(-self.capacity // tile.rows) + self.last - self.first


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
    room: Tensor, where: Tensor, matrix: QuantMatrix, *, out: Tensor, counted: Tensor, term: int = 0
) -> None:
    """out bf16 [experts, >= n_rows * n_cols]: the matrix of each expert, rounded from `quants/`'s float32.

    term 1 is the rounded rest that term 0 leaves, and so on: float32 is the sum of three.

    room u8: the arena; where int64 [experts]: an expert's first byte in it, a multiple of 16. counted int32
    [experts + 1]: offsets of the sort; an expert without pairs is neither read nor written.
    """
    planes = planes_for(matrix.type, matrix.n_cols)
    aligned = math.gcd(16, matrix.inside)
    bytes_of_row = row_bytes(matrix.type, matrix.n_cols)
    assert aligned % planes.align == 0
    assert bytes_of_row % planes.align == 0
    assert matrix.n_cols % planes.step == 0
    n_experts = where.shape[0]
    n_steps = matrix.n_cols // planes.step
    per_program = min(n_steps, max(1, DECODE_STEPS // planes.step))
    arguments = planes.arguments()
    del arguments["GROUP"], arguments["PARTS"]
    together = math.gcd(4, planes.step // planes.width)
    decode_kernel[(-(-matrix.n_rows // DECODE_ROWS), -(-n_steps // per_program), n_experts)](
        room,
        where,
        counted,
        out,
        code_table(room.device),
        matrix.inside,
        bytes_of_row,
        matrix.n_rows,
        matrix.n_cols,
        n_steps,
        out.stride(0),
        **arguments,
        ALIGNED=aligned,
        TERM=term,
        TOGETHER=together,
        STEPS=per_program,
        ROWS=DECODE_ROWS,
        num_warps=4,
        enable_fp_fusion=False,
    )


@dataclass(frozen=True)
class PlainMatrices:
    """bf16 matrices of the experts of a part. flat bf16: the memory; starts int64 [experts]: the byte in it where what
    belongs to an expert starts; inside: bytes from there to the matrix; next: values from the matrix to its second one.
    All are multiples of 16 bytes."""

    flat: Tensor
    starts: Tensor
    inside: int = 0
    next: int = 0


def gate_up(x: Tensor, weights: PlainMatrices, *, d_ff: int, part: Round, out: Tensor) -> None:
    """out bf16 [capacity, d_ff] = silu(x gate^T) * (x up^T) for the rows of a round.

    x bf16 [n, d]; weights: gate [d_ff, d], and up [d_ff, d] as the second matrix.
    """
    tile = tiles_of(x.device).gate_up
    n_columns = -(-d_ff // tile.columns)
    gate_up_kernel[(part.n_tiles(tile) * n_columns,)](
        x,
        weights.flat,
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
        EXPERTS=triton.next_power_of_2(part.last - part.first),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=x.shape[1] % tile.depth == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def down(x: Tensor, weights: PlainMatrices, *, part: Round, pair_weights: Tensor, out: Tensor) -> None:
    """out f32 [capacity, d] = (x down^T) * the pair's weight, for the rows of a round.

    x bf16 [capacity, d_ff] as `gate_up` left it; weights: down [d, d_ff]; pair_weights f32 [n, k].
    """
    tile = tiles_of(x.device).down
    d, d_ff = out.shape[1], x.shape[1]
    n_columns = -(-d // tile.columns)
    down_kernel[(part.n_tiles(tile) * n_columns,)](
        x,
        weights.flat,
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
        EXPERTS=triton.next_power_of_2(part.last - part.first),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=d_ff % tile.depth == 0,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@triton.jit
def rounded(
    plane,
    TERM: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
):
    """A plane's weights, in weight order, as bf16 [R, width]; TERM as in `decode_matrices`."""
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


@triton.jit(do_not_specialize=["n_rows"])
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
    UNPACK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
    ALIGNED: tl.constexpr,
    TERM: tl.constexpr,
    TOGETHER: tl.constexpr,
    STEPS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """STEPS steps of ROWS rows of one expert's matrix, as bf16."""
    expert = tl.program_id(2)
    if tl.load(counted + expert) == tl.load(counted + expert + 1):
        return
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    start = tl.multiple_of(tl.load(where + expert) + inside, ALIGNED)
    source = room + start + tl.minimum(rows, n_rows - 1) * row_bytes
    columns = tl.arange(0, WIDTH * TOGETHER)[None, :]
    target = out + expert.to(tl.int64) * out_stride + rows * n_cols + columns
    for i in range(STEPS):
        step = tl.program_id(1) * STEPS + i
        planes = UNPACK(source, tl.minimum(step, n_steps - 1), table)
        valid = (rows < n_rows) & (columns + step * STEP < n_cols)
        for p in tl.static_range(0, STEP // WIDTH, TOGETHER):
            values = rounded(planes[p], TERM, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
            if TOGETHER > 1:
                values = beside(values, rounded(planes[p + 1], TERM, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER))
            if TOGETHER > 2:
                c = rounded(planes[p + 2], TERM, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
                d = rounded(planes[p + 3], TERM, BIAS, HAS_SCALE, HAS_SHIFT, PLANE_ORDER)
                values = beside(values, beside(c, d))
            tl.store(target + step * STEP + p * WIDTH, values, mask=valid)


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


@triton.jit(do_not_specialize=["first", "n_experts", "skip", "capacity"])
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
    gate = weights + begin + tl.minimum(columns, d_ff - 1)[None, :] * d + depth[:, None]
    up = gate + up_after
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    ups = tl.zeros((ROWS, COLUMNS), tl.float32)
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


@triton.jit(do_not_specialize=["first", "n_experts", "skip", "capacity"])
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
    depth = tl.arange(0, DEPTH)
    left = x + (rows - low).to(tl.int64)[:, None] * d_ff + depth[None, :]
    begin = tl.multiple_of((tl.load(starts + expert) + inside_bytes) // 2, 8)
    right = weights + begin + tl.minimum(columns, d - 1)[None, :] * d_ff + depth[:, None]
    value = multiply(left, right, d_ff, ROWS, COLUMNS, DEPTH, EVEN)
    value *= tl.load(pair_weights + tl.load(order + rows))[:, None]
    target = out + (places - low).to(tl.int64)[:, None] * d + columns[None, :]
    tl.store(target, value, mask=(places < end)[:, None] & (columns < d)[None, :])
