"""The executor of decode on a GPU: slot look-up, misses and FFN are kernels, so that a graph can hold a whole step.

Owns the device's copy of the slot table and what a step reports back. Never waits inside a step: the host writes the
tables before it and reads the report after it.
Hazard: the tables have constant addresses and a captured step reads them when it is replayed, not when it was captured.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.device import zeros_and_copy
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.follower import Follower
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.kernels.triton import experts as kernels
from makeway.kernels.triton import step_plan
from makeway.kernels.triton.linear import Scratch


class StepTables:
    """What a step is told (slot_of, wanted, spares) and what it reports (routed, fetched), by layer; device tensors
    and pinned copies on the host."""

    def __init__(self, cache: ExpertCache, *, top_k: int, most_rows: int) -> None:
        """For steps of at most `most_rows` rows."""
        table, device = cache.table, cache.device.torch_device
        self.cache = cache
        self.follower = Follower(cache)
        n_layers, n_experts, n_spares = table.n_layers, table.n_experts, table.n_spares_per_set

        def pair(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
            return zeros_and_copy(shape, dtype, device=device)

        self.slot_of, self._slot_of = pair((n_layers, n_experts), torch.int32)
        self.wanted, self._wanted = pair((n_layers, n_experts), torch.uint8)
        self.spares, self._spares = pair((n_layers, n_spares), torch.int32)
        self.routed, self._routed = pair((n_layers, most_rows, top_k), torch.int32)
        self.fetched, self._fetched = pair((n_layers, n_spares), torch.int32)
        self._epoch = NONE

    def send(self) -> None:
        """Before a step: what is published now, what is wanted, and which spares are free."""
        table, follower = self.cache.table, self.follower
        self.routed.fill_(NONE)
        self._wanted.numpy()[...] = follower.wanted
        self.wanted.copy_(self._wanted, non_blocking=True)
        self._spares.numpy()[...] = table.spares[follower.spare_set]
        self.spares.copy_(self._spares, non_blocking=True)
        if self._epoch != table.epoch:
            self._slot_of.numpy()[...] = table.slot_of
            self.slot_of.copy_(self._slot_of, non_blocking=True)
            self._epoch = table.epoch

    def fetch_report(self) -> None:
        """Behind a step: ask for its report."""
        self._routed.copy_(self.routed, non_blocking=True)
        self._fetched.copy_(self.fetched, non_blocking=True)

    def end_step(self) -> None:
        """The report is here: count, mark the spares that were filled, and leave the decision for the next step."""
        routed, fetched = self._routed.numpy(), self._fetched.numpy().copy()
        self._count(routed)
        layers, spares = np.nonzero(fetched != NONE)
        table = self.cache.table
        slots = table.spares[self.follower.spare_set, layers, spares]
        table.fill(layers, slots, fetched[layers, spares])
        self.follower.end_step(fetched, routed.reshape(len(routed), -1).astype(np.int64))

    def _count(self, routed: NDArray[np.int32]) -> None:
        """Hits and misses by the table that the step was told."""
        counters, plan, told = self.cache.counters, self.cache.plan, self._slot_of.numpy()
        for layer, ids in enumerate(routed):
            used = np.unique(ids)
            used = used[used >= 0]
            n_hits = int((told[layer, used] != NONE).sum())
            n_bytes = plan.layers[layer].expert_bytes
            counters.hits += n_hits
            counters.served_bytes += n_hits * n_bytes
            counters.misses += used.size - n_hits
            missed_bytes = (used.size - n_hits) * -(-n_bytes // 16) * 16
            counters.link_bytes += missed_bytes
            self.cache.device.link_bytes += missed_bytes


class DeviceExperts:
    """The executor of decode. A step may be any number of passes, captured or not, of at most `most_rows` rows each;
    the passes of one layer together report at most `most_rows` rows."""

    def __init__(self, cache: ExpertCache, *, arena: Tensor, most_rows: int) -> None:
        """`arena` u8: all of it; slots and transient region lie where the plan puts them."""
        top_k = max(layer.top_k for layer in cache.plan.layers)
        self._cache, self._arena, self._top_k = cache, arena, top_k
        self._tables = StepTables(cache, top_k=top_k, most_rows=most_rows)
        self._buffers: dict[int, step_plan.StepBuffers] = {}
        self._scratch = Scratch(arena.device)
        self._is_open = False
        self._reported = [0] * cache.table.n_layers  # rows of the step so far, by layer

    def open_step(self) -> None:
        """Before the first pass of a step: the tables go to the device."""
        if not self._is_open:
            self._is_open = True
            self._reported = [0] * self._cache.table.n_layers
            self._tables.send()

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """A pass that is not captured."""
        self.open_step()
        n = moe.ids.shape[0]
        self.run(layer, moe, first=self._reported[layer])
        self._reported[layer] += n

    def run(self, layer: int, moe: RoutedInput, *, first: int = 0, live: Tensor | None = None) -> None:
        """Plan, fetch and run; nothing waits for the host. `first`: the row of the report where this pass begins;
        `live` int32 [n]: below 0 where a row is padding."""
        cache, tables, n = self._cache, self._tables, moe.ids.shape[0]
        if n not in self._buffers:
            gate = cache.store.layers[layer].shapes[0]
            self._buffers[n] = step_plan.StepBuffers(
                self._arena.device, n=n, top_k=self._top_k, hidden=gate.n_cols, width=gate.n_rows
            )
        plan, stored, buffers = cache.plan, cache.store.layers[layer], self._buffers[n]
        ids = moe.ids.to(torch.int32)
        if live is not None:
            ids = torch.where(live[:, None] >= 0, ids, NONE)
        ids = ids.contiguous()
        tables.routed[layer, first : first + n] = ids
        rooms = step_plan.Rooms(
            slots_at=plan.decode.slots.offset + plan.decode.layer_offsets[layer],
            slot_stride=plan.decode.rank_bytes,
            transient_at=plan.decode.transient.offset,
            transient_stride=plan.layers[layer].stride_bytes,
        )
        tables.fetched[layer] = step_plan.plan_step(
            buffers,
            ids,
            routing=moe.weights.contiguous(),
            slot_of=tables.slot_of[layer],
            wanted=tables.wanted[layer],
            spares=tables.spares[layer],
            rooms=rooms,
        )
        n_bytes = -(-stored.expert_bytes // 16) * 16
        step_plan.fetch_missing(buffers, stored.raw, self._arena, n_bytes=n_bytes)
        gate, up, down = stored.shapes
        layout = kernels.ExpertLayout(gate.type, up.type, down.type, gate.n_cols, gate.n_rows)
        kernels.run_experts(buffers, moe.x, self._arena, layout=layout, acc=moe.acc, scratch=self._scratch)

    def end_step(self) -> None:
        """Decide about the step before while this one runs, then wait for its report."""
        if not self._is_open:
            return
        self._tables.follower.decide()
        self._tables.fetch_report()
        self._cache.device.record_compute().wait()
        self._tables.end_step()
        self._is_open = False

    def settle(self) -> None:
        if self._is_open:
            raise EngineFailed("experts settle between steps, and a step is open")
        self._tables.follower.decide()
