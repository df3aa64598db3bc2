"""The expert cache: copies of experts in slots of the arena, the table that names them, the policy that chooses.

Owns which bytes lie in which slot, and the counters. Never authoritative: the store is the truth, a slot is a clean
copy; never runs an expert (executors do).
Hazard: slots are published only after their bytes are complete, and the view of the slots changes with every
hand-over: `attach` the new one before anything is read or fetched.
"""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.device import Device
from makeway.errors import EngineFailed
from makeway.experts.policies import Policy
from makeway.experts.slots import NONE, SlotTable
from makeway.experts.store import ExpertStore, Weights
from makeway.memory.arena import View
from makeway.memory.plan import MemoryPlan

Ints = NDArray[np.int32]


class MoveParts(Protocol):
    """As `Device.move_parts`."""

    def __call__(
        self, memory: Tensor, /, *, to: NDArray[np.int64], of: NDArray[np.int64], n_bytes: NDArray[np.int64]
    ) -> None: ...


@dataclass
class Counters:
    """Totals since the start. hits, misses: routed experts, once per call of a layer. uploads: experts that were
    published in a slot. evictions: published experts that gave up theirs to another. link_bytes: copied for experts;
    upload_bytes: those of them that were published; served_bytes: experts run from slots. guesses: fetched before their
    layer asked; right_guesses: those that it then missed.
    """

    hits: int = 0
    misses: int = 0
    uploads: int = 0
    evictions: int = 0
    link_bytes: int = 0
    upload_bytes: int = 0
    served_bytes: int = 0
    guesses: int = 0
    right_guesses: int = 0


