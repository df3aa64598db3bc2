"""The decode step on a GPU: one captured graph for each number of rows, replayed with new inputs.

Owns the graphs, their inputs and outputs. Never changes an address after capture, so graphs outlive hand-overs, and
never waits for the device inside a step. Hazard: outputs are overwritten by the next step of the same size.
"""

import numpy as np
import torch
from torch import Tensor

from makeway.device import zeros_and_copy
from makeway.engine.backend import StepOutputs
from makeway.experts.in_graph import DeviceExperts
from makeway.kernels import DeviceRows, Rows
from makeway.kv import Batch, KVCache, StatePool
from makeway.models import Model

BUCKETS = (1, 2, 4, 8)
"""Rows of the captured steps; a step takes the smallest that holds it and pads the rest."""


class _Inputs:
    """What a step of `n` rows reads, at constant addresses, with a pinned copy that the host fills."""

    def __init__(self, model: Model, cache: KVCache, *, n: int, device: torch.device) -> None:
        facts = model.facts
        streams = (facts.n_streams,) if facts.n_streams > 1 else ()
        self._n, self._n_blocks = n, cache.pool.n_blocks
        self.h, self._h = zeros_and_copy((n, *streams, facts.hidden), torch.float32, device=device)
        widths = model.gathered_widths
        gathered = {layer: zeros_and_copy((n, width), torch.float32, device=device) for layer, width in widths.items()}
        self.gathered = {layer: tensors[0] for layer, tensors in gathered.items()}
        self._gathered = {layer: tensors[1] for layer, tensors in gathered.items()}
        n_ints = n * (7 + self._n_blocks)
        self._ints, self._host_ints = zeros_and_copy((n_ints,), torch.int32, device=device)
        self.rows = self._tables(self._ints)
        self._host_rows = self._tables(self._host_ints)
        self._host_rows.row_segment.fill_(-1)
        self._ints.copy_(self._host_ints)

    def _tables(self, ints: Tensor) -> DeviceRows:
        n = self._n
        places = torch.split(ints, [2 * n, n, n, n, n, n, n * self._n_blocks])
        return DeviceRows(
            positions=places[0].view(torch.int64),
            row_segment=places[1],
            first_row=places[2],
            n_rows=places[3],
            places=places[4],
            n_replay=places[5],
            block_tables=places[6].view(n, self._n_blocks),
        )

    def fill(self, model: Model, batch: Batch) -> None:
        """The batch's rows, then padding."""
        n, host = len(batch.host_tokens), self._host_rows
        self._h[:n] = model.embed(batch)
        self.h.copy_(self._h, non_blocking=True)
        for layer, rows in model.gather(batch).items():
            self._gathered[layer][:n] = rows
            self.gathered[layer].copy_(self._gathered[layer], non_blocking=True)
        host.row_segment.fill_(-1)
        host.n_rows.zero_()
        host.n_replay.zero_()
        host.positions.zero_()
        host.positions[:n] = batch.rows.positions
        tables = host.block_tables.numpy()
        for i, span in enumerate(batch.rows.spans):
            host.row_segment[span.rows] = i
            host.first_row[i], host.n_rows[i] = span.first, span.n
            host.places[i], host.n_replay[i] = span.place, span.n_replay
            tables[i, : len(span.blocks)] = np.asarray(span.blocks, dtype=np.int32)
        self._ints.copy_(self._host_ints, non_blocking=True)


class StepGraph:
    """One step of `n` rows: `run` fills the inputs and replays (or, without capture, runs the kernels one by one)."""

    def __init__(
        self,
        model: Model,
        experts: DeviceExperts,
        *,
        cache: KVCache,
        states: StatePool,
        n: int,
        context: int,
        keeps_rows: bool,
    ) -> None:
        """Captures on CUDA. `keeps_rows`: a verify step."""
        self.n = n
        self._model, self._experts = model, experts
        self._inputs = _Inputs(model, cache, n=n, device=model.device)
        rows = self._inputs.rows
        self._batch = Batch(
            tokens=torch.zeros(n, dtype=torch.int64, device=model.device),
            host_tokens=(0,) * n,
            segments=(),
            rows=Rows(rows.positions, (), max_keys=context, keep=keeps_rows, fixed=rows),
            cache=cache,
            states=states,
            gathered=self._inputs.gathered,
        )
        self._graph: torch.cuda.CUDAGraph | None = None
        self._outputs: StepOutputs | None = None
        if model.device.type == "cuda":
            self._capture()

    def run(self, batch: Batch) -> StepOutputs:
        """The batch (made on the host) through the trunk; its sequences do not advance yet."""
        self._inputs.fill(self._model, batch)
        self._experts.begin_pass(range(self._model.facts.n_layers), self.n)
        if self._graph is None:
            self._outputs = self._compute()
        else:
            self._graph.replay()
        assert self._outputs is not None
        return self._outputs

    def _capture(self) -> None:
        """Every row is padding meanwhile, so nothing is written but these buffers."""
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._compute()  # compiles the kernels
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._outputs = self._compute()

    def _compute(self) -> StepOutputs:
        model, h = self._model, self._inputs.h
        last = model.facts.n_layers - 1
        moe = None
        for layer in range(last + 1):
            h, moe = model.mix(layer, h, self._batch, before=moe)
            self._experts.run(layer, moe, first=0, live=self._inputs.rows.row_segment)
        assert moe is not None
        h = model.combine(last, h, moe)
        return StepOutputs(h, model.head(h))


class StepGraphs:
    """A graph for each bucket, captured when it is first needed."""

    def __init__(
        self, model: Model, experts: DeviceExperts, *, cache: KVCache, states: StatePool, context: int
    ) -> None:
        self._model, self._experts, self._cache, self._states = model, experts, cache, states
        self._context = context
        self._graphs: dict[tuple[int, bool], StepGraph] = {}

    def run(self, batch: Batch) -> StepOutputs:
        """A batch made on the host, of at most the largest bucket's rows."""
        n = next(bucket for bucket in BUCKETS if bucket >= len(batch.host_tokens))
        return self.graph(n, keeps_rows=batch.rows.keep).run(batch)

    def graph(self, n: int, *, keeps_rows: bool) -> StepGraph:
        """The graph of a bucket."""
        key = (n, keeps_rows)
        if key not in self._graphs:
            self._graphs[key] = StepGraph(
                self._model,
                self._experts,
                cache=self._cache,
                states=self._states,
                n=n,
                context=self._context,
                keeps_rows=keeps_rows,
            )
        return self._graphs[key]
