"""The executor of decode: hits run from their slots, misses are fetched, and the policy follows one step behind.

Owns what the running step routed and which spares it filled. Never waits for the policy: a step's misses are kept or
dropped after the step behind it, and only what is published is ever a hit.
Hazard: `end_step` closes a step and `settle` must come before slots are lent, or a kept spare would be lost.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.executors import add_expert
from makeway.experts.follower import Follower
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.experts.store import Weights, used_experts
from makeway.kernels import Ops
from makeway.memory.arena import View


@dataclass
class _Step:
    """What one step routed, ids by layer, and the experts in its spare set [layers, spares], -1 none."""

    fetched: NDArray[np.int32]
    routed: dict[int, list[NDArray[np.integer]]] = field(default_factory=dict)


class CachedExperts:
    """Call layers in any order, any number of times; then `end_step`. Ids of -1 are padding."""

    def __init__(self, cache: ExpertCache, ops: Ops, *, transient: View) -> None:
        """`transient`: room for misses that take no spare. Raises EngineFailed when it holds no expert."""
        if transient.region.n_bytes < cache.plan.sizes.stride_bytes:
            raise EngineFailed(f"{transient.region.name!r} has no room for one expert")
        self._cache = cache
        self._ops = ops
        self._transient = transient
        self._follower = Follower(cache)
        self._step = self._new_step()

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        cache, step = self._cache, self._step
        step.routed.setdefault(layer, []).append(moe.ids.cpu().numpy().reshape(-1).copy())
        slots = cache.table.slot_of[layer].tolist()
        room = self._transient.tensor
        n_bytes, stride = cache.store.layers[layer].expert_bytes, cache.plan.layers[layer].stride_bytes
        ready: list[tuple[int, Weights]] = []  # one round: experts whose bytes all have room at once
        at = n_fetched = 0
        for expert in used_experts(moe.ids):
            if slots[expert] != NONE:
                cache.counters.hits += 1
                cache.counters.served_bytes += n_bytes
                ready.append((expert, cache.weights_of(layer, slots[expert])))
                continue
            cache.counters.misses += 1
            spare = self._free_spare(layer, expert)
            if spare is None and at + n_bytes > room.numel():
                self._run(moe, ready, n_fetched=n_fetched)
                ready, at, n_fetched = [], 0, 0
            if n_fetched == 0:  # spares and transient room may still be read, by the round or the step before
                cache.device.copies_wait(cache.device.record_compute())
            n_fetched += 1
            if spare is not None:
                weights = self._fetch_into_spare(layer, expert, spare=spare)
            else:
                weights = cache.fetch(layer, expert, room[at : at + n_bytes])
                at += stride
            ready.append((expert, weights))
        self._run(moe, ready, n_fetched=n_fetched)

    def end_step(self) -> None:
        """The step is complete: decide about the one before it, whose spare set the next step fills again."""
        step, self._step = self._step, self._new_step()
        routed = {layer: np.concatenate(parts) for layer, parts in step.routed.items()}
        shape = (self._cache.table.n_layers, max((r.size for r in routed.values()), default=0))
        ids = np.full(shape, NONE, dtype=np.int64)
        for layer, row in routed.items():
            ids[layer, : row.size] = row
        self._follower.decide()
        self._follower.end_step(step.fetched, ids)

    def settle(self) -> None:
        if self._step.routed:
            raise EngineFailed("experts settle between steps, and a step is open")
        self._follower.decide()

    def make_way(self) -> None:
        self.settle()

    def _run(self, moe: RoutedInput, ready: list[tuple[int, Weights]], *, n_fetched: int) -> None:
        if n_fetched:
            self._cache.device.compute_waits(self._cache.device.record_copies())
        for expert, weights in ready:
            add_expert(self._ops, moe, expert, weights=weights)

    def _free_spare(self, layer: int, expert: int) -> int | None:
        """A wanted miss goes to a spare of this step, at most once: which one, None for the transient region."""
        fetched = self._step.fetched[layer]
        free = np.flatnonzero(fetched == NONE)
        if not self._follower.wanted[layer, expert] or free.size == 0 or expert in fetched:
            return None
        return int(free[0])

    def _fetch_into_spare(self, layer: int, expert: int, *, spare: int) -> Weights:
        step, cache = self._step, self._cache
        slot = int(cache.table.spares[self._follower.spare_set, layer, spare])
        cache.table.fill(layer, slot, expert)
        weights = cache.fetch(layer, expert, cache.slot_bytes(layer, slot))
        step.fetched[layer, spare] = expert  # only now: a spare whose copy failed is never kept
        return weights

    def _new_step(self) -> _Step:
        table = self._cache.table
        return _Step(np.full((table.n_layers, table.n_spares_per_set), NONE, dtype=np.int32))
