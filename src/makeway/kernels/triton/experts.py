"""The routed experts of one decode step: gate, up, SwiGLU, then down and the weighted sum, by the entries of its plan.

Owns the two kernels and their tilings. Never waits for the host, so a graph can hold it, and never knows whether an
entry's bytes lie in a slot or were just fetched.
Hazard: counters of the scratch must be zero before (see `linear`); entries and their order come from `step_plan`.

Each row's sum is added in f32 in ascending expert order, whatever the company, the slots and the misses: a row's bits
depend on the row alone.
"""

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS, Scratch, Tiling, arrived_last, as_parts, divisor, product
from makeway.kernels.triton.step_buffers import StepBuffers
from makeway.kernels.triton.unpack import code_table, planes_for

COMBINE = 8  # entries whose outputs are loaded at once before they are added one by one


@triton.jit(do_not_specialize=["n"])  # one binary for every number of rows
def gate_up_kernel(
    x,
    arena,
    hidden_out,
    parts,
    counters,
    table,
    experts,
    offsets,
    chosen_by,
    n,
    n_rows,
    n_cols,
    x_stride,
    x_part_stride,
    gate_row_bytes,
    up_row_bytes,
    up_at,
    G_UNPACK: tl.constexpr,
    G_STEP: tl.constexpr,
    G_WIDTH: tl.constexpr,
    G_GROUP: tl.constexpr,
    G_BIAS: tl.constexpr,
    G_HAS_SCALE: tl.constexpr,
    G_HAS_SHIFT: tl.constexpr,
    G_PLANE_ORDER: tl.constexpr,
    G_PARTS: tl.constexpr,
    U_UNPACK: tl.constexpr,
    U_STEP: tl.constexpr,
    U_WIDTH: tl.constexpr,
    U_GROUP: tl.constexpr,
    U_BIAS: tl.constexpr,
    U_HAS_SCALE: tl.constexpr,
    U_HAS_SHIFT: tl.constexpr,
    U_PLANE_ORDER: tl.constexpr,
    U_PARTS: tl.constexpr,
    ALIKE: tl.constexpr,
    X_PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    UNROLL: tl.constexpr,
    U_UNROLL: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one entry's gate or up product; the last of a tile's 2 SPLIT programs writes silu(gate) * up.

    hidden_out bf16 [2, entries, n, n_rows], as `split` makes it. ALIKE: gate and up are of one type.
    """
    begin(PDL)
    tile = tl.program_id(0)
    entry = tl.program_id(1)
    part = tl.program_id(2)
    if tl.load(experts + entry) < 0:
        return
    is_up = part >= SPLIT
    of_split = part % SPLIT
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < n_rows)[:, None]
    row = tl.minimum(row, n_rows - 1)[:, None]
    column = tl.arange(0, N)
    x = x + tl.minimum(column, n - 1)[:, None] * x_stride
    expert = arena + tl.multiple_of(tl.load(offsets + entry), 16)
    if ALIKE:
        weights = expert + is_up.to(tl.int32) * up_at + row * gate_row_bytes
        per_part = n_cols // G_STEP // SPLIT
        acc = product(
            weights,
            x,
            x_part_stride,
            of_split * per_part,
            of_split * per_part + per_part,
            table,
            G_UNPACK,
            G_STEP,
            G_WIDTH,
            G_GROUP,
            G_BIAS,
            G_HAS_SCALE,
            G_HAS_SHIFT,
            G_PLANE_ORDER,
            G_PARTS,
            X_PARTS,
            ROWS,
            N,
            UNROLL,
        )
    else:
        if is_up:
            per_part = n_cols // U_STEP // SPLIT
            acc = product(
                expert + up_at + row * up_row_bytes,
                x,
                x_part_stride,
                of_split * per_part,
                of_split * per_part + per_part,
                table,
                U_UNPACK,
                U_STEP,
                U_WIDTH,
                U_GROUP,
                U_BIAS,
                U_HAS_SCALE,
                U_HAS_SHIFT,
                U_PLANE_ORDER,
                U_PARTS,
                X_PARTS,
                ROWS,
                N,
                U_UNROLL,
            )
        else:
            per_part = n_cols // G_STEP // SPLIT
            acc = product(
                expert + row * gate_row_bytes,
                x,
                x_part_stride,
                of_split * per_part,
                of_split * per_part + per_part,
                table,
                G_UNPACK,
                G_STEP,
                G_WIDTH,
                G_GROUP,
                G_BIAS,
                G_HAS_SCALE,
                G_HAS_SHIFT,
                G_PLANE_ORDER,
                G_PARTS,
                X_PARTS,
                ROWS,
                N,
                UNROLL,
            )
    column = column[None, :]
    used = (tl.load(chosen_by + entry) >> column) & 1
    mask = inside & (used != 0)
    group = entry * tl.num_programs(0) + tile
    place = parts + ((group * 2 * SPLIT) * n + column) * ROWS + tl.arange(0, ROWS)[:, None]
    tl.store(place + part * n * ROWS, acc, mask=mask)
    if arrived_last(counters + group, 2 * SPLIT):
        gate = tl.load(place, mask=mask, other=0.0, cache_modifier=".cg")
        up = tl.load(place + SPLIT * n * ROWS, mask=mask, other=0.0, cache_modifier=".cg")
        for i in tl.static_range(1, SPLIT):
            gate += tl.load(place + i * n * ROWS, mask=mask, other=0.0, cache_modifier=".cg")
            up += tl.load(place + (SPLIT + i) * n * ROWS, mask=mask, other=0.0, cache_modifier=".cg")
        value = gate / (1.0 + tl.exp(-gate)) * up
        rounded = value.to(tl.bfloat16)
        target = hidden_out + (entry * n + column) * n_rows + row
        tl.store(target, rounded, mask=mask)
        rest = (value - rounded.to(tl.float32)).to(tl.bfloat16)
        tl.store(target + tl.num_programs(1) * n * n_rows, rest, mask=mask)


@triton.jit(do_not_specialize=["n"])  # one binary for every number of rows
def down_kernel(
    hidden_in,
    arena,
    acc_out,
    outputs,
    counters,
    table,
    experts,
    offsets,
    chosen_by,
    weights,
    count,
    n,
    n_rows,
    n_cols,
    row_bytes,
    down_at,
    UNPACK: tl.constexpr,
    STEP: tl.constexpr,
    WIDTH: tl.constexpr,
    GROUP: tl.constexpr,
    BIAS: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_SHIFT: tl.constexpr,
    PLANE_ORDER: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    UNROLL: tl.constexpr,
    COMBINE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one entry's output; the last entry to arrive adds all of them, ascending, to acc_out [n, n_rows]."""
    begin(PDL)
    tile = tl.program_id(0)
    entry = tl.program_id(1)
    if tl.load(experts + entry) < 0:
        return
    row = tile * ROWS + tl.arange(0, ROWS)
    inside = (row < n_rows)[:, None]
    row = tl.minimum(row, n_rows - 1)[:, None]
    column = tl.arange(0, N)
    acc = product(
        arena + tl.multiple_of(tl.load(offsets + entry), 16) + down_at + row * row_bytes,
        hidden_in + (entry * n + tl.minimum(column, n - 1)[:, None]) * n_cols,
        tl.num_programs(1) * n * n_cols,
        0,
        n_cols // STEP,
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
        2,
        ROWS,
        N,
        UNROLL,
    )
    column = column[None, :]
    used = (tl.load(chosen_by + entry) >> column) & 1
    tl.store(outputs + (entry * n + column) * n_rows + row, acc, mask=inside & (used != 0))
    n_entries = tl.load(count)
    if arrived_last(counters + tile, n_entries):
        target = acc_out + column * n_rows + row
        mask = inside & (column < n)
        acc = tl.load(target, mask=mask, other=0.0)
        for at in range(0, n_entries, COMBINE):
            for i in tl.static_range(COMBINE):
                e = at + i
                used = (tl.load(chosen_by + e, mask=e < n_entries, other=0) >> column) & 1
                weight = tl.load(weights + e * N + column, mask=used != 0, other=0.0)
                output = outputs + (e * n + column) * n_rows + row
                acc += weight * tl.load(output, mask=inside & (used != 0), other=0.0, cache_modifier=".cg")
        tl.store(target, acc, mask=mask)


@dataclass(frozen=True)
class ExpertLayout:
    """One layer's experts: gate, up [width, hidden] and down [hidden, width], one after the other in their bytes."""

    gate: GGMLType
    up: GGMLType
    down: GGMLType
    hidden: int
    width: int

    @property
    def up_at(self) -> int:
        """Where up starts in an expert's bytes."""
        return self.width * row_bytes(self.gate, self.hidden)

    @property
    def down_at(self) -> int:
        """Where down starts."""
        return self.up_at + self.width * row_bytes(self.up, self.hidden)

    @property
    def expert_bytes(self) -> int:
        return self.down_at + self.hidden * row_bytes(self.down, self.width)


def gate_up_tiling(gate: GGMLType, up: GGMLType, hidden: int) -> tuple[Tiling, int]:
    """The fixed tiling of a layer's gate and up products, split alike, and the steps that up unrolls."""
    sizes = [planes_for(kind, hidden).step for kind in (gate, up)]
    split = divisor(math.gcd(*(hidden // size for size in sizes)), 5)
    unrolls = [divisor(hidden // size // split, max(1, 128 // size)) for size in sizes]
    return Tiling(rows=16, split=split, unroll=unrolls[0], warps=1, stages=1), unrolls[1]


def down_tiling(kind: GGMLType, width: int) -> Tiling:
    """The fixed tiling of a layer's down product; columns are not split."""
    planes = planes_for(kind, width)
    unroll = divisor(width // planes.step, max(1, 128 // planes.step))
    return Tiling(rows=16, split=1, unroll=unroll, warps=1, stages=1)


def run_experts(
    buffers: StepBuffers,
    x: Tensor,
    arena: Tensor,
    *,
    layout: ExpertLayout,
    acc: Tensor,
    scratch: Scratch,
    tilings: tuple[Tiling, Tiling] | None = None,
) -> None:
    """Add the weighted outputs of the plan's experts to acc f32 [n, hidden], in place; x as `linear` takes it.

    Every entry's bytes are in the arena (u8) at its offset. `tilings` of gate and up, and of down, are for benches.
    """
    n = buffers.n
    hidden, width = layout.hidden, layout.width
    x = as_parts(x)
    assert x.shape[1:] == (n, hidden)
    assert acc.shape == (n, hidden)
    assert x.stride(2) == 1
    assert acc.is_contiguous()
    assert layout.up_at % 16 == 0
    assert layout.down_at % 16 == 0
    gate, up, down = planes_for(layout.gate, hidden), planes_for(layout.up, hidden), planes_for(layout.down, width)
    table = code_table(x.device)
    tiles, up_unroll = gate_up_tiling(layout.gate, layout.up, hidden)
    if tilings:
        tiles, up_unroll = tilings[0], tilings[0].unroll
    split = tiles.split
    for planes, unroll in ((gate, tiles.unroll), (up, up_unroll)):
        assert hidden % (planes.step * split * unroll) == 0
    n_tiles = -(-width // tiles.rows)
    groups = buffers.n_entries * n_tiles
    parts, counters = scratch.take(groups * 2 * split * n * tiles.rows, groups)
    gate_up_kernel[(n_tiles, buffers.n_entries, 2 * split)](
        x,
        arena,
        buffers.hidden,
        parts,
        counters,
        table,
        buffers.experts,
        buffers.offsets,
        buffers.chosen_by,
        n,
        width,
        hidden,
        x.stride(1),
        x.stride(0),
        row_bytes(layout.gate, hidden),
        row_bytes(layout.up, hidden),
        layout.up_at,
        **gate.arguments("G_"),
        **up.arguments("U_"),
        ALIKE=layout.gate == layout.up,
        X_PARTS=x.shape[0],
        N=MAX_ROWS,
        **tiles.arguments(),
        U_UNROLL=up_unroll,
        enable_fp_fusion=True,
        **overlap(x.device),
    )
    tiles = tilings[1] if tilings else down_tiling(layout.down, width)
    n_tiles = -(-hidden // tiles.rows)
    _, counters = scratch.take(0, n_tiles)
    assert tiles.split == 1
    assert width % (down.step * tiles.unroll) == 0
    arguments = tiles.arguments()
    del arguments["SPLIT"]
    down_kernel[(n_tiles, buffers.n_entries)](
        buffers.hidden,
        arena,
        acc,
        buffers.outputs,
        counters,
        table,
        buffers.experts,
        buffers.offsets,
        buffers.chosen_by,
        buffers.weights,
        buffers.count,
        n,
        hidden,
        width,
        row_bytes(layout.down, width),
        layout.down_at,
        **down.arguments(),
        N=MAX_ROWS,
        COMBINE=COMBINE,
        **arguments,
        enable_fp_fusion=True,
        **overlap(x.device),
    )
