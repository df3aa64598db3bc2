"""A sweep: one pass over all layers for many prompt tokens, so that each expert is needed once, not once a chunk.

Owns the hidden states of the sweep. Never samples and never opens sequences. In each layer first the mixer, shared
expert and router run chunk by chunk, in order; then the routed experts run over all tokens of the sweep.
Hazard: inside a sweep the sequence's length is still that before it; only a finished sweep advances it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from makeway.experts.executors import Experts
from makeway.experts.routed import RoutedInput
from makeway.kv import Batch, SequenceState
from makeway.models import Model


class Sweep:
    """The next `tokens` of one sequence, read in chunks of `chunk`; KV room must be reserved.

    `steps()` yields after each unit of work (a chunk's mixer, or a layer's experts), so that the caller can show
    progress or stop. When it is exhausted, `residual` holds the result [n, ...] and the sequence has advanced.
    """

    def __init__(
        self, model: Model, experts: Experts, *, sequence: SequenceState, tokens: Sequence[int], chunk: int
    ) -> None:
        assert tokens
        assert chunk >= 1
        self._model, self._experts, self._sequence = model, experts, sequence
        self._batches = [
            Batch.of([(sequence, list(tokens[i : i + chunk]))], device=model.device, offset=i)
            for i in range(0, len(tokens), chunk)
        ]
        self.n_tokens = len(tokens)
        self.n_units = model.facts.n_layers * (len(self._batches) + 1)
        self.n_done = 0
        self.residual: Tensor | None = None

    @property
    def tokens_done(self) -> int:
        """The share of the work done, counted in tokens; all of them only when the sweep is complete."""
        return self.n_tokens * self.n_done // self.n_units

    def steps(self) -> Iterator[None]:
        """Runs the sweep; one unit of work for each `next`."""
        model = self._model
        parts = [model.embed(batch) for batch in self._batches]
        for layer in range(model.facts.n_layers):
            inputs: list[RoutedInput] = []
            for i, batch in enumerate(self._batches):
                parts[i], moe = model.mix(layer, parts[i], batch)
                inputs.append(moe)
                self.n_done += 1
                yield
            together = _join(inputs)
            self._experts(layer, together)
            h = model.combine(layer, torch.cat(parts), together)
            parts = list(torch.split(h, [len(batch.host_tokens) for batch in self._batches]))
            self.n_done += 1
            if layer < model.facts.n_layers - 1:
                yield
        self._sequence.advance(self.n_tokens)
        self.residual = torch.cat(parts)

    def run(self) -> Tensor:
        """The whole sweep at once; returns the residual after the last layer."""
        for _ in self.steps():
            pass
        assert self.residual is not None
        return self.residual


def _join(inputs: list[RoutedInput]) -> RoutedInput:
    """The experts' input of all chunks as one."""
    inject = None
    if inputs[0].inject is not None:
        inject = torch.cat([m.inject for m in inputs if m.inject is not None])
    return RoutedInput(
        x=torch.cat([m.x for m in inputs]),
        ids=torch.cat([m.ids for m in inputs]),
        weights=torch.cat([m.weights for m in inputs]),
        acc=torch.cat([m.acc for m in inputs]),
        inject=inject,
    )
