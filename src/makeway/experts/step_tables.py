"""What passes between the host and a captured step: the slot table as the step sees it, and the step's report.

Owns the device's copy of the slot table and pinned copies on the host. Never waits for a step: whoever
replays one sends the tables before it, or ahead, and asks for the report behind it.
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
from makeway.experts.cache import ExpertCache
from makeway.experts.follower import Follower
from makeway.experts.guess import Limits
from makeway.experts.slots import NONE
from makeway.memory.facts import align_up
from makeway.memory.sizes import GUESS_ROUNDS
from makeway.memory.workspace import Room

Shapes = Sequence[tuple[tuple[int, ...], torch.dtype]]


def _buffers(shapes: Shapes, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Bytes for tensors of these shapes on the device, and the same twice on the host."""
    n_bytes = sum(align_up(math.prod(shape) * dtype.itemsize) for shape, dtype in shapes)
    on_device, on_host = zeros_and_copy((n_bytes,), torch.uint8, device=device)
    return on_device, on_host, zeros_and_copy((n_bytes,), torch.uint8, device=device)[1]


def _carved(buffer: Tensor, shapes: Shapes) -> list[Tensor]:
    room = Room(buffer.numel(), device=buffer.device, room=buffer)
    return [room.take(shape, dtype, n_bytes=align_up(math.prod(shape) * dtype.itemsize)) for shape, dtype in shapes]


class _ToldOnHost:
    """What a step is told, in pinned memory: it may be written again once its copy has been made."""

    def __init__(self, buffer: Tensor, shapes: Shapes) -> None:
        self.buffer = buffer
        self.slot_of, self.wanted, self.spares, self.limits = (t.numpy() for t in _carved(buffer, shapes))
        self.copied: Event | None = None


class _ReportOnHost:
    """What a step reports, in pinned memory."""

    def __init__(self, buffer: Tensor, shapes: Shapes) -> None:
        self.buffer = buffer
        self.routed, self.fetched, self.guessed = (t.numpy() for t in _carved(buffer, shapes))


@dataclass(frozen=True)
class _Done:
    """A step whose report is here, and what it was told; the step behind the next one overwrites both."""

    spare_set: int
    report: _ReportOnHost
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
        self._told, first, second = _buffers(told, device)
        self.slot_of, self.wanted, self.spares, self.limits = _carved(self._told, told)
        self._host_told = [_ToldOnHost(buffer, told) for buffer in (first, second)]  # this step's, and the next one's
        self._sent: object = None  # what the next step is told already
        self._reported, first, second = _buffers(reported, device)
        self.routed, self.fetched, self.guessed = _carved(self._reported, reported)
        self._reports = [_ReportOnHost(buffer, reported) for buffer in (first, second)]  # and the last one's
        self.guessed.fill_(NONE)
        self._limits = Limits(n_layers, n_guesses // len(GUESS_ROUNDS))
        self.n_rows = np.zeros(n_layers, dtype=np.int64)
        """Rows of the report that the step's passes write, by layer."""
        self._filled = 0  # the spare set of the step that runs
        self._done: _Done | None = None
        expert_bytes = [layer.expert_bytes for layer in cache.plan.layers]
        self._expert_bytes = np.asarray(expert_bytes, dtype=np.int64)

    def send(self) -> None:
        """Before a step: what is published now, what is wanted, and which spares are free."""
        self.n_rows[:] = 0
        if self._sent != self._state():
            self._send()
        self._host_told.reverse()
        self._sent = None

    def send_ahead(self) -> None:
        """Behind a step's last pass, while it runs: what the next one is told, unless something changes before it."""
        self._filled = self.follower.turn()
        self._send()

    def _state(self) -> tuple[int, int, int]:
        """Tells apart what steps are told."""
        return self.cache.table.epoch, self.follower.n_decided, self.follower.spare_set

    def _send(self) -> None:
        """One copy, from the buffer that no step uses which runs or whose report has not been read."""
        table, follower, host = self.cache.table, self.follower, self._host_told[1]
        if host.copied is not None:
            host.copied.wait()
        host.slot_of[...] = table.slot_of
        host.wanted[...] = follower.wanted
        host.spares[...] = table.spares[follower.spare_set]
        host.limits[:, 0] = self._limits.limits
        self._told.copy_(host.buffer, non_blocking=True)
        host.copied = self.cache.device.record_compute()
        self._sent = self._state()

    def fetch_report(self) -> None:
        """Behind a step: ask for its report."""
        self._reports.reverse()
        self._reports[0].buffer.copy_(self._reported, non_blocking=True)

    def end_step(self) -> None:
        """The report is here. `read_report` looks at what it says, while the GPU has something to do."""
        assert self._done is None
        self._done = _Done(self._filled, self._reports[0], self.n_rows.copy(), self._host_told[0].slot_of)

    def forget_fetched(self) -> None:
        """What the last step put into spares will be overwritten before its report is read."""
        if self._done is not None:
            self._done.report.fetched.fill(NONE)

    def read_report(self) -> None:
        """Count what the last step did, mark the spares that it filled, and leave the decision to the policy."""
        if self._done is None:
            return
        done, self._done = self._done, None
        most = int(done.n_rows.max())
        routed = done.report.routed[:, :most].astype(np.int64)
        fetched, guessed = done.report.fetched.copy(), done.report.guessed.copy()
        if (done.n_rows < most).any():
            routed[np.arange(most) >= done.n_rows[:, None]] = NONE
        routed = routed.reshape(len(routed), -1)
        fetched[done.n_rows == 0] = NONE  # a layer that did not run reports what it did before
        guessed[done.n_rows == 0] = NONE
        self._count(routed, guessed, done.slot_of)
        layers, spares = np.nonzero(fetched != NONE)
        table = self.cache.table
        table.fill(layers, table.spares[done.spare_set, layers, spares], fetched[layers, spares])
        self.follower.show(done.spare_set, fetched, routed)

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
