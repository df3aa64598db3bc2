"""Hyper-connections: the residual is several streams; a mixer reads them as one vector and writes back to all.

Owns no state. Never normalises outside the mixer: it replaces the layer norms and the output norm.
Hazard: gammas are per stream and value, [streams * hidden].
"""

from torch import Tensor

from makeway.kernels import MixerWeights, Ops


def stream_norm(ops: Ops, h: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """RMS norm of each stream by itself: h f32 [n, streams, hidden], gamma [streams * hidden]."""
    return ops.rms_norm(h, gamma.view(h.shape[1], h.shape[2]), eps)


def mix(
    ops: Ops, w: MixerWeights, h: Tensor, *, eps: float, added: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """h f32 [n, streams, hidden], to which `added` (inject, out) is added as `combine` does -> that h, the block's
    input [n, hidden] (f32; of a chunk on a GPU bf16) and the inject factors f32 [n, streams]. With `added` h itself may
    be what changes: use what is returned."""
    return ops.hc_mix(h, w, eps=eps, added=added)


def combine(ops: Ops, h: Tensor, inject: Tensor, out: Tensor) -> Tensor:
    """Adds the block's output [n, hidden] to every stream of h [n, streams, hidden], scaled by inject."""
    return ops.hc_combine(h, inject, out)


__all__ = ["MixerWeights", "combine", "mix", "stream_norm"]
