"""What a tensor of a synthetic model is: its type, its shape and how its values are spread.

Owns the sizes of values; never makes a byte (`blocks.py`, `synth.py`) or names an architecture (`shapes.py`).
Hazard: values must keep activations near 1 through any depth. Matrices that read have a standard deviation of
1 / sqrt(inputs); matrices that write to the residual `WRITE` / sqrt(inputs), so that 96 of them add less energy than
the embedding has; gammas are near 1, or 2 where a sigmoid of about 1/2 follows (hyper-connections, GDN's gate).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

from makeway.gguf import GGMLType as T

WRITE = 0.1  # at 0.2 the residual of layer 48 holds so little of the token that hit rates fall by 14 points


@dataclass(frozen=True)
class Normal:
    """Normal values; quantised types: the same mean and standard deviation, not the same form. Mean only in F32."""

    std: float
    mean: float = 0.0


@dataclass(frozen=True)
class Uniform:
    """Uniform values; F32 only."""

    low: float
    high: float


@dataclass(frozen=True)
class Router:
    """One row per expert, scaled by the rank of the expert (`synth.Knobs.skew`); F32 only."""


@dataclass(frozen=True)
class TokenRows:
    """One row per token: its topic's part and its own (`synth.Knobs.locality`). `is_head`: rows of the output."""

    is_head: bool


Fill: TypeAlias = Normal | Uniform | Router | TokenRows


@dataclass(frozen=True)
class TensorSpec:
    """Type, shape in torch order, and how values are spread."""

    type: T
    shape: tuple[int, ...]
    fill: Fill


class Shape(Protocol):
    """What can be synthesised."""

    @property
    def n_vocab(self) -> int: ...

    @property
    def pre(self) -> str:
        """The pre-tokenizer's name, as GGUF has it."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Keys of the architecture; the vocabulary is added by `synth`."""
        ...

    def tensors(self) -> dict[str, TensorSpec]:
        """Every tensor in file order."""
        ...


def reads(kind: T, *shape: int) -> TensorSpec:
    """A matrix [..., outputs, inputs] that keeps the size of values."""
    return TensorSpec(kind, shape, Normal(shape[-1] ** -0.5))


def writes(kind: T, *shape: int, gain: float = WRITE) -> TensorSpec:
    """A matrix whose output is added to the residual."""
    return TensorSpec(kind, shape, Normal(gain * shape[-1] ** -0.5))


def gamma(n: int, mean: float = 1.0) -> TensorSpec:
    return TensorSpec(T.F32, (n,), Normal(0.1, mean))


def experts(n_experts: int, top_k: int, *, hidden: int, ff: int, gate_up: T, down: T) -> dict[str, TensorSpec]:
    """Routed experts: the sum of `top_k` of them, each weighted about 1 / top_k, is as large as other writes."""
    return {
        "ffn_gate_inp.weight": TensorSpec(T.F32, (n_experts, hidden), Router()),
        "ffn_gate_exps.weight": reads(gate_up, n_experts, ff, hidden),
        "ffn_up_exps.weight": reads(gate_up, n_experts, ff, hidden),
        "ffn_down_exps.weight": writes(down, n_experts, hidden, ff, gain=WRITE * top_k**0.5),
    }


def prefixed(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {f"{prefix}.{k}": v for k, v in values.items()}


def prefixed_flat(prefix: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {prefix + k: v for k, v in values.items()}
