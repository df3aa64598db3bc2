"""How routed experts are run. A model calls `experts(layer, moe)` and never knows which executor it got.

Owns no weights. Never changes the order of the sum: ascending expert id, in float32, one addition per expert.
Hazard: rows may lie anywhere in the packed tiles; the reference's products do not depend on the place.
"""

from typing import Protocol

import torch

from makeway.experts.routed import RoutedInput
from makeway.experts.store import AnyExperts, used_experts
from makeway.kernels import Ops, Weight


class Experts(Protocol):
    """Adds the weighted outputs of the routed experts of `layer` to `moe.acc`, in place."""

    def __call__(self, layer: int, moe: RoutedInput) -> None: ...


class StepExperts(Experts, Protocol):
    """The executor of decode: layers in any order, any number of times, then `end_step`."""

    def end_step(self) -> None:
        """The step is complete; its misses are kept or dropped one step later."""
        ...

    def settle(self) -> None:
        """Between steps: decide about the last one now."""
        ...

    def make_way(self) -> None:
        """Between steps: slots are lent next. Nothing of the last step waits for a decision that could change them."""
        ...


def add_expert(ops: Ops, moe: RoutedInput, expert: int, *, weights: tuple[Weight, Weight, Weight]) -> None:
    """Run one expert (gate, up, down) on the rows that chose it and add its output, wherever the weights lie."""
    rows, ranks = torch.nonzero(moe.ids == expert, as_tuple=True)
    out = ops.expert_ffn(moe.x[rows], *weights)
    moe.acc[rows] += moe.weights[rows, ranks][:, None] * out


class DirectExperts:
    """Runs each expert where it lies (in the mapped file, or in the store), decoding one at a time."""

    def __init__(self, store: AnyExperts, ops: Ops) -> None:
        self._store = store
        self._ops = ops

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        experts = self._store.layers[layer]
        for expert in used_experts(moe.ids):
            add_expert(self._ops, moe, expert, weights=experts.of(expert))
