"""The passes of decode on a GPU as captured graphs, one for each number of rows, replayed with new inputs.

Owns the graphs, their inputs and outputs. Never changes an address after capture, so graphs outlive hand-overs, and
never waits for the device inside a pass. Hazard: outputs are overwritten by the next pass of the same kind and size.

Three kinds: a step of the trunk (of one or of several rows a sequence), a draft of the MTP block, and the MTP block
reading what stands.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from makeway.device import zeros_and_copy
from makeway.engine.backend import DraftOutputs, StepOutputs
from makeway.experts.guess import rounds_from
from makeway.experts.in_graph import DeviceExperts
from makeway.kernels import DeviceRows, Rows, Weight
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton.ahead import compiling_ahead
from makeway.kv import Batch, KVCache, StatePool
from makeway.memory.facts import align_up
from makeway.memory.workspace import Room
from makeway.models import Model
from makeway.models.base import Lookup

BUCKETS = (1, 2, 4, 8)
"""Rows of the captured passes; a pass takes the smallest that holds it and pads the rest."""

Out = TypeVar("Out")


class _Inputs:
    """What a pass of `n` rows reads, at constant addresses, with a pinned copy that the host fills and a pass fetches.

    rows: whose they are; first int32 [1]: where the pass begins in the step's report; gathered: rows of tables.
    """

    def __init__(self, lookups: Mapping[int, Lookup], *, n: int, n_blocks: int, device: torch.device) -> None:
        self._n, self._n_blocks = n, n_blocks
        self._lookups = lookups
        sizes = [8 * n, 4 * (n * (5 + n_blocks) + 1)]
        sizes += [n * lookup.per_token * lookup.table.raw.shape[1] for lookup in lookups.values()]
        n_bytes = sum(align_up(size) for size in sizes)
        on_device, on_host = zeros_and_copy((n_bytes,), torch.uint8, device=device)
        self._on_device, self._on_host = on_device, on_host
        self.rows, self.first, self.gathered = self._carve(on_device)
        rows, first, gathered = self._carve(on_host)
        self._rows = {name: tensor.numpy() for name, tensor in vars(rows).items()}
        self._first = first.numpy()
        self._gathered = {key: table.raw.numpy() for key, table in gathered.items()}
        self._rows["row_segment"].fill(-1)
        self._read: torch.cuda.Event | None = None
        on_device.copy_(on_host)

    def _carve(self, buffer: Tensor) -> tuple[DeviceRows, Tensor, dict[int, Weight]]:
        n = self._n
        room = Room(buffer.numel(), device=buffer.device, room=buffer)
        positions = room.take((n,), torch.int64, n_bytes=align_up(8 * n))
        n_ints = n * (5 + self._n_blocks) + 1
        ints = room.take((n_ints,), torch.int32, n_bytes=align_up(4 * n_ints))
        places = torch.split(ints, [n, n, n, n, n, n * self._n_blocks, 1])
        tables = {}
        for key, lookup in self._lookups.items():
            shape = (n * lookup.per_token, lookup.table.raw.shape[1])
            raw = room.take(shape, torch.uint8, n_bytes=align_up(math.prod(shape)))
            tables[key] = Weight(raw, lookup.table.type, lookup.table.n_cols)
        rows = DeviceRows(
            positions=positions,
            row_segment=places[0],
            first_row=places[1],
            n_rows=places[2],
            places=places[3],
            n_replay=places[4],
            block_tables=places[5].view(n, self._n_blocks),
        )
        return rows, places[6], tables

    def fill(self, batch: Batch, gathered: Mapping[int, Weight], *, first: int = 0) -> None:
        """The batch's rows, then padding."""
        if self._read is not None:
            self._read.synchronize()  # the pass before this one has read the buffer
        host, n = self._rows, len(batch.host_tokens)
        self._first[0] = first
        for key, rows in gathered.items():
            self._gathered[key][: rows.n_rows] = rows.raw.numpy()
        for name in ("n_rows", "n_replay"):
            host[name].fill(0)
        host["row_segment"].fill(-1)
        host["positions"].fill(0)
        host["positions"][:n] = batch.positions.numpy()
        for i, span in enumerate(batch.rows.spans):
            host["row_segment"][span.rows] = i
            host["first_row"][i], host["n_rows"][i] = span.first, span.n
            host["places"][i], host["n_replay"][i] = span.place, span.n_replay
            host["block_tables"][i, : len(span.blocks)] = np.asarray(span.blocks, dtype=np.int32)

    def fetch(self) -> None:
        """The first thing that a pass does."""
        self._on_device.copy_(self._on_host, non_blocking=True)

    def pass_runs(self) -> None:
        """A pass is on its way that nobody waits for before the next `fill`."""
        if self._on_device.is_cuda:
            if self._read is None:
                self._read = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._read.record()


