"""The routed experts of one decode step, on the device from routing to the weighted sum: plan, fetch, run.

Owns the kernels and the buffers that pass between them. Never waits for the host, so a graph can hold all of it, and
never chooses what stays in a slot: it only says which spare received which expert.
Hazard: every buffer is reused by the next layer and step on the same stream; what the host wants to read (`fetched`)
belongs to the caller.

A step has up to 8 rows of top_k experts. Its *entries* are the different experts, in ascending order, each run once
for all rows that chose it, so a miss crosses the link once and weights are read once. Each row's sum is added in f32
in ascending expert order, whatever the company, the slots and the misses: a row's bits depend on the row alone.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels.triton.linear import MAX_ROWS, Scratch, Tiling, arrived_last, as_parts, divisor, product
from makeway.kernels.triton.unpack import code_table, planes_for

FETCH_PROGRAMS = 16  # per expert
FETCH_WORDS = 4096  # of 32 bits, in one turn of a program of 256 threads: four loads of 16 bytes each
COMBINE = 8  # entries whose outputs are loaded at once before they are added one by one


@triton.jit(do_not_specialize=["n_ids", "n_spares"])
def plan_kernel(
    ids,
    routing,
    slot_of,
    wanted,
    spares,
    experts,
    offsets,
    missing,
    chosen_by,
    weights,
    count,
    fetched,
    n_ids,
    top_k,
    n_spares,
    slots_at,
    slot_stride,
    transient_at,
    transient_stride,
    PADDED: tl.constexpr,
    SPARES: tl.constexpr,
    N: tl.constexpr,
):
    """One program: entries of a step, where their bytes are or go, and which rows chose them."""
    i = tl.arange(0, PADDED)
    mine = tl.load(ids + i, mask=i < n_ids, other=-1).to(tl.int32)
    valid = mine >= 0
    row = i // top_k
    # row j of each matrix below: the id j as seen from the id i; sums over axis 0 stay within threads
    other = mine[:, None]
    same = (other == mine[None, :]) & valid[:, None]
    first = valid & (tl.sum((same & (i[:, None] < i[None, :])).to(tl.int32), 0) == 0)
    below = other < mine[None, :]
    entry = tl.sum((below & first[:, None]).to(tl.int32), 0)
    n_entries = tl.sum(first.to(tl.int32), 0)

    slot = tl.load(slot_of + mine, mask=first, other=0).to(tl.int64)
    misses = first & (slot < 0)
    hopes = misses & (tl.load(wanted + mine, mask=misses, other=0) != 0)
    spare = tl.sum((below & hopes[:, None]).to(tl.int32), 0)
    kept = hopes & (spare < n_spares)
    passing = misses & (kept == 0)
    place = tl.sum((below & passing[:, None]).to(tl.int32), 0).to(tl.int64)
    spare_slot = tl.load(spares + spare, mask=kept, other=0).to(tl.int64)
    in_slot = slots_at + tl.where(kept, spare_slot, slot) * slot_stride
    at = tl.where(passing, transient_at + place * transient_stride, in_slot)

    tl.store(experts + entry, mine, mask=first)
    tl.store(experts + i, -1, mask=(i >= n_entries) & (i < n_ids))
    tl.store(offsets + entry, at, mask=first)
    tl.store(missing + entry, misses.to(tl.int32), mask=first)
    rows = tl.sum(tl.where(same, 1 << row[:, None], 0), 0)  # an expert comes once in a row: no bit twice
    tl.store(chosen_by + entry, rows, mask=first)
    tl.store(weights + entry * N + row, tl.load(routing + i, mask=valid, other=0.0), mask=valid)
    tl.store(count, n_entries)
    if SPARES > 0:
        s = tl.arange(0, SPARES)
        n_kept = tl.sum(kept.to(tl.int32), 0)
        tl.store(fetched + s, -1, mask=(s >= n_kept) & (s < n_spares))
        tl.store(fetched + spare, mine, mask=kept)


@triton.jit
def fetch_kernel(store, arena, experts, offsets, missing, stride, n_words, WORDS: tl.constexpr):
    """Copy the missing entries from pinned host memory (i32 words) to where the plan puts them."""
    entry = tl.program_id(1)
    expert = tl.load(experts + entry)
    if expert < 0:
        return
    if tl.load(missing + entry) == 0:
        return
    source = store + expert.to(tl.int64) * stride
    target = arena + tl.multiple_of(tl.load(offsets + entry), 16) // 4
    i = tl.max_contiguous(tl.arange(0, WORDS), WORDS)
    for at in range(tl.program_id(0) * WORDS, n_words, tl.num_programs(0) * WORDS):
        inside = at + i < n_words
        tl.store(target + at + i, tl.load(source + at + i, mask=inside), mask=inside)


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
):
    """One tile of one entry's gate or up product; the last of a tile's 2 SPLIT programs writes silu(gate) * up.

    hidden_out bf16 [2, entries, n, n_rows], as `split` makes it. ALIKE: gate and up are of one type.
    """
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
):
    """One tile of one entry's output; the last entry to arrive adds all of them, ascending, to acc_out [n, n_rows]."""
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


