"""Kernels of prompts, compiled when an engine opens: made-up tokens go through a layer of each kind, nothing runs.

Owns which tokens, layers and pieces have every kernel asked for that a prompt can need. Never uses the link, and leaves
nothing behind but compiled kernels and the operations' scratch.
Hazard: what is computed is garbage, and lies where slots are to be: before the first one is filled.
"""

from collections.abc import Sequence

import numpy as np
import torch

from makeway.engine.backend import Backend
from makeway.engine.prefill import SweepBuffers
from makeway.experts.cache import ExpertCache
from makeway.gguf import GGUFFile
from makeway.kv import Batch, KVCache, SequenceState, StatePool
from makeway.memory.arena import Arena, View
from makeway.memory.plan import Lending, MemoryPlan, PrefillLayout
from makeway.memory.sizes import MAX_ROWS
from makeway.models import Model

STARTS = (0, *(1 << i for i in range(7, 16)))
"""Tokens before a chunk: sparse attention's kernels depend on how many there are, but no more from some thousands on;
a few rows go by the first or the last of them."""
ROUTED_ROWS = 16  # of pieces, whose kernels do not depend on it


class PromptWarmUp:
    """What there is to be compiled for, of one engine."""

    def __init__(
        self,
        file: GGUFFile,
        model: Model,
        plan: MemoryPlan,
        *,
        backend: Backend,
        arena: Arena,
        cache: ExpertCache,
        kv: KVCache,
        states: StatePool,
        input_type: torch.dtype,
    ) -> None:
        self._model, self._plan, self._backend, self._arena, self._cache = model, plan, backend, arena, cache
        self._kv, self._states, self._input_type = kv, states, input_type
        self._layers = [0, *kinds_of_layers(file, model.facts.n_layers)]  # nothing is taken in before the very first

    def run(self) -> None:
        """Compiles; nothing on a backend that compiles nothing. Raises what the compiler raises."""
        plan, context = self._plan, self._plan.request.context
        if not self._backend.chunk_rows:
            return
        sequence = SequenceState(self._kv, self._states)
        try:
            sequence.reserve(1)
            with self._backend.compiling():
                for n in sorted({min(n, context) for n in self._backend.chunk_rows}):
                    starts = [start for start in STARTS if start + n <= context]
                    for start in starts if n > MAX_ROWS else {*starts[:1], *starts[-1:]}:
                        layout = plan.prefill_layout(plan.lend_for(n))
                        self._read(sequence, min(n, layout.chunk), start=start, layout=layout)
                for lending in self._lendings():
                    self._run_pieces(plan.prefill_layout(lending))
                one = np.full(1, 4096, dtype=np.int64)
                self._backend.move_parts(self._arena.whole, to=0 * one, of=one, n_bytes=one)
        finally:
            sequence.close()

    def _lendings(self) -> Sequence[Lending]:
        """One for each shape of sweeps."""
        plan = self._plan
        longest = plan.lend_for(plan.request.context)
        short = plan.lend_for(1)
        return (short,) if longest.shape == short.shape else (short, longest)

    def _read(self, sequence: SequenceState, n: int, *, start: int, layout: PrefillLayout) -> None:
        """A chunk of `n` tokens through a layer of each kind, and the end of a prompt, as `Sweep` does it."""
        model, buffers, rows = self._model, self._buffers(layout, n), slice(0, n)
        batch = Batch.of([(sequence, [0] * n)], device=model.device, offset=start)
        buffers.residual[rows] = model.embed(batch)
        before = None
        for layer in self._layers:
            h, moe = model.mix(layer, buffers.residual[rows], batch, before=before)
            buffers.put(rows, moe)
            before = buffers.routed(rows)
        assert before is not None
        h = model.combine(self._layers[-1], h, before)
        model.head(h[-1:])
        if self._plan.sizes.with_mtp:
            tail = sequence.state.tensors["draft", model.facts.n_layers]
            model.draft_remember(batch, torch.cat((tail[None], model.trunk_state(h)[:-1])))

    def _run_pieces(self, layout: PrefillLayout) -> None:
        workspace = View(self._arena, layout.workspace, epoch=None)
        pieces = self._backend.pieces(self._cache, self._arena, workspace=workspace, piece_experts=layout.piece_experts)
        n = min(ROUTED_ROWS, layout.sweep_tokens)
        moe = self._buffers(layout, n).routed(slice(0, n))
        for layer in self._layers:
            pieces.ask_for_kernels(layer, moe)

    def _buffers(self, layout: PrefillLayout, n: int) -> SweepBuffers:
        views = [View(self._arena, region, epoch=None) for region in layout.sweep]
        return SweepBuffers.in_views(self._model, n, views, input_type=self._input_type)


def kinds_of_layers(file: GGUFFile, n_layers: int) -> list[int]:
    """The first of the layers whose tensors have the same names, types and shapes, for all that there are."""
    tensors: dict[int, list[object]] = {layer: [] for layer in range(n_layers)}
    for name, tensor in file.tensors.items():
        place, _, rest = name.removeprefix("blk.").partition(".")
        if name.startswith("blk.") and int(place) < n_layers:
            tensors[int(place)].append((rest, tensor.type, tensor.shape))
    found: dict[frozenset[object], int] = {}
    for layer, its in tensors.items():
        found.setdefault(frozenset(its), layer)
    return list(found.values())
