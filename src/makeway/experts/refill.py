"""Experts on their way back into free slots after a prompt, hottest first, batch by batch.

Owns which batches are in flight. Never publishes a slot before its copy's event (or the computation waits for
it), and never takes a slot that is published or spare.
Hazard: decode runs while the refill goes on, so an expert may be published by another way before its batch arrives.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makeway.device import Event
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.slots import NONE

Ints = NDArray[np.int32]


@dataclass(frozen=True)
class _Batch:
    layers: Ints
    slots: Ints
    experts: Ints
    arrived: Event


class Refill:
    """Fills the free slots with `wishes` [n, 2] (layer, expert), the first ones first."""

    def __init__(
        self, cache: ExpertCache, wishes: NDArray[np.integer], *, batch_bytes: int, ahead_bytes: int = 0
    ) -> None:
        """`batch_bytes`: what is published together; at least one expert. `ahead_bytes`: copies are asked for so far
        ahead; at least two batches, for one crosses the link while the one before it is published. `dropped_bytes` of
        the `moved_bytes` came too late: decode had kept the expert itself."""
        self.moved_bytes = self.dropped_bytes = 0
        self.n_published = 0
        self._cache = cache
        self._wishes = np.asarray(wishes, dtype=np.int32).reshape(-1, 2)
        self._batch_experts = max(1, batch_bytes // cache.plan.sizes.stride_bytes)
        self._most_in_flight = max(2, ahead_bytes // (self._batch_experts * cache.plan.sizes.stride_bytes))
        self._next = 0
        self._flying: deque[_Batch] = deque()
        self.planned_bytes = self._free_bytes()
        cache.device.copies_wait(cache.device.record_compute())  # who had the slots before may still be reading them

    @property
    def is_done(self) -> bool:
        """Nothing is in flight and nothing is wished that has room."""
        return not self._flying and self._next >= len(self._wishes)

    def poll(self) -> int:
        """Publish what has arrived, without waiting, and send the next batches; returns how many experts came."""
        n = 0
        while self._flying and self._flying[0].arrived.is_done():
            n += self._publish(self._flying.popleft())
        self._send()
        return n

    def wait(self) -> int:
        """Send a batch if none is in flight, wait for the first one and publish it; 0 when there is nothing left."""
        self._send()
        if not self._flying:
            return 0
        batch = self._flying.popleft()
        batch.arrived.wait()
        n = self._publish(batch)
        self._send()
        return n

    def stop(self) -> None:
        """Publish what is in flight and forget the rest. Nobody waits but the computation, which reads slots behind the
        copies from now on."""
        self._next = len(self._wishes)
        if self._flying:
            self._cache.device.compute_waits(self._flying[-1].arrived)
        while self._flying:
            self._publish(self._flying.popleft())

    def _free_bytes(self) -> int:
        """What will cross the link if nobody else takes a free slot: as many absent experts as each layer has room."""
        table = self._cache.table
        absent = np.zeros_like(table.slot_of)
        absent[self._wishes[:, 0], self._wishes[:, 1]] = 1
        absent[table.is_published()] = 0
        n = np.minimum(table.n_free(), absent.sum(axis=1))
        return int(sum(int(k) * layer.expert_bytes for k, layer in zip(n, self._cache.plan.layers, strict=True)))

    def _send(self) -> None:
        """Issue copies until enough batches are in flight or nothing has room."""
        cache = self._cache
        while len(self._flying) < self._most_in_flight and self._next < len(self._wishes):
            layers, experts, slots = self._next_batch()
            if layers.size == 0:
                return
            before = cache.device.link_bytes
            planned = cache.fetch_into_slots(layers, experts, slots)
            moved = cache.device.link_bytes - before
            if moved != planned:
                raise EngineFailed(f"refill: {moved} bytes crossed the link for a batch of {planned}")
            self.moved_bytes += moved
            self._flying.append(_Batch(layers, slots, experts, cache.device.record_copies()))

    def _next_batch(self) -> Ints:
        """[3, n]: layers, experts and slots of the next wishes that have room, a full batch where there are as many;
        the slots are taken."""
        table = self._cache.table
        found = [np.empty((3, 0), dtype=np.int32)]
        n_left = self._batch_experts
        while n_left and self._next < len(self._wishes):
            layers, experts = self._wishes[self._next :].T
            is_open = (table.slot_of[layers, experts] == NONE) & (table.n_free() > 0)[layers]
            some = np.flatnonzero(is_open)[:n_left]
            self._next += int(some[-1]) + 1 if some.size else layers.size
            layers, experts = layers[some], experts[some]
            slots = table.assign(layers, experts)
            batch = np.stack([layers, experts, slots])[:, slots != NONE]
            table.fill(batch[0], batch[2], batch[1])
            found.append(batch)
            n_left -= batch.shape[1]
        return np.concatenate(found, axis=1)

    def _publish(self, batch: _Batch) -> int:
        """Let decode use a batch that has arrived; what got a slot by another way in the meantime gives this one up."""
        cache = self._cache
        late = cache.table.slot_of[batch.layers, batch.experts] != NONE
        cache.table.drop(batch.layers[late], batch.slots[late])
        self.dropped_bytes += sum(cache.plan.layers[layer].expert_bytes for layer in batch.layers[late].tolist())
        layers, slots = batch.layers[~late], batch.slots[~late]
        cache.table.publish(layers, slots)
        cache.count_uploads(layers)
        self.n_published += int(layers.size)
        return int(layers.size)
