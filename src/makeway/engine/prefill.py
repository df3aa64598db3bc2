"""A sweep: one pass over all layers for many prompt tokens, so that each expert is needed once, not once a chunk.

Owns the hidden states of the sweep. Never samples and never opens sequences. In each layer first the mixer, shared
expert and router run chunk by chunk, in order; then the routed experts run over all tokens of the sweep.
Hazard: inside a sweep a sequence's length is still that before it; only a finished sweep advances it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.device import HostCopy
from makeway.experts.executors import Experts
from makeway.experts.routed import RoutedInput
from makeway.kv import Batch, SequenceState
from makeway.memory.arena import View
from makeway.models import Model

OnRouted = Callable[[int, "SweepPart", Tensor], None]
OnMixed = Callable[[int, "SweepPart", int], None]


@dataclass(frozen=True)
class SweepPart:
    """The next `tokens` of a sequence; they are rows first .. first + n - 1 of the sweep."""

    sequence: SequenceState
    tokens: tuple[int, ...]
    first: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + len(self.tokens))


@dataclass(frozen=True)
class SweepBuffers:
    """What a sweep keeps for each of its tokens: residual f32 [n, ...], x [n, hidden], acc f32 [n, hidden], ids int32
    and weights f32 [n, top_k], inject f32 [n, streams] or None."""

    residual: Tensor
    x: Tensor
    acc: Tensor
    ids: Tensor
    weights: Tensor
    inject: Tensor | None

    @classmethod
    def allocate(cls, model: Model, n_tokens: int) -> "SweepBuffers":
        """In memory of their own, for tests and for models without a plan."""
        f, device = model.facts, model.device
        streams = f.n_streams
        return cls(
            residual=torch.empty((n_tokens, *((streams,) if streams > 1 else ()), f.hidden), device=device),
            x=torch.empty((n_tokens, f.hidden), device=device),
            acc=torch.empty((n_tokens, f.hidden), device=device),
            ids=torch.empty((n_tokens, f.top_k), dtype=torch.int32, device=device),
            weights=torch.empty((n_tokens, f.top_k), device=device),
            inject=torch.empty((n_tokens, streams), device=device) if streams > 1 else None,
        )

    @classmethod
    def in_views(
        cls, model: Model, n_tokens: int, views: Sequence[View], *, input_type: torch.dtype = torch.float32
    ) -> "SweepBuffers":
        """In the planned regions, which are named as in `PlanFacts.sweep_bytes_per_token`; x is of `input_type`."""
        f = model.facts
        by_name = {view.region.name: view.tensor for view in views}

        def carve(name: str, dtype: torch.dtype, *shape: int, skip: int = 0) -> Tensor:
            count = n_tokens
            for size in shape:
                count *= size
            start = skip * n_tokens
            room = by_name[name][start : start + count * dtype.itemsize]
            return room.view(dtype).view(n_tokens, *shape)

        streams = (f.n_streams,) if f.n_streams > 1 else ()
        return cls(
            residual=carve("sweep residual", torch.float32, *streams, f.hidden),
            x=carve("sweep input", input_type, f.hidden),
            acc=carve("sweep sum", torch.float32, f.hidden),
            ids=carve("sweep routing", torch.int32, f.top_k),
            weights=carve("sweep routing", torch.float32, f.top_k, skip=4 * f.top_k),
            inject=carve("sweep inject", torch.float32, f.n_streams) if streams else None,
        )

    def routed(self, rows: slice) -> RoutedInput:
        """The experts' input of some rows, in place."""
        inject = None if self.inject is None else self.inject[rows]
        return RoutedInput(self.x[rows], self.ids[rows], self.weights[rows], self.acc[rows], inject)

    def put(self, rows: slice, moe: RoutedInput) -> None:
        """Keep what the experts of a layer need of a chunk."""
        self.x[rows] = moe.x
        self.acc[rows] = moe.acc
        self.ids[rows] = moe.ids
        self.weights[rows] = moe.weights
        if self.inject is not None:
            assert moe.inject is not None
            self.inject[rows] = moe.inject


