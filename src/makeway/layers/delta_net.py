"""Gated DeltaNet: linear attention with a recurrent state instead of keys and values.

Owns no state: the delta state and the convolution's tail live in the state pool. Never reads ahead.
Hazard: converters order V heads in two ways; `tiled` says whether V head j uses K head j mod n_k or j div group.
"""

from dataclasses import dataclass

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
    qkv, gate, alpha, beta = _projected(ops, shape, w, x)
    gated = ops.gated_delta(
        qkv,
        gate,
        alpha=alpha,
        beta=beta,
        conv=w.conv,
        a=w.a,
        dt_bias=w.dt_bias,
        norm=w.norm,
        eps=shape.eps,
        sigmoid_gate=shape.sigmoid_gate,
        conv_state=batch.states.conv("conv", layer),
        state=batch.states.delta(layer),
        rows=batch.rows,
    )
    return ops.linear(gated, w.out)


def _projected(ops: Ops, shape: DeltaNetShape, w: DeltaNetWeights, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """qkv, gate, alpha and beta before its sigmoid."""
    if w.ba is not None:  # per K head: its group's betas, then its alphas
        qkv, gate, fused = ops.linears(x, (w.qkv, w.gate, w.ba))
        ba = fused.view(x.shape[0], shape.n_k_heads, 2, -1)
        return qkv, gate, ba[:, :, 1].reshape(x.shape[0], -1), ba[:, :, 0].reshape(x.shape[0], -1)
    assert w.alpha is not None
    assert w.beta is not None
    qkv, gate, alpha, beta = ops.linears(x, (w.qkv, w.gate, w.alpha, w.beta))
    return qkv, gate, alpha, beta
