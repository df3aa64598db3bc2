"""Gated DeltaNet: linear attention with a recurrent state instead of keys and values.

Owns no state: the delta state and the convolution's tail live in the state pool. Never reads ahead.
Hazard: converters order V heads in two ways; `tiled` says whether V head j uses K head j mod n_k or j div group.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kernels import Ops, Weight
from makeway.kv import Batch


@dataclass(frozen=True)
class DeltaNetShape:
    """`sigmoid_gate`: the output gate is sigmoid (qwen4exp), else silu."""

    n_k_heads: int
    n_v_heads: int
    k_dim: int
    v_dim: int
    eps: float
    tiled: bool
    sigmoid_gate: bool


@dataclass(frozen=True)
class DeltaNetWeights:
    """`a` = -exp(A_log) [n_v_heads]; `conv` [channels, taps]; either `alpha` and `beta`, or the fused `ba`."""

    qkv: Weight
    gate: Weight
    out: Weight
    conv: Tensor
    a: Tensor
    dt_bias: Tensor
    norm: Tensor
    alpha: Weight | None = None
    beta: Weight | None = None
    ba: Weight | None = None


def delta_net(ops: Ops, shape: DeltaNetShape, w: DeltaNetWeights, *, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """x f32 [n, hidden] (normed input) -> f32 [n, hidden]; moves each sequence's state on."""
    n = x.shape[0]
    qkv = ops.linear(x, w.qkv)
    gate = ops.linear(x, w.gate).view(n, shape.n_v_heads, shape.v_dim)
    alpha, raw_beta = _alpha_beta(ops, shape, w, x)
    decay = torch.exp(w.a * ops.softplus(alpha + w.dt_bias))
    beta = ops.sigmoid(raw_beta)
    mixed = ops.silu(ops.conv_step(qkv, w.conv, state=batch.states.conv("conv", layer), rows=batch.rows))
    q, k, v = _split(ops, shape, mixed)
    out = ops.delta_step(q, k, v=v, decay=decay, beta=beta, state=batch.states.delta(layer), rows=batch.rows)
    normed = ops.rms_norm(out, w.norm, shape.eps)
    gated = normed * (ops.sigmoid(gate) if shape.sigmoid_gate else ops.silu(gate))
    return ops.linear(gated.view(n, -1), w.out)


def _alpha_beta(ops: Ops, shape: DeltaNetShape, w: DeltaNetWeights, x: Tensor) -> tuple[Tensor, Tensor]:
    if w.ba is not None:  # per K head: its group's betas, then its alphas
        ba = ops.linear(x, w.ba).view(x.shape[0], shape.n_k_heads, 2, -1)
        return ba[:, :, 1].reshape(x.shape[0], -1), ba[:, :, 0].reshape(x.shape[0], -1)
    assert w.alpha is not None
    assert w.beta is not None
    return ops.linear(x, w.alpha), ops.linear(x, w.beta)


def _split(ops: Ops, shape: DeltaNetShape, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Convolved [n, channels] -> q, k [n, n_k_heads, k_dim] (normed, q scaled) and v [n, n_v_heads, v_dim]."""
    n, width = mixed.shape[0], shape.n_k_heads * shape.k_dim
    q = ops.l2_norm(mixed[:, :width].reshape(n, shape.n_k_heads, shape.k_dim)) * shape.k_dim**-0.5
    k = ops.l2_norm(mixed[:, width : 2 * width].reshape(n, shape.n_k_heads, shape.k_dim))
    return q, k, mixed[:, 2 * width :].reshape(n, shape.n_v_heads, shape.v_dim)