@dataclass(frozen=True)
class Rooms:
    """Where experts of one layer lie in the arena, in bytes from its start: slot s at slots_at + s * slot_stride; miss
    number t that takes no spare at transient_at + t * transient_stride. All multiples of 16.
    """

    slots_at: int
    slot_stride: int
    transient_at: int
    transient_stride: int


class StepBuffers:
    """What passes from kernel to kernel within a step's layer: entries (see the module) and intermediate values."""

    def __init__(self, device: torch.device, *, n: int, top_k: int, hidden: int, width: int) -> None:
        """For n <= 8 rows."""
        assert 0 < n <= MAX_ROWS
        entries = n * top_k
        self.n = n
        self.top_k = top_k
        self.experts = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(entries, dtype=torch.int64, device=device)
        self.missing = torch.zeros(entries, dtype=torch.int32, device=device)
        self.chosen_by = torch.zeros(entries, dtype=torch.int32, device=device)
        self.weights = torch.zeros((entries, MAX_ROWS), dtype=torch.float32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.hidden = torch.empty((2, entries, n, width), dtype=torch.bfloat16, device=device)
        self.outputs = torch.empty((entries, n, hidden), dtype=torch.float32, device=device)

    @property
    def n_entries(self) -> int:
        """Most entries there can be."""
        return self.experts.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


def plan_step(
    buffers: StepBuffers, ids: Tensor, *, routing: Tensor, slot_of: Tensor, wanted: Tensor, spares: Tensor, rooms: Rooms
) -> Tensor:
    """Entries of a layer's step into `buffers`; returns `fetched` int32 [n_spares], the expert in each spare or -1.

    ids int [n, top_k] (-1: padding), routing f32 [n, top_k], slot_of int32 [n_experts] (-1: not in a slot), wanted
    uint8 [n_experts], spares int32 [n_spares]: slot numbers. Wanted misses take spares in ascending expert order while
    there are any; the others pass through the transient region.
    """
    assert ids.shape == (buffers.n, buffers.top_k)
    assert ids.is_contiguous()
    assert routing.is_contiguous()
    n_spares = spares.numel()
    fetched = torch.empty(n_spares, dtype=torch.int32, device=ids.device)
    plan_kernel[(1,)](
        ids,
        routing,
        slot_of,
        wanted,
        spares,
        buffers.experts,
        buffers.offsets,
        buffers.missing,
        buffers.chosen_by,
        buffers.weights,
        buffers.count,
        fetched,
        ids.numel(),
        buffers.top_k,
        n_spares,
        rooms.slots_at,
        rooms.slot_stride,
        rooms.transient_at,
        rooms.transient_stride,
        PADDED=max(16, triton.next_power_of_2(ids.numel())),
        SPARES=triton.next_power_of_2(n_spares) if n_spares else 0,
        N=MAX_ROWS,
        num_warps=8,
    )
    return fetched


def fetch_missing(
    buffers: StepBuffers, store: Tensor, arena: Tensor, *, n_bytes: int, programs: int = FETCH_PROGRAMS
) -> None:
    """Copy the plan's missing experts, n_bytes each, into their rooms.

    store u8 [n_experts, stride], pinned host memory that the device reads directly; arena u8. Sizes are multiples of
    16.
    """
    assert n_bytes % 16 == 0
    assert store.stride(0) % 16 == 0
    assert store.stride(1) == 1
    fetch_kernel[(programs, buffers.n_entries)](
        store.view(torch.int32),
        arena.view(torch.int32),
        buffers.experts,
        buffers.offsets,
        buffers.missing,
        store.stride(0) // 4,
        n_bytes // 4,
        WORDS=FETCH_WORDS,
        num_warps=8,
    )


def gate_up_tiling(kind: GGMLType, hidden: int) -> Tiling:
    """The fixed tiling of a layer's gate or up product."""
    planes = planes_for(kind, hidden)
    n_steps = hidden // planes.step
    split = divisor(n_steps, 5)
    unroll = divisor(n_steps // split, max(1, 128 // planes.step))
    return Tiling(rows=16, split=split, unroll=unroll, warps=1, stages=1)


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
    tiles = tilings[0] if tilings else gate_up_tiling(layout.gate, hidden)
    up_tiles = tilings[0] if tilings else gate_up_tiling(layout.up, hidden)
    split = min(tiles.split, up_tiles.split)
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
        **{**tiles.arguments(), "SPLIT": split},
        U_UNROLL=up_tiles.unroll,
        enable_fp_fusion=True,
    )
    tiles = tilings[1] if tilings else down_tiling(layout.down, width)
    n_tiles = -(-hidden // tiles.rows)
    _, counters = scratch.take(0, n_tiles)
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
    )
