"""How a device runs what an engine asks of it: the operations, the experts of a step, the experts of a sweep.

Owns the choice between the reference and the Triton kernels, and what each needs of a plan. Never mixes them silently:
a GPU without Triton is an error unless the reference is asked for.
Hazard: a backend's numbers (bytes of an item) go into the plan, so one backend belongs to one engine from its start.
"""

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from makeway.config import KernelsName
from makeway.device import Device
from makeway.engine.planning import CPU_NUMBERS, GPU_REFERENCE_NUMBERS, TRITON_NUMBERS, Numbers
from makeway.errors import UserError
from makeway.experts.cache import ExpertCache, MoveParts
from makeway.experts.cached import CachedExperts
from makeway.experts.executors import StepExperts
from makeway.experts.pieces import Pieces, ReferencePieces
from makeway.kernels import REFERENCE, Ops, Weight
from makeway.kv import Batch, KVCache, StatePool
from makeway.memory.arena import Arena, View
from makeway.models import Model


@dataclass(frozen=True)
class StepOutputs:
    """residual f32 [rows, ...] after the last trunk layer, on the device; logits f32 [rows, vocab], on the host where a
    graph made them. Overwritten by the next step of the same size."""

    residual: Tensor
    logits: Tensor


@dataclass(frozen=True)
class DraftOutputs:
    """On the device: logits f32 [rows, vocab] of the MTP block, the states f32 [rows, ...] that a chained draft starts
    from, the best tokens int64 [rows]. Overwritten by the next draft of the same size."""

    logits: Tensor
    states: Tensor
    best: Tensor


class Graphs(Protocol):
    """Captured passes of decode, over batches made on the host, of at most 8 rows; sequences do not advance yet.

    states f32 [rows, ...] on the device: what the MTP block gets of the places before the batch's."""

    def run(self, batch: Batch) -> StepOutputs:
        """The trunk, the last pass of its step that has experts; waits for it."""
        ...

    def draft(self, batch: Batch, states: Tensor) -> DraftOutputs:
        """The MTP block."""
        ...

    def remember(self, batch: Batch, states: Tensor) -> None:
        """The MTP block's keys and values, and no more."""
        ...

    def warm_up(self, *, n_sequences: int, n_drafts: int, with_mtp: bool) -> Iterator[tuple[int, int]]:
        """Makes ready what so many answers with so many drafts each need; tells (done, in all) between."""
        ...


class Backend(Protocol):
    """The operations of the models, `numbers` for the plan, how experts change their slots, and the executors.

    `chunk_rows`: for each set of kernels that a prompt's chunk may be computed by, a number of rows that takes it;
    empty where nothing is compiled."""

    ops: Ops
    numbers: Numbers
    move_parts: MoveParts
    chunk_rows: tuple[int, ...]

    def compiling(self) -> AbstractContextManager[None]:
        """What is asked for inside is compiled at its end, and not run: what is computed inside is garbage."""
        ...

    def step_experts(self, cache: ExpertCache, arena: Arena, *, transient: View, rows: int) -> StepExperts:
        """The executor of decode, for steps of at most `rows` rows."""
        ...

    def pieces(self, cache: ExpertCache, arena: Arena, *, workspace: View, piece_experts: int) -> Pieces:
        """How pieces run in the prefill layout."""
        ...

    def graphs(
        self, model: Model, experts: StepExperts, *, cache: KVCache, states: StatePool, context: int
    ) -> Graphs | None:
        """The captured steps; None where steps run kernel by kernel."""
        ...

    def close(self) -> None:
        """Let go of the arena and of memory of one's own; of no use afterwards."""
        ...


class ReferenceBackend:
    """Plain torch, on any device; every value in float32."""

    def __init__(self, device: Device) -> None:
        self.ops = REFERENCE
        self.numbers = GPU_REFERENCE_NUMBERS if device.torch_device.type == "cuda" else CPU_NUMBERS
        self.move_parts: MoveParts = device.move_parts
        self.chunk_rows: tuple[int, ...] = ()

    def compiling(self) -> AbstractContextManager[None]:
        return nullcontext()

    def step_experts(self, cache: ExpertCache, arena: Arena, *, transient: View, rows: int) -> StepExperts:
        return CachedExperts(cache, self.ops, transient=transient)

    def pieces(self, cache: ExpertCache, arena: Arena, *, workspace: View, piece_experts: int) -> Pieces:
        return ReferencePieces(cache.store, self.ops, arena=arena.whole)

    def graphs(
        self, model: Model, experts: StepExperts, *, cache: KVCache, states: StatePool, context: int
    ) -> Graphs | None:
        return None

    def close(self) -> None:
        return None


