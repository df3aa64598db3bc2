"""Which experts a later layer will probably miss, decided on the device, and fetched while this layer runs.

Owns the list of guesses for one layer. Never decides what runs: that layer's plan takes from the list what it needs and
fetches the rest. Hazard: what was guessed may be in a spare, so the plan behind it gives that away to nobody.

A guess is an expert that the later layer's router would choose for this layer's input, and that is in no slot.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.fetch import FETCH_PROGRAMS
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick


@dataclass(frozen=True)
class Guesses:
    """Up to G guesses of a layer, int32 but for offsets: experts [G] (-1: none), offsets int64 [G] (bytes from the
    arena's start), spares [G] (the spare that it takes, -1: none), arrived [G, FETCH_PROGRAMS] (1: that share is
    there). A list may be made in rounds, each of its own part."""

    experts: Tensor
    offsets: Tensor
    spares: Tensor
    arrived: Tensor

    @staticmethod
    def empty(n: int, device: torch.device) -> "Guesses":
        none = torch.full((2, n), -1, dtype=torch.int32, device=device)
        arrived = torch.zeros((n, FETCH_PROGRAMS), dtype=torch.int32, device=device)
        return Guesses(none[0], torch.zeros(n, dtype=torch.int64, device=device), none[1], arrived)

    @property
    def n_entries(self) -> int:
        """G, a power of two."""
        return self.experts.numel()

    def clear(self) -> None:
        """No guesses."""
        self.experts.fill_(-1)
        self.spares.fill_(-1)

    def part(self, begin: int, end: int) -> "Guesses":
        """Guesses begin to end - 1, in place."""
        return Guesses(
            self.experts[begin:end], self.offsets[begin:end], self.spares[begin:end], self.arrived[begin:end]
        )


@quick
@triton.jit(do_not_specialize=["n_ids", "n_spares"])
def guess_kernel(
    ids,
    live,
    slot_of,
    wanted,
    spares,
    limit,
    experts,
    offsets,
    taken,
    arrived,
    told,
    earlier,
    earlier_spares,
    n_ids,
    top_k,
    n_spares,
    slots_at,
    slot_stride,
    rooms_at,
    room_stride,
    PADDED: tl.constexpr,
    GUESSES: tl.constexpr,
    EARLIER: tl.constexpr,
    PROGRAMS: tl.constexpr,
    HAS_LIVE: tl.constexpr,
    PDL: tl.constexpr,
):
    """The first `limit` different experts that are in no slot, best ranks first, among equal ranks the first row's.
    EARLIER: guesses of the rounds before, which are not made again, and whose spares are taken."""
    begin(PDL)
    i = tl.arange(0, PADDED)
    row = i // top_k
    mine = tl.load(ids + i, mask=i < n_ids, other=-1).to(tl.int32)
    if HAS_LIVE:
        mine = tl.where(tl.load(live + row, mask=i < n_ids, other=-1) >= 0, mine, -1)
    absent = mine >= 0
    absent = absent & (tl.load(slot_of + mine, mask=absent, other=0) < 0)
    n_taken = 0
    if EARLIER > 0:
        e = tl.arange(0, EARLIER)
        known = mine[:, None] == tl.load(earlier + e)[None, :]
        absent = absent & (tl.sum(known.to(tl.int32), 1) == 0)
        n_taken = tl.sum((tl.load(earlier_spares + e) >= 0).to(tl.int32), 0)
    order = (i % top_k) * PADDED + row
    before = order[:, None] < order[None, :]  # row j: whether the id j comes before the id i
    twin = (mine[:, None] == mine[None, :]) & absent[:, None] & before
    first = absent & (tl.sum(twin.to(tl.int32), 0) == 0)
    place = tl.sum((before & first[:, None]).to(tl.int32), 0)
    takes = first & (place < tl.minimum(tl.load(limit), GUESSES))
    hopes = takes & (tl.load(wanted + mine, mask=takes, other=0) != 0)
    spare = n_taken + tl.sum((before & hopes[:, None]).to(tl.int32), 0)
    kept = hopes & (spare < n_spares)
    slot = tl.load(spares + spare, mask=kept, other=0).to(tl.int64)
    at = tl.where(kept, slots_at + slot * slot_stride, rooms_at + place.to(tl.int64) * room_stride)
    g = tl.arange(0, GUESSES)
    tl.store(arrived + tl.arange(0, GUESSES * PROGRAMS), tl.zeros([GUESSES * PROGRAMS], tl.int32))
    none = g >= tl.sum(takes.to(tl.int32), 0)
    tl.store(experts + g, -1, mask=none)
    tl.store(taken + g, -1, mask=none)
    tl.store(told + g, -1, mask=none)
    tl.store(experts + place, mine, mask=takes)
    tl.store(offsets + place, at, mask=takes)
    tl.store(taken + place, tl.where(kept, spare, -1), mask=takes)
    tl.store(told + place, mine, mask=takes)


def guess_step(
    guesses: Guesses,
    ids: Tensor,
    *,
    slot_of: Tensor,
    wanted: Tensor,
    spares: Tensor,
    limit: Tensor,
    told: Tensor,
    slots: tuple[int, int],
    rooms: tuple[int, int],
    live: Tensor | None = None,
    earlier: Guesses | None = None,
) -> None:
    """The guesses for a layer into `guesses`, and their experts (-1: none) into `told` int32 [G], for the host.
    `earlier`: what was guessed of this layer before, and is not guessed again.

    ids int [n, top_k], best first (-1: none), as the layer's router chooses from another layer's input; slot_of,
    wanted, spares, live as for `step_plan.plan_step`; limit int32 [1]: at most so many. slots, rooms: where slot 0 and
    room 0 lie in the arena and how far the next one is, in bytes. Wanted ones take spares while there are any, the
    others rooms by their number.
    """
    n, top_k = ids.shape
    assert ids.is_contiguous()
    assert told.numel() == guesses.n_entries
    assert told.is_contiguous()
    guess_kernel[(1,)](
        ids,
        ids if live is None else live,
        slot_of,
        wanted,
        spares,
        limit,
        guesses.experts,
        guesses.offsets,
        guesses.spares,
        guesses.arrived,
        told,
        ids if earlier is None else earlier.experts,
        ids if earlier is None else earlier.spares,
        n * top_k,
        top_k,
        spares.numel(),
        *slots,
        *rooms,
        PADDED=max(16, triton.next_power_of_2(n * top_k)),
        GUESSES=guesses.n_entries,
        EARLIER=0 if earlier is None else earlier.n_entries,
        PROGRAMS=FETCH_PROGRAMS,
        HAS_LIVE=live is not None,
        num_warps=4,
        **overlap(ids.device),
    )