class _Captured(Generic[Out]):
    """A computation whose inputs and outputs have constant addresses: captured on CUDA, else run as it is.

    Never keeps the computation: its owner would be in a cycle, and hold the arena until somebody collects garbage.
    """

    def __init__(self, compute: Callable[[], Out], device: torch.device, *, programs: Programs | None) -> None:
        """Compiles its kernels, those of `programs` too, and runs it once; its inputs must be harmless (padding)."""
        self._out: tuple[Out] | None = None  # None: not captured
        if device.type != "cuda":
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            with compiling_ahead(programs):
                compute()
            compute()
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._out = (compute(),)

    def run(self, compute: Callable[[], Out]) -> Out:
        """`compute`: the same as before."""
        if self._out is None:
            return compute()
        self._graph.replay()
        return self._out[0]


class _Passes:
    """What all passes of an engine share."""

    def __init__(
        self,
        model: Model,
        experts: DeviceExperts,
        *,
        cache: KVCache,
        states: StatePool,
        context: int,
        programs: Programs | None,
    ) -> None:
        self.model, self.experts, self.programs = model, experts, programs
        self._cache, self._states, self._context = cache, states, context

    def inputs(self, lookups: Mapping[int, Lookup], n: int, *, keeps_rows: bool = False) -> tuple[_Inputs, Batch]:
        """Inputs of `n` rows, and the batch that kernels are given for them."""
        inputs = _Inputs(lookups, n=n, n_blocks=self._cache.pool.n_blocks, device=self.model.device)
        batch = Batch(
            tokens=torch.zeros(n, dtype=torch.int64, device=self.model.device),
            host_tokens=(0,) * n,
            segments=(),
            rows=Rows(inputs.rows.positions, (), max_keys=self._context, keep=keeps_rows, fixed=inputs.rows),
            cache=self._cache,
            states=self._states,
            gathered=inputs.gathered,
        )
        return inputs, batch


class StepGraph:
    """One step of `n` rows of the trunk."""

    def __init__(self, passes: _Passes, n: int, *, keeps_rows: bool) -> None:
        """Captures on CUDA. `keeps_rows`: a verify step."""
        self.n = n
        self._passes = passes
        self._inputs, self._batch = passes.inputs(passes.model.lookups, n, keeps_rows=keeps_rows)
        self._layers = slice(0, passes.model.facts.n_layers)
        device, n_vocab = passes.model.device, passes.model.facts.n_vocab
        self._logits = torch.empty((n, n_vocab), dtype=torch.float32, pin_memory=device.type == "cuda")
        self._captured = _Captured(self._compute, device, programs=passes.programs)

    def run(self, batch: Batch) -> StepOutputs:
        """The batch (made on the host) through the trunk, the last pass of its step; its sequences do not advance yet.
        Waits for the logits, and meanwhile lets the expert cache decide about the step before."""
        model, experts, n = self._passes.model, self._passes.experts, len(batch.host_tokens)
        self._inputs.fill(batch, model.gather(batch))
        experts.begin_pass(self._layers, self.n)
        out = self._captured.run(self._compute)
        experts.last_pass_runs()
        experts.wait_for_last_pass()
        return StepOutputs(out.residual[:n], out.logits[:n])

    def _compute(self) -> StepOutputs:
        """The layers' sums are taken in by the layers behind them."""
        model, experts, batch = self._passes.model, self._passes.experts, self._batch
        self._inputs.fetch()
        h, moe = model.embed(batch), None
        for layer in range(model.facts.n_layers):
            h, moe = model.mix(layer, h, batch, before=moe)
            ahead = [(to, turn, model.router(to)) for to, turn in rounds_from(layer, model.facts.n_layers)]
            experts.run(layer, moe, first=self._inputs.first, live=self._inputs.rows.row_segment, ahead=ahead)
        experts.end_pass()
        assert moe is not None
        h = model.combine(model.facts.n_layers - 1, h, moe)
        self._logits.copy_(model.head(h), non_blocking=True)
        return StepOutputs(h, self._logits)


class DraftGraph:
    """One draft of `n` sequences by the MTP block."""

    def __init__(self, passes: _Passes, n: int) -> None:
        """Captures on CUDA."""
        self.n = n
        self._passes = passes
        self._inputs, self._batch = passes.inputs(passes.model.draft_lookups, n)
        self._states = _states(passes.model, n)
        self._captured = _Captured(self._compute, passes.model.device, programs=passes.programs)

    def run(self, batch: Batch, states: Tensor) -> DraftOutputs:
        """The batch (made on the host) beside the states of the places before it, f32 [n, ...] on the device."""
        model, n = self._passes.model, len(batch.host_tokens)
        layer = model.facts.n_layers
        first = self._passes.experts.begin_pass(slice(layer, layer + 1), self.n)
        self._inputs.fill(batch, model.draft_gather(batch), first=first)
        self._states[:n].copy_(states)
        out = self._captured.run(self._compute)
        self._inputs.pass_runs()
        return DraftOutputs(out.logits[:n], out.states[:n], out.best[:n])

    def _compute(self) -> DraftOutputs:
        model, experts, batch = self._passes.model, self._passes.experts, self._batch
        self._inputs.fetch()
        layer = model.facts.n_layers
        h, moe = model.mix(layer, model.draft_input(batch, self._states), batch)
        experts.run(layer, moe, first=self._inputs.first, live=self._inputs.rows.row_segment)
        h = model.combine(layer, h, moe)
        logits = model.draft_head(h)
        return DraftOutputs(logits, model.draft_state(h), logits.argmax(dim=-1))


