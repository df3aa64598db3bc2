"""Token sort for a sweep: (token, expert) pairs by expert, and the sum of their outputs by token.

Owns the order of pairs, and the order of the sum. Never waits for the device: how many pairs an expert got stays there.
Hazard: outputs of pairs may be rounded to bf16 on their way, but their sum is always f32.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.quick import quick

COUNT_TILE = 1024  # pairs a program counts at a time
PLACE_TILE = 128  # pairs a program places at a time, each compared with each
SEGMENT_PAIRS = 512  # at least, of a program
MOST_SEGMENTS = 128  # enough to fill a GPU
SCAN_ROWS = 32  # segments whose counts are summed at a time
COMBINE_COLUMNS = 1024


@dataclass(frozen=True)
class SortedPairs:
    """The routed pairs of n tokens x k, pair = token * k + rank, by expert and then by token.

    order int32 [n * k]: the pair at each place (places past the last routed pair are undefined).
    offsets int32 [n_experts + 1]: the first place of each expert.
    places int32 [n, k]: the place of each pair, -1 for padding.
    nexts int32 [segments, n_experts]: scratch; where the next pair of an expert in a segment of the pairs goes.
    """

    order: Tensor
    offsets: Tensor
    places: Tensor
    nexts: Tensor

    @staticmethod
    def nbytes(n: int, top_k: int, n_experts: int) -> int:
        """Bytes of a room for `n` tokens."""
        return 4 * sum(_sizes(n, top_k, n_experts))

    @staticmethod
    def of(room: Tensor, n: int, top_k: int, *, n_experts: int) -> "SortedPairs":
        """Carve it out of `room`, u8 [>= nbytes] and aligned to 16 bytes, as each part then is whatever `n`: kernels
        are compiled for it. Contents are as they were."""
        sizes, n_segs = _sizes(n, top_k, n_experts), n_segments(n * top_k)
        order, places, offsets, nexts = room[: 4 * sum(sizes)].view(torch.int32).split(sizes)
        return SortedPairs(
            order[: n * top_k],
            offsets[: n_experts + 1],
            places[: n * top_k].view(n, top_k),
            nexts[: n_segs * n_experts].view(n_segs, n_experts),
        )

    @property
    def n_experts(self) -> int:
        return self.offsets.shape[0] - 1


def _sizes(n: int, top_k: int, n_experts: int) -> tuple[int, ...]:
    """int32 of order, places, offsets and nexts, each a multiple of 16 bytes."""
    sizes = n * top_k, n * top_k, n_experts + 1, n_segments(n * top_k) * n_experts
    return tuple(-(-size // 4) * 4 for size in sizes)


def n_segments(n_pairs: int) -> int:
    """Into how many runs of pairs the sort is cut."""
    return min(MOST_SEGMENTS, -(-n_pairs // SEGMENT_PAIRS))


def sort_pairs(ids: Tensor, pairs: SortedPairs) -> None:
    """Fill `pairs` from ids int32 or int64 [n, k], -1 where a row is padding; an id occurs once in a row.

    Bits do not depend on timing: the only atomics add integers. Every pair is read twice, by programs that count and
    place the pairs of a segment.
    """
    assert ids.is_contiguous()
    assert ids.shape == pairs.places.shape
    n_pairs, n_experts = ids.numel(), pairs.n_experts
    if n_pairs == 0:
        pairs.offsets.zero_()
        return
    bins, n_segs = triton.next_power_of_2(n_experts), pairs.nexts.shape[0]
    length = -(-n_pairs // n_segs)
    count_kernel[(n_segs,)](
        ids, pairs.nexts, pairs.places, n_pairs, length, n_experts, BINS=bins, TILE=COUNT_TILE, num_warps=4
    )
    scan_kernel[(1,)](pairs.nexts, pairs.offsets, n_segs, n_experts, BINS=bins, ROWS=SCAN_ROWS, num_warps=16)
    place_kernel[(n_segs,)](
        ids, pairs.nexts, pairs.order, pairs.places, n_pairs, length, n_experts, TILE=PLACE_TILE, num_warps=8
    )


def combine(acc: Tensor, out: Tensor, *, pairs: SortedPairs, first: int, last: int, skip: int) -> None:
    """acc f32 [n, hidden] += out, for the places of one round, token by token in ascending expert id.

    out bf16 or f32 [capacity, hidden] holds the weighted outputs of places offsets[first] + skip ... (at most
    `capacity`, below offsets[last]). Each token's row is changed by one program, one addition per expert.
    """
    capacity, hidden = out.shape
    top_k = pairs.places.shape[1]
    combine_kernel[(capacity, triton.cdiv(hidden, COMBINE_COLUMNS))](
        acc,
        out,
        pairs.order,
        pairs.offsets,
        pairs.places,
        first,
        last,
        skip,
        capacity,
        hidden,
        top_k,
        TOP_K=triton.next_power_of_2(top_k),
        COLUMNS=COMBINE_COLUMNS,
        num_warps=4,
    )


@quick
@triton.jit(do_not_specialize=["n_pairs", "length"])
def count_kernel(ids, nexts, places, n_pairs, length, n_experts, BINS: tl.constexpr, TILE: tl.constexpr):
    """nexts[s, e] = how often e occurs in segment s; padding gets its place here."""
    start = tl.program_id(0) * length
    end = tl.minimum(start + length, n_pairs)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(start, end, TILE):
        at = first + tl.arange(0, TILE)
        inside = at < end
        expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
        routed = expert >= 0
        tl.store(places + at, -1, mask=inside & (expert < 0))
        counts += tl.histogram(tl.where(routed, expert, 0), BINS)
        n_unrouted = TILE - tl.sum(routed.to(tl.int32), axis=0)
        counts = tl.where(bins == 0, counts - n_unrouted, counts)
    tl.store(nexts + tl.program_id(0) * n_experts + bins, counts, mask=bins < n_experts)


@quick
@triton.jit(do_not_specialize=["n_segs"])
def scan_kernel(nexts, offsets, n_segs, n_experts, BINS: tl.constexpr, ROWS: tl.constexpr):
    """Counts to places: of every expert, and in place of every expert in every segment."""
    bins = tl.arange(0, BINS)
    totals = tl.zeros([BINS], tl.int32)
    for first in range(0, n_segs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < n_segs) & (bins < n_experts)[None, :]
        totals += tl.sum(tl.load(nexts + rows * n_experts + bins[None, :], mask=inside, other=0), axis=0)
    ends = tl.cumsum(totals, axis=0)
    tl.store(offsets + 1 + bins, ends, mask=bins < n_experts)
    tl.store(offsets + bins, tl.zeros([BINS], tl.int32), mask=bins == 0)
    before = ends - totals
    for first in range(0, n_segs, ROWS):
        rows = first + tl.arange(0, ROWS)[:, None]
        inside = (rows < n_segs) & (bins < n_experts)[None, :]
        at = nexts + rows * n_experts + bins[None, :]
        counts = tl.load(at, mask=inside, other=0)
        tl.store(at, before[None, :] + tl.cumsum(counts, axis=0) - counts, mask=inside)
        before += tl.sum(counts, axis=0)


@quick
@triton.jit(do_not_specialize=["n_pairs", "length"])
def place_kernel(ids, nexts, order, places, n_pairs, length, n_experts, TILE: tl.constexpr):
    """The pairs of one segment, in their order. What the next place of an expert is stands in the segment's row."""
    start = tl.program_id(0) * length
    end = tl.minimum(start + length, n_pairs)
    nexts += tl.program_id(0) * n_experts
    i = tl.arange(0, TILE)
    for first in range(start, end, TILE):
        at = first + i
        expert = tl.load(ids + at, mask=at < end, other=-1).to(tl.int32)
        before = (expert[:, None] == expert[None, :]) & (i[None, :] < i[:, None])
        mine = expert >= 0
        base = tl.load(nexts + expert, mask=mine, other=0, cache_modifier=".cg")
        tl.debug_barrier()  # all have read before any adds
        tl.atomic_add(nexts + expert, 1, mask=mine, sem="relaxed")
        to = base + tl.sum(before.to(tl.int32), axis=1)
        tl.store(order + to, at, mask=mine)
        tl.store(places + at, to, mask=mine)
        tl.debug_barrier()  # all have added before any reads again


@quick
@triton.jit(do_not_specialize=["first", "last", "skip", "capacity"])
def combine_kernel(
    acc,
    out,
    order,
    offsets,
    places,
    first,
    last,
    skip,
    capacity,
    hidden,
    top_k,
    TOP_K: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """The program of a token's lowest place in the round adds all of the token's outputs in the round."""
    low = tl.load(offsets + first) + skip
    high = tl.minimum(tl.load(offsets + last), low + capacity)
    place = low + tl.program_id(0)
    if place >= high:
        return
    token = tl.load(order + place) // top_k
    ranks = tl.arange(0, TOP_K)
    mine = tl.load(places + token * top_k + ranks, mask=ranks < top_k, other=-1)
    mine = tl.where((mine >= low) & (mine < high), mine, high)
    if tl.min(mine, axis=0) != place:
        return
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = columns < hidden
    target = acc + token.to(tl.int64) * hidden + columns
    total = tl.load(target, mask=inside, other=0.0)
    while place < high:
        total += tl.load(out + (place - low).to(tl.int64) * hidden + columns, mask=inside, other=0.0)
        place = tl.min(tl.where(mine > place, mine, high), axis=0)
    tl.store(target, total, mask=inside)