class ExpertCache:
    """Slots as planned; layers are numbered as in the plan, which is the order of the store."""

    def __init__(self, store: ExpertStore, plan: MemoryPlan, slots: View, *, policy: Policy, device: Device) -> None:
        """`slots`: view of the decode layout's slots. Raises EngineFailed when plan, store and policy disagree."""
        planned = [(layer.n_experts, layer.expert_bytes) for layer in plan.layers]
        stored = [(layer.n_experts, layer.expert_bytes) for layer in store.layers[: len(planned)]]
        if planned != stored:
            raise EngineFailed(f"expert cache: planned for (experts, bytes) {planned}, the store has {stored}")
        n_experts = plan.sizes.n_experts
        if (policy.n_layers, policy.n_experts) != (len(planned), n_experts):
            raise EngineFailed("expert cache: the policy is for another number of layers or experts")
        self.store = store
        self.plan = plan
        self.policy = policy
        self.device = device
        self.table = SlotTable(
            len(planned), n_experts, n_slots=plan.n_slots, n_spares_per_set=plan.request.uploads_per_layer
        )
        self.counters = Counters()
        self._slots = slots
        layers = store.layers[: len(planned)]
        self._stored_at = np.array([layer.raw.storage_offset() for layer in layers], dtype=np.int64)
        self._expert_bytes = np.array([layer.expert_bytes for layer in layers], dtype=np.int64)
        self._strides = np.array([layer.raw.shape[1] for layer in layers], dtype=np.int64)
        self._offsets = np.array(plan.decode.layer_offsets, dtype=np.int64)

    @property
    def nbytes(self) -> int:
        """Host bytes of the table; the slots belong to the arena."""
        return self.table.nbytes

    def attach(self, slots: View) -> None:
        """From now on slots are reached through this view: all of them, or those a prefill keeps."""
        if slots.region.offset != self.plan.decode.slots.offset:
            raise EngineFailed(f"expert cache: {slots.region.name!r} does not start where the slots do")
        self._slots = slots

    def slot_bytes(self, layer: int, slot: int) -> Tensor:
        """The slot's bytes, u8 [expert bytes]. Raises EngineFailed when the slot is not in the attached view."""
        offset = self.plan.decode.slot_offset(layer, slot) - self._slots.region.offset
        end = offset + self.store.layers[layer].expert_bytes
        if end > self._slots.region.n_bytes:
            raise EngineFailed(f"expert cache: slot {slot} of layer {layer} is not in {self._slots.region.name!r}")
        return self._slots.tensor[offset:end]

    def slot_offsets(self, layer: int, slots: NDArray[np.int64]) -> NDArray[np.int64]:
        """Arena offsets of slots of a layer. Raises EngineFailed when one is not in the attached view."""
        plan = self.plan.decode
        offsets = plan.slots.offset + slots * plan.rank_bytes + plan.layer_offsets[layer]
        if offsets.size and offsets.max() + self.store.layers[layer].expert_bytes > self._slots.region.end:
            raise EngineFailed(f"expert cache: a slot of layer {layer} is not in {self._slots.region.name!r}")
        return offsets

    def weights_of(self, layer: int, slot: int) -> Weights:
        """gate, up, down of the expert in a slot, in place."""
        return self.weights_in(layer, self.slot_bytes(layer, slot))

    def weights_in(self, layer: int, room: Tensor) -> Weights:
        """gate, up, down of an expert of `layer` that lies in `room`, u8 [expert bytes], in place."""
        return self.store.layers[layer].weights_in(room)

    def fetch(self, layer: int, expert: int, room: Tensor) -> Weights:
        """Ask for a copy of an expert from the store in `room`, u8 [expert bytes]; its matrices there.

        Nothing waits: they are to be read only after the event of `device.record_copies()`.
        """
        self.device.copy(room, self.store.bytes_of(layer, expert))
        self.counters.link_bytes += room.numel()
        return self.weights_in(layer, room)

    def fetch_all(self, layer: int, experts: NDArray[np.int64], room: Tensor, *, to: NDArray[np.int64]) -> None:
        """As `fetch`, for several experts of a layer, each to the byte `to` of `room`, u8."""
        stored = self.store.layers[layer]
        n_bytes = np.full(experts.size, stored.expert_bytes, dtype=np.int64)
        self.device.copy_parts(room, stored.raw.view(-1), to=to, of=experts * stored.raw.shape[1], n_bytes=n_bytes)
        self.counters.link_bytes += int(n_bytes.sum())

    def fetch_into_slots(self, layers: Ints, experts: Ints, slots: Ints) -> int:
        """As `fetch`, for experts of several layers, in this order, each into a slot of its layer; returns how many
        bytes. Raises EngineFailed when a slot is not in the attached view."""
        to, n_bytes = self._in_slots(layers, slots), self._expert_bytes[layers]
        if layers.size and int((to + n_bytes).max()) > self._slots.region.n_bytes:
            raise EngineFailed(f"expert cache: a slot is not in {self._slots.region.name!r}")
        of = self._stored_at[layers] + experts.astype(np.int64) * self._strides[layers]
        self.device.copy_parts(self._slots.tensor, self.store.memory.tensor, to=to, of=of, n_bytes=n_bytes)
        self.counters.link_bytes += int(n_bytes.sum())
        return int(n_bytes.sum())

    def _in_slots(self, layers: Ints, slots: Ints) -> NDArray[np.int64]:
        """First bytes of slots, counted from the first slot's."""
        return self._offsets[layers] + slots.astype(np.int64) * self.plan.decode.rank_bytes

    def count_uploads(self, layers: NDArray[np.integer]) -> None:
        """Experts of these layers were published in slots."""
        self.counters.uploads += int(layers.size)
        self.counters.upload_bytes += int(self._expert_bytes[layers].sum())

    def lend(self, n_kept: int, move: MoveParts | None = None) -> None:
        """Ranks >= `n_kept` of every layer leave the cache; the hottest experts first move into the ranks that stay.

        Moves stay inside the arena, in the order of the computation: nothing crosses the link. `move`: who makes them;
        None: the device.
        """
        table = self.table
        moves = table.moves_before_lending(n_kept, self.policy.heat())
        table.unpublish_targets(moves)
        to, of = (self._in_slots(moves.layers, slots) for slots in (moves.targets, moves.sources))
        move = move or self.device.move_parts
        move(self._slots.tensor, to=to, of=of, n_bytes=self._expert_bytes[moves.layers])
        table.publish(moves.layers, moves.targets)
        table.lend(n_kept)

    def audit(self) -> None:
        """Compare the table's invariants and every published slot's bytes with the store. Raises EngineFailed."""
        self.table.audit_all()
        for layer, experts in enumerate(self.table.slot_of.tolist()):
            for expert, slot in enumerate(experts):
                if slot == NONE:
                    continue
                if not torch.equal(self.slot_bytes(layer, slot).cpu(), self.store.bytes_of(layer, expert)):
                    raise EngineFailed(
                        f"expert cache: slot {slot} of layer {layer} is not expert {expert} of the store"
                    )
