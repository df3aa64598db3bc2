"""The executor of decode on a GPU: slot look-up, misses and FFN are kernels, so that a graph can hold a whole step.

Owns the device's copy of the slot table and what a step reports back. Never waits inside a step: the host writes the
tables before it and reads the report after it.
Hazard: the tables have constant addresses and a captured step reads them when it is replayed, not when it was captured.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.experts.cache import ExpertCache
from makeway.experts.follower import Follower
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.kernels.triton import experts as kernels
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
            return torch.zeros(shape, dtype=dtype, device=device), torch.zeros(
                shape, dtype=dtype, pin_memory=device.type == "cuda"
            )

        self.slot_of, self._slot_of = pair((n_layers, n_experts), torch.int32)
        self.wanted, self._wanted = pair((n_layers, n_experts), torch.uint8)
        self.spares, self._spares = pair((n_layers, n_spares), torch.int32)
        self.routed, self._routed = pair((n_layers, most_rows, top_k), torch.int32)
        self.fetched, self._fetched = pair((n_layers, n_spares), torch.int32)
        self._epoch = NONE

    def send(self) -> None:
        """Before a step: what is published now, what is wanted, and which spares are free."""
        table, follower = self.cache.table, self.follower
        self._routed.fill_(NONE)
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


class InGraphExperts:
    """Called once a layer while a step is captured, for `n` rows; `live` int32 [n]: below 0 where a row is padding."""

    def __init__(
        self, cache: ExpertCache, tables: StepTables, *, arena: Tensor, n: int, top_k: int, live: Tensor
    ) -> None:
        """`arena` u8: all of it; slots and transient region lie where the plan puts them."""
        self._cache, self._tables, self._arena, self._live = cache, tables, arena, live
        hidden = max(layer.shapes[0].n_cols for layer in cache.store.layers)
        width = max(layer.shapes[0].n_rows for layer in cache.store.layers)
        self._buffers = kernels.StepBuffers(arena.device, n=n, top_k=top_k, hidden=hidden, width=width)
        self._scratch = Scratch(arena.device)

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """Plan, fetch and run; nothing waits for the host."""
        cache, tables, buffers = self._cache, self._tables, self._buffers
        plan, stored = cache.plan, cache.store.layers[layer]
        ids = torch.where(self._live[:, None] >= 0, moe.ids, NONE).to(torch.int32)
        tables.routed[layer, : ids.shape[0]] = ids
        rooms = kernels.Rooms(
            slots_at=plan.decode.slots.offset + plan.decode.layer_offsets[layer],
            slot_stride=plan.decode.rank_bytes,
            transient_at=plan.decode.transient.offset,
            transient_stride=plan.layers[layer].stride_bytes,
        )
        fetched = kernels.plan_step(
            buffers,
            ids,
            routing=moe.weights.contiguous(),
            slot_of=tables.slot_of[layer],
            wanted=tables.wanted[layer],
            spares=tables.spares[layer],
            rooms=rooms,
        )
        tables.fetched[layer] = fetched
        n_bytes = -(-stored.expert_bytes // 16) * 16
        kernels.fetch_missing(buffers, stored.raw, self._arena, n_bytes=n_bytes)
        gate, up, down = stored.shapes
        layout = kernels.ExpertLayout(gate.type, up.type, down.type, gate.n_cols, gate.n_rows)
        kernels.run_experts(buffers, moe.x, self._arena, layout=layout, acc=moe.acc, scratch=self._scratch)