class RememberGraph:
    """The MTP block reads `n` tokens whose drafts nobody needs: its keys and values."""

    def __init__(self, passes: _Passes, n: int) -> None:
        """Captures on CUDA."""
        self.n = n
        self._passes = passes
        self._inputs, self._batch = passes.inputs(passes.model.draft_lookups, n)
        self._states = _states(passes.model, n)
        self._captured = _Captured(self._compute, passes.model.device, programs=passes.programs)

    def run(self, batch: Batch, states: Tensor) -> None:
        """As `DraftGraph.run`."""
        self._inputs.fill(batch, self._passes.model.draft_gather(batch))
        self._states[: len(batch.host_tokens)].copy_(states)
        self._captured.run(self._compute)
        self._inputs.pass_runs()

    def _compute(self) -> None:
        self._inputs.fetch()
        self._passes.model.draft_remember(self._batch, self._states)


def _states(model: Model, n: int) -> Tensor:
    """Room for what the MTP block gets of the trunk, f32 [n, ...]."""
    (shape,) = model.facts.draft_tails.values()
    return torch.zeros((n, *shape), dtype=torch.float32, device=model.device)


class StepGraphs:
    """A graph for each kind and bucket, captured when it is first needed, or by `warm_up`."""

    def __init__(
        self,
        model: Model,
        experts: DeviceExperts,
        *,
        cache: KVCache,
        states: StatePool,
        context: int,
        programs: Programs | None = None,
    ) -> None:
        """`programs`: where the operations and `experts` get kernels in CUDA C++."""
        self._passes = _Passes(model, experts, cache=cache, states=states, context=context, programs=programs)
        self._steps: dict[tuple[int, bool], StepGraph] = {}
        self._drafts: dict[int, DraftGraph] = {}
        self._remembers: dict[int, RememberGraph] = {}

    def run(self, batch: Batch) -> StepOutputs:
        """A batch made on the host, of at most the largest bucket's rows."""
        return self._step(len(batch.host_tokens), keeps_rows=batch.rows.keep).run(batch)

    def draft(self, batch: Batch, states: Tensor) -> DraftOutputs:
        """The MTP block over a batch made on the host; states f32 [n, ...] of the places before."""
        return self._draft(len(batch.host_tokens)).run(batch, states)

    def remember(self, batch: Batch, states: Tensor) -> None:
        """The MTP block's keys and values of a batch made on the host; states f32 [n, ...] of the places before."""
        self._remember(len(batch.host_tokens)).run(batch, states)

    def warm_up(self, *, n_sequences: int, n_drafts: int, with_mtp: bool) -> Iterator[tuple[int, int]]:
        """Captures what `n_sequences` answers with `n_drafts` drafts each need, of the MTP block or only of the text;
        tells before each, and at the end, how many of how many are done."""
        wanted: list[Callable[[], object]] = [lambda: self._step(n_sequences, keeps_rows=False)]
        if n_drafts:
            wanted.append(lambda: self._step(n_sequences * (1 + n_drafts), keeps_rows=True))
        if with_mtp:
            wanted.append(lambda: self._draft(n_sequences))
            wanted.append(lambda: self._remember(min(BUCKETS[-1], n_sequences * n_drafts)))
        for i, capture in enumerate(wanted):
            yield i, len(wanted)
            capture()
        yield len(wanted), len(wanted)

    def _step(self, n_rows: int, *, keeps_rows: bool) -> StepGraph:
        key = (_bucket(n_rows), keeps_rows)
        if key not in self._steps:
            self._steps[key] = StepGraph(self._passes, key[0], keeps_rows=keeps_rows)
        return self._steps[key]

    def _draft(self, n_rows: int) -> DraftGraph:
        n = _bucket(n_rows)
        if n not in self._drafts:
            self._drafts[n] = DraftGraph(self._passes, n)
        return self._drafts[n]

    def _remember(self, n_rows: int) -> RememberGraph:
        n = _bucket(n_rows)
        if n not in self._remembers:
            self._remembers[n] = RememberGraph(self._passes, n)
        return self._remembers[n]


def _bucket(n_rows: int) -> int:
    return next(bucket for bucket in BUCKETS if bucket >= n_rows)
