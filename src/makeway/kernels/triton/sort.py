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

COUNT_TILE = 1024  # pairs a program counts
PLACE_TILE = 4096  # pairs an expert's program looks at in one step
COMBINE_COLUMNS = 1024


@dataclass(frozen=True)
class SortedPairs:
    """The routed pairs of n tokens x k, pair = token * k + rank, by expert and then by token.

    order int32 [n * k]: the pair at each place (places past the last routed pair are undefined).
    offsets int32 [n_experts + 1]: the first place of each expert.
    places int32 [n, k]: the place of each pair, -1 for padding.
    """

    order: Tensor
    offsets: Tensor
    places: Tensor

    @staticmethod
    def nbytes(n: int, top_k: int, n_experts: int) -> int:
        """Bytes of a room for `n` tokens."""
        return 4 * (2 * n * top_k + n_experts + 1)

    @staticmethod
    def of(room: Tensor, n: int, top_k: int, *, n_experts: int) -> "SortedPairs":
        """Carve it out of `room`, u8 [>= nbytes] and aligned to 4 bytes; contents are as they were."""
        values = room[: SortedPairs.nbytes(n, top_k, n_experts)].view(torch.int32)
        order, places, offsets = values.split((n * top_k, n * top_k, n_experts + 1))
        return SortedPairs(order, offsets, places.view(n, top_k))

    @property
    def n_experts(self) -> int:
        return self.offsets.shape[0] - 1


def sort_pairs(ids: Tensor, pairs: SortedPairs) -> None:
    """Fill `pairs` from ids int32 or int64 [n, k], -1 where a row is padding; an id occurs once in a row.

    Bits do not depend on timing: the only atomics add integers. Work: every expert's program reads all ids once.
    """
    assert ids.is_contiguous()
    assert ids.shape == pairs.places.shape
    n_pairs, n_experts = ids.numel(), pairs.n_experts
    pairs.offsets.zero_()
    if n_pairs == 0:
        return
    bins = triton.next_power_of_2(n_experts)
    count_kernel[(triton.cdiv(n_pairs, COUNT_TILE),)](
        ids, pairs.offsets, pairs.places, n_pairs, n_experts, BINS=bins, TILE=COUNT_TILE, num_warps=4
    )
    scan_kernel[(1,)](pairs.offsets, n_experts, BINS=bins, num_warps=4)
    place_kernel[(n_experts,)](ids, pairs.offsets, pairs.order, pairs.places, n_pairs, TILE=PLACE_TILE, num_warps=4)


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
@triton.jit(do_not_specialize=["n_pairs"])
def count_kernel(ids, offsets, places, n_pairs, n_experts, BINS: tl.constexpr, TILE: tl.constexpr):
    """offsets[e + 1] += how often e occurs in this tile; padding gets its place here."""
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    inside = at < n_pairs
    expert = tl.load(ids + at, mask=inside, other=-1).to(tl.int32)
    routed = expert >= 0
    tl.store(places + at, -1, mask=inside & (expert < 0))
    counts = tl.histogram(tl.where(routed, expert, 0), BINS)
    bins = tl.arange(0, BINS)
    n_unrouted = TILE - tl.sum(routed.to(tl.int32), axis=0)
    counts = tl.where(bins == 0, counts - n_unrouted, counts)
    tl.atomic_add(offsets + 1 + bins, counts, mask=(bins < n_experts) & (counts > 0), sem="relaxed")


@quick
@triton.jit
def scan_kernel(offsets, n_experts, BINS: tl.constexpr):
    """Counts to offsets, in place."""
    bins = tl.arange(0, BINS)
    counts = tl.load(offsets + 1 + bins, mask=bins < n_experts, other=0)
    tl.store(offsets + 1 + bins, tl.cumsum(counts, axis=0), mask=bins < n_experts)


@quick
@triton.jit(do_not_specialize=["n_pairs"])
def place_kernel(ids, offsets, order, places, n_pairs, TILE: tl.constexpr):
    """The pairs of one expert, in the order of their tokens."""
    expert = tl.program_id(0)
    place = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    start = 0
    while place < end:  # no further than the expert's last pair
        at = start + tl.arange(0, TILE)
        mine = tl.load(ids + at, mask=at < n_pairs, other=-1).to(tl.int32) == expert
        ours = mine.to(tl.int32)
        to = place + tl.cumsum(ours, axis=0) - 1
        tl.store(order + to, at, mask=mine)
        tl.store(places + at, to, mask=mine)
        place += tl.sum(ours, axis=0)
        start += TILE


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
