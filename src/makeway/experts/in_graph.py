"""The executor of decode on a GPU: slot look-up, misses and FFN are kernels, so that a graph can hold a whole step.

Owns the device's copy of the slot table and what a step reports back. Never waits inside a step: the host writes the
tables before it and reads the report after it.
Hazard: the tables have constant addresses and a captured step reads them when it is replayed, not when it was captured.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.device import Event, zeros_and_copy
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.follower import Follower
from makeway.experts.guess import Guesser, Limits, Multiply, Told
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.kernels import Weight
from makeway.kernels.cuda import experts as cuda
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton import experts as kernels
from makeway.kernels.triton import step_plan
from makeway.kernels.triton.fetch import Source
from makeway.kernels.triton.linear import Scratch
from makeway.memory.facts import align_up
from makeway.memory.workspace import Room

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def _buffers(shapes: Shapes, device: torch.device) -> tuple[Tensor, Tensor]:
    """Bytes for tensors of these shapes on the device, and the same on the host."""
    n_bytes = sum(align_up(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes)
    return zeros_and_copy((n_bytes,), torch.uint8, device=device)


def _carved(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    room = Room(buffer.numel(), device=buffer.device, room=buffer)
    return [room.take(shape, dtype, n_bytes=align_up(math.prod(shape) * dtype.itemsize)) for shape, dtype in shapes]


@dataclass(frozen=True)
class _Taken:
    """The last step's report and what it was told, on the host."""

    spare_set: int
    routed: NDArray[np.int64]
    fetched: NDArray[np.int32]
    guessed: NDArray[np.int32]
    n_rows: NDArray[np.int64]
    slot_of: NDArray[np.int32]


