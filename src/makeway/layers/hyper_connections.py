"""Hyper-connections: the residual is several streams; a mixer reads them as one vector and writes back to all.

Owns no state. Never normalises outside the mixer: it replaces the layer norms and the output norm.
Hazard: gammas are per stream and value, [streams * hidden].
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.kernels import Ops, Weight


@dataclass(frozen=True)
class MixerWeights:
    """`inject` is missing on the output mixers, which write nothing back."""

    norm: Tensor
    down: Weight
    up: Weight
    inject: Weight | None = None


def stream_norm(ops: Ops, h: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMS norm of each stream by itself: h f32 [n, streams, hidden], gamma [streams * hidden]."""
    return ops.rms_norm(h, gamma.view(h.shape[1], h.shape[2]), eps)


def mix(ops: Ops, w: MixerWeights, h: Tensor, *, eps: float) -> tuple[Tensor, Tensor | None]:
    """h f32 [n, streams, hidden] -> the block's input f32 [n, hidden] and the inject factors f32 [n, streams]."""
    n, n_streams, _ = h.shape
    normed = stream_norm(ops, h, w.norm, eps)
    flat = normed.reshape(n, -1)
    low = ops.silu(ops.linear(flat, w.down) / n_streams)
    weighted = (ops.sigmoid(ops.linear(low, w.up)) * flat).view_as(normed)
    total = weighted[:, 0]
    for i in range(1, n_streams):
        total = total + weighted[:, i]
    inject = None
    if w.inject is not None:
        inject = 2.0 * ops.sigmoid(ops.linear(flat, w.inject) / n_streams)
    return total / n_streams, inject


def combine(h: Tensor, inject: Tensor, out: Tensor) -> Tensor:
    """Adds the block's output [n, hidden] to every stream of h [n, streams, hidden], scaled by inject."""
    return h + inject[:, :, None] * out[:, None, :]