class TritonBackend:
    """Our kernels: residual in float32, what experts read in bfloat16, KV in half precision."""

    def __init__(self, device: Device) -> None:
        """Imports Triton."""
        self.numbers = TRITON_NUMBERS
        from makeway.kernels.cuda.linear import Linears
        from makeway.kernels.cuda.programs import Programs
        from makeway.kernels.triton.ahead import compiling_ahead
        from makeway.kernels.triton.move import move_parts
        from makeway.kernels.triton.ops import CHUNK_ROWS, triton_ops

        where = device.torch_device
        self.move_parts: MoveParts = move_parts
        self._programs = Programs() if where.type == "cuda" else None
        self.ops = triton_ops(where, None if self._programs is None else Linears(where, self._programs))
        self._guess: Callable[[Tensor, Sequence[Weight]], Sequence[Tensor]] = lambda x, routers: [
            REFERENCE.linear(x, router) for router in routers
        ]
        if self._programs is not None:  # runs beside the step's own products, so with scratch of its own
            beside = Linears(where, self._programs, n_parts=1 << 18)
            self._guess = beside
        self._step: tuple[ExpertCache, StepExperts] | None = None
        self._compiling_ahead = compiling_ahead
        self.chunk_rows: tuple[int, ...] = CHUNK_ROWS if where.type == "cuda" else ()

    def compiling(self) -> AbstractContextManager[None]:
        return self._compiling_ahead(self._programs)

    def step_experts(self, cache: ExpertCache, arena: Arena, *, transient: View, rows: int) -> StepExperts:
        """The same object for the same cache: captured graphs hold its tables. Raises UserError for experts of a type
        without a kernel."""
        from makeway.experts.in_graph import DeviceExperts
        from makeway.kernels.triton.unpack import PLANES

        types = {shape.type for layer in cache.store.layers for shape in layer.shapes}
        missing = sorted(kind.name for kind in types if kind not in PLANES)
        if missing:
            raise UserError(
                f"experts of type {', '.join(missing)} have no GPU kernel yet; use --kernels reference (very slow), or "
                f"a file with experts of {', '.join(sorted(kind.name for kind in PLANES))}"
            )
        if self._step is None or self._step[0] is not cache:
            experts = DeviceExperts(
                cache, arena=arena.whole, most_rows=rows, programs=self._programs, multiply=self._guess
            )
            self._step = (cache, experts)
        return self._step[1]

    def pieces(self, cache: ExpertCache, arena: Arena, *, workspace: View, piece_experts: int) -> Pieces:
        from makeway.experts.triton_pieces import TritonPieces

        return TritonPieces(cache, arena=arena.whole, workspace=workspace.tensor, piece_experts=piece_experts)

    def graphs(
        self, model: Model, experts: StepExperts, *, cache: KVCache, states: StatePool, context: int
    ) -> Graphs | None:
        from makeway.engine.graphs import StepGraphs
        from makeway.experts.in_graph import DeviceExperts

        assert isinstance(experts, DeviceExperts)
        return StepGraphs(model, experts, cache=cache, states=states, context=context, programs=self._programs)

    def close(self) -> None:
        self._step = None
        del self.ops


def open_backend(name: KernelsName, device: Device) -> Backend:
    """The backend for a device; raises UserError when what was asked for is not there."""
    on_gpu = device.torch_device.type == "cuda"
    if name == "reference" or (name == "auto" and not on_gpu):
        return ReferenceBackend(device)
    if not on_gpu:
        raise UserError("--kernels triton needs a GPU; use --kernels reference on a CPU")
    if importlib.util.find_spec("triton") is None:
        raise UserError("a GPU needs Triton: pip install 'makeway[gpu]', or use --kernels reference (very slow)")
    return TritonBackend(device)