class Sweep:
    """The next tokens of some sequences, read in chunks of `chunk`; KV room must be reserved.

    `steps()` yields after each unit of work (a chunk's mixer, or a layer's experts), so that the caller can show
    progress or stop. When it is exhausted `is_done`, and the sequences have advanced.
    """

    def __init__(
        self,
        model: Model,
        experts: Experts,
        *,
        parts: Sequence[tuple[SequenceState, Sequence[int]]],
        chunk: int,
        buffers: SweepBuffers | None = None,
        on_routed: OnRouted | None = None,
        on_mixed: OnMixed | None = None,
        prefetch: Callable[[int], None] | None = None,
        cuts: Sequence[Collection[int]] = (),
        with_mtp: bool = False,
    ) -> None:
        """`buffers`: at least as many rows as there are tokens. `on_routed(layer, part, ids [n, k])` is told what
        each layer routed, on the host and a layer late, `on_mixed(layer, part, n)` that a layer's mixer has read the
        first n tokens of a part, `prefetch(layer)` which layer's experts are needed next. `cuts`, by part: after so
        many of its tokens a chunk ends, wherever chunks of the usual size would. `with_mtp`: the MTP block reads the
        tokens too."""
        assert parts
        assert chunk >= 1
        self._model, self._experts, self._prefetch = model, experts, prefetch
        self._on_routed, self._on_mixed, self._with_mtp = on_routed, on_mixed, with_mtp
        self.parts: list[SweepPart] = []
        self._chunks: list[tuple[SweepPart, slice, Batch]] = []
        self.n_tokens = 0
        for index, (sequence, tokens) in enumerate(parts):
            assert tokens
            part = SweepPart(sequence, tuple(tokens), self.n_tokens)
            self.parts.append(part)
            ends = {*range(chunk, len(tokens), chunk), *(cuts[index] if cuts else ()), len(tokens)}
            start = 0
            for end in sorted(ends):
                batch = Batch.of([(sequence, list(part.tokens[start:end]))], device=model.device, offset=start)
                self._chunks.append((part, slice(part.first + start, part.first + end), batch))
                start = end
            self.n_tokens += len(tokens)
        self.buffers = buffers or SweepBuffers.allocate(model, self.n_tokens)
        assert self.buffers.x.shape[0] >= self.n_tokens
        self.n_units = model.facts.n_layers * (len(self._chunks) + 1) + with_mtp * len(self._chunks)
        self.n_done = 0
        self.is_done = False
        self._dropped: set[int] = set()
        self._routed: tuple[int, HostCopy] | None = None  # of the last layer, not told yet

    @property
    def tokens_done(self) -> int:
        """The share of the work done, counted in tokens; all of them only when the sweep is complete."""
        return self.n_tokens * self.n_done // self.n_units

    def part_done(self, part: SweepPart) -> int:
        """The share of a part's work done, counted in tokens."""
        return len(part.tokens) * self.n_done // self.n_units

    def drop(self, sequence: SequenceState) -> None:
        """A sequence leaves the sweep at once: none of its rows is computed, written or routed any more."""
        for part in self.parts:
            if part.sequence is sequence:
                self._dropped.add(part.first)
                self.buffers.ids[part.rows] = -1

    def residual(self, part: SweepPart) -> Tensor:
        """The residual after the last layer [n, ...] of a part's rows, in place; only when the sweep is done."""
        assert self.is_done
        return self.buffers.residual[part.rows]

    def steps(self) -> Iterator[None]:
        """Runs the sweep; one unit of work for each `next`. The sum of a layer's experts is taken in by the mixer
        behind it."""
        model, buffers = self._model, self.buffers
        n_layers = model.facts.n_layers
        self._announce(0)
        for _, rows, batch in self._live_chunks():
            buffers.residual[rows] = model.embed(batch)
        for layer in range(n_layers):
            for part, rows, batch in self._chunks:
                if self._is_live(part):
                    before = buffers.routed(rows) if layer else None
                    residual = buffers.residual[rows]
                    h, moe = model.mix(layer, residual, batch, before=before)
                    if h.data_ptr() != residual.data_ptr():  # kernels may add in place
                        residual.copy_(h)
                    buffers.put(rows, moe)
                    if self._on_mixed is not None:
                        self._on_mixed(layer, part, rows.stop - part.first)
                self.n_done += 1
                yield
            self._tell()
            if self._on_routed is not None:
                self._routed = layer, HostCopy(buffers.ids[: self.n_tokens])
            self._announce(layer + 1)
            self._experts(layer, buffers.routed(slice(0, self.n_tokens)))
            if layer == n_layers - 1:
                for _, rows, _ in self._live_chunks():
                    buffers.residual[rows] = model.combine(layer, buffers.residual[rows], buffers.routed(rows))
            self.n_done += 1
            if layer < n_layers - 1 or self._with_mtp:
                yield
        self._tell()
        if self._with_mtp:
            yield from self._draft_steps()
        for part in self.parts:
            if self._is_live(part):
                part.sequence.advance(len(part.tokens))
        self.is_done = True

    def _tell(self) -> None:
        """What the layer before routed, which is on the host by now: nothing has to wait for it."""
        if self._routed is None or self._on_routed is None:
            return
        (layer, copy), self._routed = self._routed, None
        ids = copy.get()
        for part in self.parts:
            if self._is_live(part):
                self._on_routed(layer, part, ids[part.rows])

    def _draft_steps(self) -> Iterator[None]:
        """The MTP block reads each token beside the trunk's state of the token before. Its output is not needed here,
        so neither are its experts: it is one layer, whose keys and values depend on its input alone."""
        model, layer = self._model, self._model.facts.n_layers
        for i, (part, rows, batch) in enumerate(self._chunks):
            if self._is_live(part):
                tail = part.sequence.state.tensors["draft", layer]
                trunk = model.trunk_state(self.buffers.residual[rows])
                model.draft_remember(batch, torch.cat((tail[None], trunk[:-1])))
                tail.copy_(trunk[-1])
                if self._on_mixed is not None:
                    self._on_mixed(layer, part, rows.stop - part.first)
            self.n_done += 1
            if i < len(self._chunks) - 1:
                yield

    def run(self) -> None:
        """The whole sweep at once."""
        for _ in self.steps():
            pass

    def _announce(self, layer: int) -> None:
        if self._prefetch is not None and layer < self._model.facts.n_layers:
            self._prefetch(layer)

    def _is_live(self, part: SweepPart) -> bool:
        return part.first not in self._dropped

    def _live_chunks(self) -> list[tuple[SweepPart, slice, Batch]]:
        return [chunk for chunk in self._chunks if self._is_live(chunk[0])]
