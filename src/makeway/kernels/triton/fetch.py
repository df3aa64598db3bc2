"""Copies of experts from pinned host memory into the arena, by kernels: misses, and guesses that misses may wait for.

Owns no memory. Never decides what is fetched (`step_plan.py`, `guess.py`).
Hazard: nothing promises that a guess's copy runs while somebody waits for it. Whoever waits does so program by
program, for the share that the same program of the copy brings, and after a while copies that share itself: the same
bytes to the same place.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick

FETCH_PROGRAMS = 8  # per expert: as fast as 16 or 64, and guesses are copied beside other kernels
FETCH_WORDS = 4096  # of 32 bits, in one turn of a program of 256 threads: four loads of 16 bytes each
POLLS = 20_000  # of a few tenths of a microsecond; what is on its way takes a tenth of that at most


@dataclass(frozen=True)
class Source:
    """Where a layer's experts are fetched from, n_bytes each, and the memory they are fetched into.

    store u8 [n_experts, stride], pinned host memory that the device reads directly; arena u8. Sizes are multiples of
    16.
    """

    store: Tensor
    arena: Tensor
    n_bytes: int

    def __post_init__(self) -> None:
        assert self.n_bytes % 16 == 0
        assert self.store.stride(0) % 16 == 0
        assert self.store.stride(1) == 1


@triton.jit
def copy_share(store, arena, expert, at, stride, n_words, WORDS: tl.constexpr):
    """This program's turns of copying an expert from pinned host memory (i32 words) to byte `at` of the arena."""
    source = store + expert.to(tl.int64) * stride
    target = arena + tl.multiple_of(at // 4, 4)  # else stores are of four bytes each
    i = tl.max_contiguous(tl.arange(0, WORDS), WORDS)
    for turn in range(tl.program_id(0) * WORDS, n_words, tl.num_programs(0) * WORDS):
        inside = turn + i < n_words
        tl.store(target + turn + i, tl.load(source + turn + i, mask=inside), mask=inside)


@triton.jit
def await_share(arrived, store, arena, expert, at, stride, n_words, WORDS: tl.constexpr, POLLS: tl.constexpr):
    """Until the share of a guess that this program would copy has arrived; copies it after POLLS looks in vain."""
    polls = 0
    here = tl.atomic_add(arrived, 0, sem="acquire")
    while (here == 0) & (polls < POLLS):
        here = tl.atomic_add(arrived, 0, sem="acquire")
        polls += 1
    if here == 0:
        copy_share(store, arena, expert, at, stride, n_words, WORDS)


@quick
@triton.jit
def fetch_kernel(
    store,
    arena,
    experts,
    offsets,
    missing,
    arrived,
    stride,
    n_words,
    WORDS: tl.constexpr,
    POLLS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy the plan's missing entries to where it puts them. missing: 0 no, 1 yes, 2 + g it is guess number g."""
    begin(PDL)
    entry = tl.program_id(1)
    expert = tl.load(experts + entry)
    if expert < 0:
        return
    how = tl.load(missing + entry)
    if how == 0:
        return
    at = tl.load(offsets + entry)
    if how == 1:
        copy_share(store, arena, expert, at, stride, n_words, WORDS)
    else:
        flag = arrived + (how - 2) * tl.num_programs(0) + tl.program_id(0)
        await_share(flag, store, arena, expert, at, stride, n_words, WORDS, POLLS)


@triton.jit
def copy_guesses(store, arena, experts, offsets, arrived, stride, n_words, GUESSES: tl.constexpr, WORDS: tl.constexpr):
    """This program's shares of a list, one after the other; tells of each when it is there."""
    for g in range(GUESSES):
        expert = tl.load(experts + g)
        if expert >= 0:
            copy_share(store, arena, expert, tl.load(offsets + g), stride, n_words, WORDS)
            tl.debug_barrier()  # all threads' stores come before what one of them releases
            tl.atomic_xchg(arrived + g * tl.num_programs(0) + tl.program_id(0), 1, sem="release")


@quick
@triton.jit
def fetch_guesses_kernel(
    arena,
    store,
    experts,
    offsets,
    arrived,
    stride,
    n_words,
    store_b,
    experts_b,
    offsets_b,
    arrived_b,
    stride_b,
    n_words_b,
    GUESSES: tl.constexpr,
    LISTS: tl.constexpr,
    WORDS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Copy one list of guesses, or two, each likeliest first."""
    begin(PDL)
    copy_guesses(store, arena, experts, offsets, arrived, stride, n_words, GUESSES, WORDS)
    if LISTS > 1:
        copy_guesses(store_b, arena, experts_b, offsets_b, arrived_b, stride_b, n_words_b, GUESSES, WORDS)


def fetch(
    source: Source,
    experts: Tensor,
    offsets: Tensor,
    *,
    missing: Tensor,
    arrived: Tensor | None = None,
    programs: int = FETCH_PROGRAMS,
) -> None:
    """Copy the missing ones of experts int32 [E] (-1: none) to offsets int64 [E] of the arena, in bytes. missing int32
    [E]: 0 it is there, 1 it is not, 2 + g guess number g brings it, which arrived int32 [G, programs] tells of."""
    assert arrived is None or arrived.shape[1] == programs
    fetch_kernel[(programs, experts.numel())](
        source.store.view(torch.int32),
        source.arena.view(torch.int32),
        experts,
        offsets,
        missing,
        missing if arrived is None else arrived,
        source.store.stride(0) // 4,
        source.n_bytes // 4,
        WORDS=FETCH_WORDS,
        POLLS=POLLS,
        num_warps=8,
        **overlap(experts.device),
    )


def fetch_guesses(lists: Sequence[tuple[Source, Tensor, Tensor, Tensor]]) -> None:
    """Copy the experts of one list or two, in order: the source, experts int32 [G] (-1: none), offsets int64 [G] of the
    arena, in bytes, and arrived int32 [G, FETCH_PROGRAMS], which becomes 1 for each share that is there."""
    first = lists[0]
    assert 1 <= len(lists) <= 2
    assert all(one[0].arena.data_ptr() == first[0].arena.data_ptr() for one in lists)
    assert all(one[1].numel() == first[1].numel() for one in lists)
    sides = [
        (source.store.view(torch.int32), experts, offsets, arrived, source.store.stride(0) // 4, source.n_bytes // 4)
        for source, experts, offsets, arrived in lists
    ]
    fetch_guesses_kernel[(FETCH_PROGRAMS,)](
        first[0].arena.view(torch.int32),
        *sides[0],
        *sides[-1],
        GUESSES=first[1].numel(),
        LISTS=len(lists),
        WORDS=FETCH_WORDS,
        num_warps=8,
        **overlap(first[1].device),
    )
