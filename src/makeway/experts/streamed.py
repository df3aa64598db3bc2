"""The sweep's executor: experts stream through a ring, piece by piece; those in slots are used in place.

Owns the ring's buffers while a sweep runs. Never publishes, evicts or learns: the cache is as it was afterwards.
Hazard: one call is one crossing of the layer's experts, so a sweep must call each layer once with all its tokens.
"""

from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.executors import add_expert
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.experts.store import used_experts
from makeway.kernels import Ops, Weight
from makeway.memory.arena import View


class StreamedExperts:
    """Pieces of `piece_experts` consecutive ids. `copies_all`: every expert that is not in a slot crosses the link,
    else only those that were routed."""

    def __init__(self, cache: ExpertCache, ops: Ops, *, ring: View, piece_experts: int, copies_all: bool) -> None:
        """Raises EngineFailed when the ring has no room for one piece."""
        self._cache = cache
        self._ops = ops
        self._ring = ring
        self._piece = piece_experts
        self._copies_all = copies_all
        self._buffer_bytes = piece_experts * cache.plan.sizes.stride_bytes
        self._n_buffers = ring.region.n_bytes // self._buffer_bytes
        self._next_buffer = 0
        if self._n_buffers < 1:
            raise EngineFailed(
                f"a piece of {piece_experts} experts does not fit the ring of {ring.region.n_bytes} bytes"
            )

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        cache = self._cache
        slots = cache.table.slot_of[layer].tolist()
        used = set(used_experts(moe.ids))
        n_hits = sum(slots[expert] != NONE for expert in used)
        cache.counters.hits += n_hits
        cache.counters.misses += len(used) - n_hits
        n_experts = cache.store.layers[layer].n_experts
        for first in range(0, n_experts, self._piece):
            piece = range(first, min(first + self._piece, n_experts))
            wanted = piece if self._copies_all else [expert for expert in piece if expert in used]
            staged = self._stage(layer, [expert for expert in wanted if slots[expert] == NONE])
            for expert in piece:
                if expert in used:
                    weights = staged[expert] if slots[expert] == NONE else cache.weights_of(layer, slots[expert])
                    add_expert(self._ops, moe, expert, weights=weights)

    def _stage(self, layer: int, experts: list[int]) -> dict[int, tuple[Weight, Weight, Weight]]:
        """Copy experts into the next buffer of the ring."""
        buffer = self._next_buffer * self._buffer_bytes
        self._next_buffer = (self._next_buffer + 1) % self._n_buffers
        n_bytes = self._cache.store.layers[layer].expert_bytes
        stride = self._cache.plan.layers[layer].stride_bytes
        ring = self._ring.tensor
        starts = [buffer + i * stride for i in range(len(experts))]
        return {
            expert: self._cache.fetch(layer, expert, ring[start : start + n_bytes])
            for expert, start in zip(experts, starts, strict=True)
        }
