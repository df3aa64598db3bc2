"""The operations a model is made of: their names, and which implementation a device gets.

Owns the choice. Never mixes implementations silently: what was chosen is listed by name in the status document.
Hazard: `reference` defines the results; any other implementation is tested against it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kernels import reference, reference_attention
from makeway.kernels.reference import KEY_TILE, ROW_TILE
from makeway.kernels.weight import Weight


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation; signatures and meaning are those of `kernels/reference*.py`."""

    name: str
    linear: Callable[[Tensor, Weight], Tensor] = reference.linear
    sigmoid: Callable[[Tensor], Tensor] = reference.sigmoid
    silu: Callable[[Tensor], Tensor] = reference.silu
    softplus: Callable[[Tensor], Tensor] = reference.softplus
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    l2_norm: Callable[[Tensor], Tensor] = reference.l2_norm
    rope: Callable[..., Tensor] = reference.rope
    route: Callable[[Tensor, int], tuple[Tensor, Tensor]] = reference.route
    expert_ffn: Callable[[Tensor, Weight, Weight, Weight], Tensor] = reference.expert_ffn
    causal_conv: Callable[..., Tensor] = reference.causal_conv
    delta_rule: Callable[..., tuple[Tensor, Tensor]] = reference.delta_rule
    attention: Callable[..., Tensor] = reference_attention.attention
    block_scores: Callable[..., Tensor] = reference_attention.block_scores
    select_blocks: Callable[..., Tensor] = reference_attention.select_blocks


REFERENCE = Ops("reference")


def select(device: torch.device) -> Ops:
    """The implementation for a device. Today every device runs the reference, and the status document says so."""
    assert device.type in ("cpu", "cuda")
    return REFERENCE


__all__ = ["KEY_TILE", "REFERENCE", "ROW_TILE", "Ops", "Weight", "select"]