class StepTables:
    """What a step is told (slot_of, wanted, spares) and what it reports (routed, fetched), by layer; device tensors
    and pinned copies on the host."""

    def __init__(self, cache: ExpertCache, *, top_k: int, most_rows: int, n_guesses: int) -> None:
        """For steps of at most `most_rows` rows and `n_guesses` guesses a layer."""
        table, device = cache.table, cache.device.torch_device
        self.cache = cache
        self.follower = Follower(cache)
        n_layers, n_experts, n_spares = table.n_layers, table.n_experts, table.n_spares_per_set

        by_expert, by_spare = (n_layers, n_experts), (n_layers, n_spares)
        told = (
            (by_expert, torch.int32),
            (by_expert, torch.uint8),
            (by_spare, torch.int32),
            ((n_layers, 1), torch.int32),
        )
        reported = (
            ((n_layers, most_rows, top_k), torch.int32),
            (by_spare, torch.int32),
            ((n_layers, n_guesses), torch.int32),
        )
        self._told, self._host_told = _buffers(told, device)
        self.slot_of, self.wanted, self.spares, self.limits = _carved(self._told, told)
        self._slot_of, self._wanted, self._spares, limits = (t.numpy() for t in _carved(self._host_told, told))
        self._reported, self._host_reported = _buffers(reported, device)
        self.routed, self.fetched, self.guessed = _carved(self._reported, reported)
        self._routed, self._fetched, self._guessed = (t.numpy() for t in _carved(self._host_reported, reported))
        self.guessed.fill_(NONE)
        self._limits = Limits(limits[:, 0], n_guesses)
        self.n_rows = np.zeros(n_layers, dtype=np.int64)
        """Rows of the report that the step's passes write, by layer."""
        self._taken: _Taken | None = None
        expert_bytes = [layer.expert_bytes for layer in cache.plan.layers]
        self._expert_bytes = np.asarray(expert_bytes, dtype=np.int64)

    def send(self) -> None:
        """Before a step: what is published now, what is wanted, and which spares are free; one copy."""
        table, follower = self.cache.table, self.follower
        self.n_rows[:] = 0
        self._slot_of[...] = table.slot_of
        self._wanted[...] = follower.wanted
        self._spares[...] = table.spares[follower.spare_set]
        self._told.copy_(self._host_told, non_blocking=True)

    def fetch_report(self) -> None:
        """Behind a step: ask for its report."""
        self._host_reported.copy_(self._reported, non_blocking=True)

    def take_report(self) -> None:
        """The report is here: put aside what the next step overwrites. `read_report` looks at what it says, while the
        GPU has something to do."""
        assert self._taken is None
        most = int(self.n_rows.max())
        self._taken = _Taken(
            self.follower.turn(),
            routed=self._routed[:, :most].astype(np.int64),
            fetched=self._fetched.copy(),
            guessed=self._guessed.copy(),
            n_rows=self.n_rows.copy(),
            slot_of=self._slot_of.copy(),
        )

    def read_report(self) -> None:
        """Count what the last step did, mark the spares that it filled, and leave the decision to the policy."""
        if self._taken is None:
            return
        taken, self._taken = self._taken, None
        n_layers, most = taken.routed.shape[:2]
        routed, fetched, guessed = taken.routed, taken.fetched, taken.guessed
        if (taken.n_rows < most).any():
            routed[np.arange(most) >= taken.n_rows[:, None]] = NONE
        routed = routed.reshape(n_layers, -1)
        fetched[taken.n_rows == 0] = NONE  # a layer that did not run reports what it did before
        guessed[taken.n_rows == 0] = NONE
        self._count(routed, guessed, taken.slot_of)
        layers, spares = np.nonzero(fetched != NONE)
        table = self.cache.table
        table.fill(layers, table.spares[taken.spare_set, layers, spares], fetched[layers, spares])
        self.follower.show(taken.spare_set, fetched, routed)

    def _count(self, routed: NDArray[np.int64], guessed: NDArray[np.int32], slot_of: NDArray[np.int32]) -> None:
        """Hits and misses of ids [layers, any], each expert once a layer, by the table that the step was told; and
        guesses [layers, any], of which those that were not needed crossed the link besides."""
        counters = self.cache.counters
        ids = np.sort(routed, axis=1)
        is_used = ids >= 0
        is_used[:, 1:] &= ids[:, 1:] != ids[:, :-1]
        slots = np.take_along_axis(slot_of, np.maximum(ids, 0), axis=1)
        hits = (is_used & (slots != NONE)).sum(axis=1)
        misses = is_used.sum(axis=1) - hits
        made = guessed >= 0
        right = made & (guessed[:, :, None] == ids[:, None, :]).any(axis=2)
        n_made, n_right = made.sum(axis=1), right.sum(axis=1)
        self._limits.observe(n_made, n_right)
        counters.guesses += int(n_made.sum())
        counters.right_guesses += int(n_right.sum())
        crossed = misses + n_made - n_right
        missed_bytes = int((crossed * (-(-self._expert_bytes // 16) * 16)).sum())
        counters.hits += int(hits.sum())
        counters.misses += int(misses.sum())
        counters.served_bytes += int((hits * self._expert_bytes).sum())
        counters.link_bytes += missed_bytes
        self.cache.device.link_bytes += missed_bytes


class DeviceExperts:
    """The executor of decode. A step may be any number of passes, captured or not, of at most `most_rows` rows each;
    the passes of one layer together report at most `most_rows` rows."""

    def __init__(
        self,
        cache: ExpertCache,
        *,
        arena: Tensor,
        most_rows: int,
        multiply: Multiply,
        programs: Programs | None = None,
    ) -> None:
        """`arena` u8: all of it; slots and transient region lie where the plan puts them. `programs`: kernels in CUDA
        C++ for the layers they can run; else, and without, Triton's. `multiply`: what guesses ask a router with."""
        sizes = cache.plan.sizes
        top_k = max(layer.top_k for layer in cache.plan.layers)
        self._cache, self._arena, self._top_k = cache, arena, top_k
        most_rows = 1 << (most_rows - 1).bit_length()  # captured passes are padded
        n_guesses = cache.plan.request.guesses
        self._tables = StepTables(cache, top_k=top_k, most_rows=most_rows, n_guesses=n_guesses)
        self._guesser = None
        if n_guesses:
            rooms_at = cache.plan.decode.transient.offset + sizes.transient_experts * sizes.stride_bytes
            self._guesser = Guesser(
                n_guesses, rooms_at=rooms_at, room_bytes=sizes.stride_bytes, multiply=multiply, device=arena.device
            )
        self._first_rows = torch.arange(most_rows, dtype=torch.int32, device=arena.device)
        self._buffers: dict[int, step_plan.StepBuffers] = {}
        self._scratch = Scratch(arena.device)
        self._cuda = None if programs is None else cuda.StepExpertKernels(arena.device, programs)
        self._is_open = False
        self._report: Event | None = None  # asked for, once the step's last pass is on its way

    def begin_pass(self, layers: Sequence[int], n: int) -> int:
        """A pass of `n` rows over `layers` comes next: the row of the report where it begins. The first pass of a step
        sends the tables to the device."""
        if not self._is_open:
            self._is_open = True
            self._tables.send()
            if self._guesser is not None:
                self._guesser.forget()
        assert self._report is None, "the step's last pass has begun"
        n_rows = self._tables.n_rows
        first = int(n_rows[layers[0]])
        assert first + n <= self._first_rows.numel()
        n_rows[layers] += n
        return first

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """A pass that is not captured."""
        self.run(layer, moe, first=self.begin_pass([layer], moe.ids.shape[0]))

    def run(
        self,
        layer: int,
        moe: RoutedInput,
        *,
        first: int | Tensor,
        live: Tensor | None = None,
        next_router: Weight | None = None,
    ) -> None:
        """Plan, fetch and run; nothing waits for the host. `first`: the row of the report where this pass begins, a
        captured pass reads it from an int32 [1]; `live` int32 [n]: below 0 where a row is padding. `next_router`: of
        the layer that this pass runs next, whose misses are guessed."""
        cache, tables, n = self._cache, self._tables, moe.ids.shape[0]
        if n not in self._buffers:
            gate = cache.store.layers[layer].shapes[0]
            self._buffers[n] = step_plan.StepBuffers(
                self._arena.device, n=n, top_k=self._top_k, hidden=gate.n_cols, width=gate.n_rows
            )
        stored, buffers = cache.store.layers[layer], self._buffers[n]
        guesses = None
        if self._guesser is not None:
            if next_router is not None:
                self._ask(layer + 1, moe.x, next_router, live)
            guesses = self._guesser.join(layer)
        first_row = self._first_rows[first : first + 1] if isinstance(first, int) else first
        step_plan.plan_and_fetch(
            buffers,
            moe.ids,
            source=self._source(layer),
            routing=moe.weights,
            slot_of=tables.slot_of[layer],
            wanted=tables.wanted[layer],
            spares=tables.spares[layer],
            rooms=self._rooms(layer),
            report=step_plan.Report(first_row, tables.routed[layer], tables.fetched[layer]),
            live=live,
            guesses=guesses,
        )
        if self._guesser is not None and next_router is not None:
            self._guesser.fetch(layer + 1)
        gate, up, down = stored.shapes
        layout = kernels.ExpertLayout(gate.type, up.type, down.type, gate.n_cols, gate.n_rows)
        if self._cuda is not None and cuda.can_run(layout):
            self._cuda.run(buffers, moe.x, self._arena, layout=layout, acc=moe.acc)
        else:
            kernels.run_experts(buffers, moe.x, self._arena, layout=layout, acc=moe.acc, scratch=self._scratch)
        if self._guesser is not None and next_router is None:
            self._guesser.end_pass()

    def _ask(self, layer: int, x: Tensor, router: Weight, live: Tensor | None) -> None:
        assert self._guesser is not None
        tables, rooms = self._tables, self._rooms(layer)
        told = Told(
            tables.slot_of[layer],
            tables.wanted[layer],
            tables.spares[layer],
            tables.limits[layer],
            tables.guessed[layer],
        )
        self._guesser.ask(
            layer,
            x,
            router,
            top_k=self._cache.plan.layers[layer].top_k,
            told=told,
            slots=(rooms.slots_at, rooms.slot_stride),
            source=self._source(layer),
            live=live,
        )

    def _rooms(self, layer: int) -> step_plan.Rooms:
        plan = self._cache.plan
        return step_plan.Rooms(
            slots_at=plan.decode.slots.offset + plan.decode.layer_offsets[layer],
            slot_stride=plan.decode.rank_bytes,
            transient_at=plan.decode.transient.offset,
            transient_stride=plan.layers[layer].stride_bytes,
        )

    def _source(self, layer: int) -> Source:
        stored = self._cache.store.layers[layer]
        return Source(stored.raw, self._arena, -(-stored.expert_bytes // 16) * 16)

    def last_pass_runs(self) -> None:
        """The step's last pass is on its way to the device: ask for its report behind it, and meanwhile read that of
        the step before and decide about it."""
        if self._is_open and self._report is None:
            self._tables.fetch_report()
            self._report = self._cache.device.record_compute()
            self._decide()

    def _decide(self) -> None:
        self._tables.read_report()
        self._tables.follower.decide()

    def end_step(self) -> None:
        """Wait for the step's report, which is read while the next step runs, or by `settle`."""
        if not self._is_open:
            return
        self.last_pass_runs()
        assert self._report is not None
        self._report.wait()
        self._report = None
        self._tables.take_report()
        self._is_open = False

    def settle(self) -> None:
        if self._is_open:
            raise EngineFailed("experts settle between steps, and a step is open")
        self._decide()
