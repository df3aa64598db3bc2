"""Mixture of experts: the router, the shared expert, and what the routed experts need.

Owns no state. Never knows where an expert's bytes are: the executor that gets `RoutedInput` does.
Hazard: routed outputs are added in float32 in ascending expert order, after the shared expert's.
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.experts.routed import RoutedInput
from makeway.kernels import Ops, Weight


@dataclass(frozen=True)
class MoEWeights:
    """`shared_gate` [1, hidden]; the shared expert is missing in qwen3moe."""

    router: Weight
    shared: tuple[Weight, Weight, Weight] | None = None
    shared_gate: Weight | None = None


def moe_input(ops: Ops, w: MoEWeights, x: Tensor, *, top_k: int, inject: Tensor | None = None) -> RoutedInput:
    """Routes x f32 [n, hidden] and runs the shared expert."""
    ids, weights, acc = ops.moe_input(x, w.router, top_k=top_k, shared=w.shared, shared_gate=w.shared_gate)
    return RoutedInput(x, ids, weights, acc, inject)
