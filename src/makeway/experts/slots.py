"""The slot table: which expert is in which slot of its layer, and which of them decode may use.

Owns the map ExpertKey -> slot, its inverse, the spare sets and what is lent; never holds bytes, never
copies and never chooses (the policy does).
Hazard: *filled* is not *published*: a slot's bytes may be there while a copy's event is still open. Only
published slots are hits; whoever publishes must know that the bytes are complete.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from makeway.errors import EngineFailed

Ints = NDArray[np.int32]
NONE = -1


@dataclass(frozen=True)
class Lent:
    """What lay published in the slots just lent: parallel arrays, ordered by layer, then slot."""

    n_kept: int
    layers: Ints
    slots: Ints
    experts: Ints


@dataclass(frozen=True)
class Moves:
    """Copies inside the arena before lending: expert of `layers[i]` from slot `sources[i]` to `targets[i]`.

    Sources are in the tail that will be lent, targets in the part that stays, so no copy reads what
    another one writes.
    """

    layers: Ints
    experts: Ints
    sources: Ints
    targets: Ints


def _require(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise EngineFailed(f"slot table: {message}")


def _arrays(*values: ArrayLike) -> tuple[Ints, ...]:
    return tuple(np.atleast_1d(np.asarray(value, dtype=np.int32)) for value in values)


def _are_distinct(values: NDArray[np.integer]) -> bool:
    """Of numbers that are not negative. Without `np.unique`, which takes 50 us for a few values, and this runs in every
    step."""
    if values.size > 64:
        return int(np.bincount(values).max()) == 1
    return len(set(values.tolist())) == values.size


class SlotTable:
    """State of all slots, as arrays indexed by MoE layer.

    A layer has `n_slots` slots for published experts and two spare sets of `n_spares_per_set`; the ranks
    (slot numbers) 0 .. n_ranks - 1 are shared: a kept spare and its victim swap roles, no bytes move.

    slot_of [layers, experts]: the published slot or -1. expert_of [layers, ranks]: the published expert
    or -1. holds [layers, ranks]: the expert whose bytes are (or are being) put there, or -1.
    spares [2, layers, n_spares_per_set]: slot numbers. epochs [layers, ranks]: grows when a slot changes
    what it holds; `epoch` grows with every change of what is published.
    Every method raises EngineFailed, changing nothing, when an invariant would break.
    """

    def __init__(self, n_layers: int, n_experts: int, *, n_slots: int, n_spares_per_set: int) -> None:
        """An empty table; with no slots there are no spares."""
        if n_slots == 0:
            n_spares_per_set = 0
        if n_layers < 1 or n_experts < 1 or n_slots < 0 or n_spares_per_set < 0:
            raise ValueError("a slot table needs layers and experts, and counts that are not negative")
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.n_slots = n_slots
        self.n_spares_per_set = n_spares_per_set
        self.n_ranks = n_slots + 2 * n_spares_per_set
        self.n_owned = self.n_ranks  # ranks that are not lent
        self.n_published = 0
        self.epoch = 0
        self.slot_of: Ints = np.full((n_layers, n_experts), NONE, dtype=np.int32)
        self.expert_of: Ints = np.full((n_layers, self.n_ranks), NONE, dtype=np.int32)
        self.holds: Ints = np.full((n_layers, self.n_ranks), NONE, dtype=np.int32)
        self.epochs: Ints = np.zeros((n_layers, self.n_ranks), dtype=np.int32)
        self.is_spare: NDArray[np.bool_] = np.zeros((n_layers, self.n_ranks), dtype=np.bool_)
        first = np.arange(2 * n_spares_per_set, dtype=np.int32).reshape(2, 1, n_spares_per_set)
        self.spares: Ints = np.broadcast_to(n_slots + first, (2, n_layers, n_spares_per_set)).copy()
        self.is_spare[:, n_slots:] = True

    @property
    def nbytes(self) -> int:
        """Host bytes of the arrays."""
        return sum(
            a.nbytes for a in (self.slot_of, self.expert_of, self.holds, self.epochs, self.is_spare, self.spares)
        )

    def is_published(self) -> NDArray[np.bool_]:
        """[layers, experts]: in a published slot."""
        return np.not_equal(self.slot_of, NONE)

    def is_free(self) -> NDArray[np.bool_]:
        """[layers, ranks]: owned slots that are neither published, nor spare, nor in flight."""
        free: NDArray[np.bool_] = (self.holds == NONE) & ~self.is_spare
        free[:, self.n_owned :] = False
        return free

    def n_free(self) -> Ints:
        """[layers]: free slots."""
        return np.asarray(self.is_free().sum(axis=1), dtype=np.int32)

    # -- filling and publishing ------------------------------------------------------------------

    def _check(self, layers: Ints, slots: Ints) -> None:
        _require(layers.shape == slots.shape, "layers and slots differ in number")
        if layers.size == 0:
            return
        _require(layers.min() >= 0 and layers.max() < self.n_layers, "no such layer")
        _require(slots.min() >= 0 and slots.max() < self.n_ranks, "no such slot")
        _require(slots.max() < self.n_owned, "the slot is lent")
        flat = layers.astype(np.int64) * self.n_ranks + slots
        _require(_are_distinct(flat), "the same slot twice")

    def fill(self, layers: ArrayLike, slots: ArrayLike, experts: ArrayLike) -> None:
        """Bytes of `experts` are on their way into unpublished `slots` (spare or free). Publishes nothing."""
        la, sl, ex = _arrays(layers, slots, experts)
        self._check(la, sl)
        _require(ex.shape == la.shape, "experts and slots differ in number")
        if la.size == 0:
            return
        _require(ex.min() >= 0 and ex.max() < self.n_experts, "no such expert")
        _require((self.expert_of[la, sl] == NONE).all(), "a published slot is not overwritten")
        self.holds[la, sl] = ex
        self.epochs[la, sl] += 1

    def publish(self, layers: ArrayLike, slots: ArrayLike) -> None:
        """Let decode use filled slots, whose copies are complete. Spares are published by `keep`."""
        la, sl = _arrays(layers, slots)
        self._check(la, sl)
        _require(not self.is_spare[la, sl].any(), "a spare is published only by keep")
        _require((self.expert_of[la, sl] == NONE).all(), "the slot is published already")
        self._publish(la, sl)

    def _publish(self, la: Ints, sl: Ints) -> None:
        if la.size == 0:
            return
        experts = self.holds[la, sl]
        _require((experts != NONE).all(), "an empty slot cannot be published")
        _require((self.slot_of[la, experts] == NONE).all(), "the expert is published in another slot")
        flat = la.astype(np.int64) * self.n_experts + experts
        _require(_are_distinct(flat), "the same expert twice")
        self.slot_of[la, experts] = sl
        self.expert_of[la, sl] = experts
        self.n_published += int(la.size)
        self.epoch += 1

    def drop(self, layers: ArrayLike, slots: ArrayLike) -> None:
        """Slots in flight are free again: what was on its way is not needed."""
        la, sl = _arrays(layers, slots)
        self._check(la, sl)
        _require((self.expert_of[la, sl] == NONE).all(), "a published slot is not dropped")
        _require(not self.is_spare[la, sl].any(), "a spare is not dropped")
        self.holds[la, sl] = NONE

    def unpublish(self, layers: ArrayLike, slots: ArrayLike) -> Ints:
        """Take published slots from decode; they are free. Returns the experts that were there."""
        la, sl = _arrays(layers, slots)
        self._check(la, sl)
        experts = self.expert_of[la, sl]
        _require((experts != NONE).all(), "the slot is not published")
        if la.size:
            self.slot_of[la, experts] = NONE
            self.expert_of[la, sl] = NONE
            self.holds[la, sl] = NONE
            self.n_published -= int(la.size)
            self.epoch += 1
        return experts

    # -- spares ----------------------------------------------------------------------------------

    def keep(self, spare_set: int, layers: ArrayLike, indices: ArrayLike, *, victims: ArrayLike) -> Ints:
        """Publish the filled spares `spares[spare_set, layers, indices]`; the slots of `victims` become spares.

        `victims`: published experts of the same layers, or -1 to give up a free slot instead. Returns the
        slots now published. At most one call per layer and spare; bytes do not move.
        """
        la, ix, out = _arrays(layers, indices, victims)
        _require(la.shape == ix.shape == out.shape, "layers, spares and victims differ in number")
        if la.size == 0:
            return np.empty(0, dtype=np.int32)
        _require(self.n_owned == self.n_ranks, "nothing is kept while slots are lent")
        _require(0 <= spare_set < 2 and ix.min() >= 0 and ix.max() < self.n_spares_per_set, "no such spare")
        slots: Ints = self.spares[spare_set, la, ix]
        self._check(la, slots)
        freed: Ints = np.where(out == NONE, NONE, self.slot_of[la, out]).astype(np.int32)
        for i in np.flatnonzero(out == NONE):
            free = self.is_free()[la[i]]
            free[freed[(la == la[i]) & (freed != NONE)]] = False
            choices = np.flatnonzero(free)
            _require(choices.size > 0, "no free slot to give up")
            freed[i] = choices[-1]
        _require((freed != NONE).all(), "the victim is not published")
        self._check(la, freed)
        experts = self.holds[la, slots]
        _require((experts != NONE).all(), "an empty spare cannot be kept")
        _require((self.slot_of[la, experts] == NONE).all(), "the expert is published in another slot")
        flat = la.astype(np.int64) * self.n_experts + experts
        _require(_are_distinct(flat), "the same expert twice")
        has_victim = out != NONE
        self.unpublish(la[has_victim], freed[has_victim])
        self.is_spare[la, slots] = False
        self.is_spare[la, freed] = True
        self.spares[spare_set, la, ix] = freed
        self._publish(la, slots)
        return slots

    # -- hand-over -------------------------------------------------------------------------------

    def moves_before_lending(self, n_kept: int, heat: NDArray[np.floating]) -> Moves:
        """Copies that put the hottest experts of every layer into the ranks that stay.

        Ranks do not follow heat while decoding (kept spares lie anywhere), so before the tail is lent its
        hot experts change place with colder ones of the kept part, or take free slots there.
        `heat` [layers, experts], higher is hotter. Deterministic: ties go to the lower slot.
        """
        n_kept = min(n_kept, self.n_owned)
        experts = self.expert_of[:, : self.n_owned]
        is_published = experts != NONE
        is_stay = ~self.is_spare[:, :n_kept]
        cold = np.where(is_published, -np.take_along_axis(heat, np.maximum(experts, 0), axis=1), np.inf)
        hottest = np.argsort(cold, axis=1, kind="stable")  # slots of each layer
        n_wins = np.minimum(is_stay.sum(axis=1), is_published.sum(axis=1))
        wins = np.arange(self.n_owned) < n_wins[:, None]  # in the order of `hottest`
        stays_hot = np.zeros_like(is_published)
        np.put_along_axis(stays_hot, hottest, wins, axis=1)
        leaves = wins & (hottest >= n_kept)
        layers, places = np.nonzero(leaves)
        sources = hottest[layers, places]
        # the targets of a layer: empty ones, then cold ones, in order of slots; behind them what is no target
        kind = np.where(is_stay & ~stays_hot[:, :n_kept], is_published[:, :n_kept].astype(np.int8), np.int8(2))
        targets = np.argsort(kind, axis=1, kind="stable")[layers, leaves.cumsum(axis=1)[layers, places] - 1]
        return Moves(*_arrays(layers, experts[layers, sources], sources, targets))

    def unpublish_targets(self, moves: Moves) -> None:
        """Before the copies of `moves` are issued: their targets and sources leave the published table."""
        layers, experts, sources, targets = moves.layers, moves.experts, moves.sources, moves.targets
        self._check(layers, targets)
        _require((self.expert_of[layers, sources] == experts).all(), "an expert that moves is not published")
        _require(not self.is_spare[layers, targets].any(), "a spare is published only by keep")
        out = self.expert_of[layers, targets]
        cold = out != NONE
        self.slot_of[layers[cold], out[cold]] = NONE
        self.slot_of[layers, experts] = NONE
        self.expert_of[layers, targets] = self.expert_of[layers, sources] = self.holds[layers, sources] = NONE
        self.holds[layers, targets] = experts
        self.epochs[layers, targets] += 1
        self.n_published -= int(layers.size + cold.sum())
        self.epoch += 1

    def lend(self, n_kept: int) -> Lent:
        """Ranks >= n_kept of every layer leave the table in one call; returns what was published there.

        Spares in the tail stay spares and come back, empty, with `take_back`.
        """
        _require(0 <= n_kept <= self.n_owned, f"cannot keep {n_kept} of {self.n_owned} ranks")
        tail = self.expert_of[:, n_kept : self.n_owned]
        layers, offsets = np.nonzero(tail != NONE)
        experts = tail[layers, offsets].astype(np.int32)
        la, sl = _arrays(layers, offsets + n_kept)
        self.slot_of[la, experts] = NONE
        self.expert_of[:, n_kept:] = NONE
        self.holds[:, n_kept:] = NONE
        self.epochs[:, n_kept : self.n_owned] += 1
        self.n_published -= int(la.size)
        self.n_owned = n_kept
        self.epoch += 1
        return Lent(n_kept, la, sl, experts)

    def clear(self) -> None:
        """Nothing is published, in flight or lent: after a fault nobody knows what the slots hold."""
        self.slot_of[...] = NONE
        self.expert_of[...] = NONE
        self.holds[...] = NONE
        self.epochs += 1
        self.n_published = 0
        self.n_owned = self.n_ranks
        self.epoch += 1

    def take_back(self) -> None:
        """All ranks are slots again; those that were lent are empty."""
        self.n_owned = self.n_ranks
        self.epoch += 1

    def assign(self, layers: ArrayLike, experts: ArrayLike) -> Ints:
        """Free slots for a wish list, hottest first: slot per wish (lowest rank first), or -1.

        A wish gets -1 when its expert is published already, was wished before, or its layer has none free. Changes
        nothing; the caller copies, then calls `fill` and `publish`.
        """
        la, ex = _arrays(layers, experts)
        slots = np.full(la.shape, NONE, dtype=np.int32)
        _, first = np.unique(la.astype(np.int64) * self.n_experts + ex, return_index=True)
        is_first = np.zeros(la.shape, dtype=np.bool_)
        is_first[first] = True
        open_wish = is_first & (self.slot_of[la, ex] == NONE)
        all_free = self.is_free()
        for layer in range(self.n_layers):
            free = np.flatnonzero(all_free[layer])
            mine = np.flatnonzero(open_wish & (la == layer))[: free.size]
            slots[mine] = free[: mine.size]
        return slots

    # -- audits ----------------------------------------------------------------------------------

    def audit(self) -> None:
        """Constant-time check of the counters. Raises EngineFailed."""
        most = min(self.n_owned, self.n_slots) * self.n_layers
        _require(0 <= self.n_published <= most, f"{self.n_published} published, at most {most}")
        _require(0 <= self.n_owned <= self.n_ranks, "more ranks owned than exist")

    def audit_all(self) -> None:
        """Check every invariant over all arrays. Raises EngineFailed."""
        self.audit()
        layers, slots = np.nonzero(self.expert_of != NONE)
        experts = self.expert_of[layers, slots]
        _require(layers.size == self.n_published, "the count of published slots is wrong")
        _require((self.slot_of[layers, experts] == slots).all(), "the two maps disagree")
        _require((self.slot_of != NONE).sum() == layers.size, "an expert is mapped to no slot")
        _require((self.holds[layers, slots] == experts).all(), "a published slot holds another expert")
        _require(not self.is_spare[layers, slots].any(), "a spare is published")
        _require(bool((slots < self.n_owned).all()), "a lent slot is published")
        for layer in range(self.n_layers):
            spare = np.sort(self.spares[:, layer].reshape(-1))
            _require(np.array_equal(spare, np.flatnonzero(self.is_spare[layer])), "spare sets overlap or lost one")
