"""What ran when: copies over the link and units of computation, written down while a recorder is on.

Owns the hooks: a device, a backend and a model that tell a recorder and else do what they always do. Never changes
what is run, and costs one test of a flag while the recorder is off.
Hazard: on a GPU the times are those of CUDA events, so they are read only after everything has run.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.config import EngineConfig
from makeway.device import CpuDevice, CudaDevice, Device, Event, Ints, pick_device
from makeway.engine.backend import Backend
from makeway.experts.cache import ExpertCache
from makeway.experts.cached import CachedExperts
from makeway.experts.executors import StepExperts
from makeway.experts.pieces import Pieces, ReferencePieces, Uses
from makeway.experts.routed import RoutedInput
from makeway.kernels import REFERENCE, Ops
from makeway.kv import Batch
from makeway.memory.arena import Arena, View
from makeway.models import Model

COPY = "copy"
_Mark = tuple[float, torch.cuda.Event | None]


@dataclass(frozen=True)
class Span:
    """Something that ran from `begin_s` to `end_s`, seconds since the recorder went on. `n_bytes`: of a copy."""

    what: str
    begin_s: float
    end_s: float
    n_bytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class Recorder:
    """`on()` for a while, then `spans()`."""

    def __init__(self) -> None:
        self.operations: set[str] = set()
        self.notes: Mapping[str, str] = {}
        self.is_on = False
        self._on_gpu = False
        self._origin: _Mark = (0.0, None)
        self._open: list[tuple[str, _Mark, _Mark, int]] = []
        self._batch: tuple[_Mark, int] | None = None

    @property
    def kernels(self) -> set[str]:
        """All operations that have run, whether on or off, each behind the name of what ran it."""
        return self.operations | {_name(what, by) for what, by in self.notes.items()}

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        """Writes down what runs inside, from scratch."""
        self._on_gpu, self._open, self._batch = device.type == "cuda", [], None
        self._origin = self._mark(None)
        self.is_on = True
        try:
            yield
        finally:
            self.is_on = False

    def spans(self) -> list[Span]:
        """All that is complete, in order of beginning; waits for the device."""
        if self._on_gpu:
            torch.cuda.synchronize()
        found = [Span(what, self._since(a), self._since(b), n) for what, a, b, n in self._open]
        return sorted(found, key=lambda span: span.begin_s)

    @contextmanager
    def span(self, what: str) -> Iterator[None]:
        """A unit of computation on the current stream."""
        if not self.is_on:
            yield
            return
        begin = self._mark(None)
        yield
        self._open.append((what, begin, self._mark(None), 0))

    def copies(self, n_bytes: int, stream: torch.cuda.Stream | None) -> None:
        """A copy is asked for; those up to `copied` are one batch."""
        if self.is_on:
            begin, before = self._batch or (self._mark(stream), 0)
            self._batch = begin, before + n_bytes

    def copied(self, stream: torch.cuda.Stream | None) -> None:
        """Somebody will wait for the copies so far."""
        if self.is_on and self._batch is not None:
            (begin, n_bytes), self._batch = self._batch, None
            self._open.append((COPY, begin, self._mark(stream), n_bytes))

    def _mark(self, stream: torch.cuda.Stream | None) -> _Mark:
        """Now, on the host or in a stream (None: the current one)."""
        if not self._on_gpu:
            return time.perf_counter(), None
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(stream or torch.cuda.current_stream())
        return 0.0, event

    def _since(self, mark: _Mark) -> float:
        if mark[1] is None:
            return mark[0] - self._origin[0]
        assert self._origin[1] is not None
        return float(self._origin[1].elapsed_time(mark[1])) / 1000


class _WatchedCpu(CpuDevice):
    def __init__(self, vram_bytes: int | None, recorder: Recorder) -> None:
        super().__init__(vram_bytes)
        self._recorder = recorder

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._recorder.copies(source.numel(), None)
        super().copy(target, source)

    def record_copies(self) -> Event:
        self._recorder.copied(None)
        return super().record_copies()


class _WatchedCuda(CudaDevice):
    def __init__(self, device: torch.device, vram_bytes: int | None, recorder: Recorder) -> None:
        super().__init__(device, vram_bytes)
        self._recorder = recorder

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._recorder.copies(source.numel(), self._copy_stream)
        super().copy(target, source)

    def copy_parts(self, target: Tensor, source: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        self._recorder.copies(int(n_bytes.sum()), self._copy_stream)
        super().copy_parts(target, source, to=to, of=of, n_bytes=n_bytes)

    def record_copies(self) -> Event:
        self._recorder.copied(self._copy_stream)
        return super().record_copies()


def watched_device(config: EngineConfig, recorder: Recorder) -> Device:
    """The device of a configuration, whose copies the recorder sees. Raises UserError as `open_device`."""
    device = pick_device(config.device)
    if device.type == "cpu":
        return _WatchedCpu(config.vram, recorder)
    return _WatchedCuda(device, config.vram, recorder)


class _WatchedBackend:
    """Everything of a backend, but the recorder sees its operations and pieces."""

    def __init__(self, inner: Backend, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        recorder.notes = inner.ops.notes
        self._name = inner.ops.name
        inner.ops = _named(inner.ops, recorder.operations)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step_experts(self, cache: ExpertCache, arena: Arena, *, transient: View, rows: int) -> StepExperts:
        experts = self._inner.step_experts(cache, arena, transient=transient, rows=rows)
        self._ran("experts of a step", is_reference=isinstance(experts, CachedExperts))
        return experts

    def pieces(self, cache: ExpertCache, arena: Arena, *, workspace: View, piece_experts: int) -> Pieces:
        pieces = self._inner.pieces(cache, arena, workspace=workspace, piece_experts=piece_experts)
        self._ran("experts of a sweep", is_reference=isinstance(pieces, ReferencePieces))
        return _WatchedPieces(pieces, self._recorder)

    def _ran(self, what: str, *, is_reference: bool) -> None:
        self._recorder.operations.add(_name(what, REFERENCE.name if is_reference else self._name))


def watched_backend(backend: Backend, recorder: Recorder) -> Backend:
    """The backend, whose operations and pieces the recorder sees."""
    return cast(Backend, _WatchedBackend(backend, recorder))


class _WatchedPieces:
    def __init__(self, inner: Pieces, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder

    def start(self, layer: int, moe: RoutedInput) -> Uses:
        with self._recorder.span("experts: sort"):
            return self._inner.start(layer, moe)

    def place(self, where: NDArray[np.int64]) -> None:
        self._inner.place(where)

    def add(self, experts: range) -> None:
        with self._recorder.span("experts"):
            self._inner.add(experts)

    def ask_for_kernels(self, layer: int, moe: RoutedInput) -> None:
        self._inner.ask_for_kernels(layer, moe)


class _WatchedModel:
    """Everything of a model, but its mixers are spans."""

    def __init__(self, inner: Model, recorder: Recorder) -> None:
        self._inner, self._recorder = inner, recorder
        recurrent = inner.facts.state_shapes
        self._kinds = [f"mixer: {'GDN' if i in recurrent else 'attention'}" for i in range(inner.facts.n_blocks)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def mix(
        self, layer: int, h: Tensor, batch: Batch, *, before: RoutedInput | None = None
    ) -> tuple[Tensor, RoutedInput]:
        with self._recorder.span(self._kinds[layer]):
            return self._inner.mix(layer, h, batch, before=before)

    def combine(self, layer: int, h: Tensor, moe: RoutedInput) -> Tensor:
        with self._recorder.span("combine"):
            return self._inner.combine(layer, h, moe)


def watched_model(model: Model, recorder: Recorder) -> Model:
    """The model, whose layers the recorder sees."""
    return cast(Model, _WatchedModel(model, recorder))


def _name(what: str, by: str) -> str:
    return f"{by}: {what}"


def _named(ops: Ops, ran: set[str]) -> Ops:
    """The same operations, each of which leaves its name when it runs."""

    def named(run: Any, name: str) -> Any:
        def operation(*args: Any, **options: Any) -> Any:
            ran.add(name)
            return run(*args, **options)

        return operation

    by, runs = ops.kernels, {f.name: getattr(ops, f.name) for f in fields(ops)}
    return replace(ops, **{what: named(run, _name(what, by[what])) for what, run in runs.items() if callable(run)})
