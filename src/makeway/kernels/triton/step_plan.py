"""What a decode step does in a layer of experts, decided on the device: which run, where they lie, what is fetched.

Owns the plan, and when misses are fetched. Never waits for the host, and never chooses what stays in a slot: it only
says which spare received which expert.
Hazard: programs of a launch find the plan each for itself, so what it is made of must not change while they do.

A step has up to 8 rows of top_k experts. Its *entries* are the different experts, in ascending order, each run once
for all rows that chose it, so a miss crosses the link once and weights are read once.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.fetch import (
    FETCH_PROGRAMS,
    FETCH_WORDS,
    POLLS,
    Source,
    await_share,
    copy_share,
    fetch,
)
from makeway.kernels.triton.guess import Guesses
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.step_buffers import Report, Rooms, StepBuffers

ALONE_IDS = 32  # of which each program finds the plan for itself


@triton.jit
def find_entries(
    ids,
    live,
    slot_of,
    wanted,
    spares,
    guesses,
    guesses_at,
    n_taken,
    n_ids,
    top_k,
    n_spares,
    slots_at,
    slot_stride,
    transient_at,
    transient_stride,
    PADDED: tl.constexpr,
    SPARES: tl.constexpr,
    GUESSES: tl.constexpr,
    HAS_LIVE: tl.constexpr,
):
    """By place of `ids`: the expert (-1: none), whether the place is its first, the number of its entry, whether it is
    to be fetched (0 no, 1 yes, 2 + g it is guess number g), whether it takes a spare and which, and where its bytes are
    or go. `n_taken`: spares that guesses took."""
    i = tl.arange(0, PADDED)
    mine = tl.load(ids + i, mask=i < n_ids, other=-1).to(tl.int32)
    if HAS_LIVE:
        mine = tl.where(tl.load(live + i // top_k, mask=i < n_ids, other=-1) >= 0, mine, -1)
    valid = mine >= 0
    # all that the ids lead to is asked for at once: a trip to the L2 cache takes longer than what is found from it
    slot = tl.load(slot_of + mine, mask=valid, other=0).to(tl.int64)
    is_wanted = tl.load(wanted + mine, mask=valid, other=0) != 0
    if SPARES > 0:
        s = tl.arange(0, SPARES)
        spare_slots = tl.load(spares + s, mask=s < n_spares, other=0).to(tl.int64)
    # row j of each matrix below: the id j as seen from the id i; sums over axis 0 stay within threads
    other = mine[:, None]
    same = (other == mine[None, :]) & valid[:, None]
    first = valid & (tl.sum((same & (i[:, None] < i[None, :])).to(tl.int32), 0) == 0)
    below = other < mine[None, :]
    entry = tl.sum((below & first[:, None]).to(tl.int32), 0)
    misses = first & (slot < 0)
    missing = misses.to(tl.int32)
    if GUESSES > 0:
        g = tl.arange(0, GUESSES)
        match = (mine[:, None] == tl.load(guesses + g)[None, :]) & misses[:, None]
        guessed_at = tl.sum(tl.where(match, tl.load(guesses_at + g)[None, :], 0), 1)
        guessed = tl.sum(match.to(tl.int32), 1) > 0
        missing = tl.where(guessed, 2 + tl.sum(tl.where(match, g[None, :], 0), 1), missing)
        misses = misses & (guessed == 0)
    hopes = misses & is_wanted
    spare = n_taken + tl.sum((below & hopes[:, None]).to(tl.int32), 0)
    kept = hopes & (spare < n_spares)
    passing = misses & (kept == 0)
    place = tl.sum((below & passing[:, None]).to(tl.int32), 0).to(tl.int64)
    if SPARES > 0:
        taken = kept[:, None] & (spare[:, None] == tl.arange(0, SPARES)[None, :])
        slot = tl.where(kept, tl.sum(tl.where(taken, spare_slots[None, :], 0), 1), slot)
    at = slots_at + slot * slot_stride
    at = tl.where(passing, transient_at + place * transient_stride, at)
    if GUESSES > 0:
        at = tl.where(guessed, guessed_at, at)
    return mine, first, entry, missing, kept, spare, at


@triton.jit
def write_plan(
    mine,
    first,
    entry,
    missed,
    kept,
    spare,
    at,
    routing,
    experts,
    offsets,
    missing,
    chosen_by,
    weights,
    count,
    first_row,
    routed,
    fetched,
    guesses,
    guesses_spare,
    n_taken,
    n_ids,
    top_k,
    n_spares,
    PADDED: tl.constexpr,
    SPARES: tl.constexpr,
    GUESSES: tl.constexpr,
    N: tl.constexpr,
):
    """What `find_entries` found, for the kernels behind and for the host."""
    i = tl.arange(0, PADDED)
    row = i // top_k
    valid = mine >= 0
    weight = tl.load(routing + i, mask=valid, other=0.0)
    report_at = routed + tl.load(first_row) * top_k
    n_entries = tl.sum(first.to(tl.int32), 0)
    tl.store(experts + entry, mine, mask=first)
    tl.store(experts + i, -1, mask=(i >= n_entries) & (i < n_ids))
    tl.store(offsets + entry, at, mask=first)
    tl.store(missing + entry, missed, mask=first)
    same = (mine[:, None] == mine[None, :]) & valid[:, None]
    rows = tl.sum(tl.where(same, 1 << row[:, None], 0), 0)  # an expert comes once in a row: no bit twice
    tl.store(chosen_by + entry, rows, mask=first)
    tl.store(weights + entry * N + row, weight, mask=valid)
    tl.store(count, n_entries)
    tl.store(report_at + i, mine, mask=i < n_ids)
    if SPARES > 0:
        s = tl.arange(0, SPARES)
        n_kept = n_taken + tl.sum(kept.to(tl.int32), 0)
        tl.store(fetched + s, -1, mask=(s >= n_kept) & (s < n_spares))
        tl.store(fetched + spare, mine, mask=kept)
        if GUESSES > 0:
            g = tl.arange(0, GUESSES)
            taken = tl.load(guesses_spare + g)
            tl.store(fetched + taken, tl.load(guesses + g), mask=taken >= 0)


@quick
@triton.jit(do_not_specialize=["n_ids", "n_spares"])
def plan_kernel(
    ids,
    live,
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
    first_row,
    routed,
    fetched,
    guesses,
    guesses_at,
    guesses_spare,
    arrived,
    store,
    arena,
    n_ids,
    top_k,
    n_spares,
    slots_at,
    slot_stride,
    transient_at,
    transient_stride,
    stride,
    n_words,
    PADDED: tl.constexpr,
    SPARES: tl.constexpr,
    GUESSES: tl.constexpr,
    N: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    FETCH: tl.constexpr,
    WORDS: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Entries of a step, where their bytes are or go, which rows chose them, and the report: by the first program.
    FETCH: programs for each entry; all of them find the plan for themselves, and then copy it if it is missing."""
    begin(PDL)
    n_taken = 0
    if GUESSES > 0:
        n_taken = tl.sum((tl.load(guesses_spare + tl.arange(0, GUESSES)) >= 0).to(tl.int32), 0)
    mine, first, entry, missed, kept, spare, at = find_entries(
        ids,
        live,
        slot_of,
        wanted,
        spares,
        guesses,
        guesses_at,
        n_taken,
        n_ids,
        top_k,
        n_spares,
        slots_at,
        slot_stride,
        transient_at,
        transient_stride,
        PADDED,
        SPARES,
        GUESSES,
        HAS_LIVE,
    )
    if tl.program_id(0) + tl.program_id(1) == 0:
        write_plan(
            mine,
            first,
            entry,
            missed,
            kept,
            spare,
            at,
            routing,
            experts,
            offsets,
            missing,
            chosen_by,
            weights,
            count,
            first_row,
            routed,
            fetched,
            guesses,
            guesses_spare,
            n_taken,
            n_ids,
            top_k,
            n_spares,
            PADDED,
            SPARES,
            GUESSES,
            N,
        )
    if FETCH:
        here = first & (entry == tl.program_id(1))
        how = tl.sum(tl.where(here, missed, 0), 0)
        expert = tl.sum(tl.where(here, mine, 0), 0)
        place = tl.sum(tl.where(here, at, 0), 0)
        if how == 1:
            copy_share(store, arena, expert, place, stride, n_words, WORDS)
        if GUESSES > 0:
            if how > 1:
                flag = arrived + (how - 2) * tl.num_programs(0) + tl.program_id(0)
                await_share(flag, store, arena, expert, place, stride, n_words, WORDS, POLLS)


def plan_step(
    buffers: StepBuffers,
    ids: Tensor,
    *,
    routing: Tensor,
    slot_of: Tensor,
    wanted: Tensor,
    spares: Tensor,
    rooms: Rooms,
    report: Report,
    live: Tensor | None = None,
    source: Source | None = None,
    guesses: Guesses | None = None,
) -> None:
    """Entries of a layer's step into `buffers`, what the host wants to know into `report`; with `source` the missing
    ones are fetched in the same launch. `guesses`: a list that is complete, and whose experts are on their way; those
    that are needed are where it says, or will be (`buffers.missing`).

    ids int [n, top_k] (-1: none), routing f32 [n, top_k], slot_of int32 [n_experts] (-1: not in a slot), wanted uint8
    [n_experts], spares int32 [n_spares]: slot numbers; live int32 [n], below 0 where a row is padding and routes
    nowhere. Wanted misses take spares in ascending expert order while there are any; the others pass through the
    transient region.
    """
    assert ids.shape == (buffers.n, buffers.top_k)
    assert ids.is_contiguous()
    assert routing.is_contiguous()
    assert report.routed.is_contiguous()
    assert report.routed.shape[1] == buffers.top_k
    n_spares = spares.numel()
    assert report.fetched.numel() == n_spares
    plan_kernel[(1, 1) if source is None else (FETCH_PROGRAMS, buffers.n_entries)](
        ids,
        ids if live is None else live,
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
        report.first,
        report.routed,
        report.fetched,
        ids if guesses is None else guesses.experts,
        ids if guesses is None else guesses.offsets,
        ids if guesses is None else guesses.spares,
        ids if guesses is None else guesses.arrived,
        buffers.experts if source is None else source.store.view(torch.int32),
        buffers.experts if source is None else source.arena.view(torch.int32),
        ids.numel(),
        buffers.top_k,
        n_spares,
        rooms.slots_at,
        rooms.slot_stride,
        rooms.transient_at,
        rooms.transient_stride,
        0 if source is None else source.store.stride(0) // 4,
        0 if source is None else source.n_bytes // 4,
        PADDED=max(16, triton.next_power_of_2(ids.numel())),
        SPARES=triton.next_power_of_2(n_spares) if n_spares else 0,
        GUESSES=0 if guesses is None else guesses.n_entries,
        N=MAX_ROWS,
        HAS_LIVE=live is not None,
        FETCH=source is not None,
        WORDS=FETCH_WORDS,
        POLLS=POLLS,
        num_warps=8,
        **overlap(ids.device, joins=guesses is not None),
    )


def fetch_missing(
    buffers: StepBuffers, source: Source, *, guesses: Guesses | None = None, programs: int = FETCH_PROGRAMS
) -> None:
    """Copy the plan's missing experts into their rooms, or wait for those that were guessed."""
    arrived = None if guesses is None else guesses.arrived
    fetch(source, buffers.experts, buffers.offsets, missing=buffers.missing, arrived=arrived, programs=programs)


def plan_and_fetch(
    buffers: StepBuffers, ids: Tensor, *, source: Source, guesses: Guesses | None = None, **plan: Any
) -> None:
    """`plan_step`, then `fetch_missing`: one launch when there are so few ids that every program finds the plan for
    itself sooner than another launch begins."""
    if ids.numel() <= ALONE_IDS:
        plan_step(buffers, ids, source=source, guesses=guesses, **plan)
    else:
        plan_step(buffers, ids, guesses=guesses, **plan)
        fetch_missing(buffers, source, guesses=guesses)
