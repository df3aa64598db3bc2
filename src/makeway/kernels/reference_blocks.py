"""Larger steps of a layer in plain torch, made of the operations in `reference.py`: the specification, and the CPU.

Owns no state. Never does what a single operation does; it exists so that a GPU can do each of these in few launches.
Hazard: their order of operations is part of the bits that the tests on the CPU hold.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kernels.reference import (
    conv_step,
    delta_step,
    expert_ffn,
    l2_norm,
    linear,
    rms_norm,
    rope,
    route,
    sigmoid,
    silu,
    softplus,
)
from makeway.kernels.reference_attention import index_pool, write_kv
from makeway.kernels.rows import ConvState, DeltaState, KVLayer, Rows
from makeway.kernels.weight import Weight


def linears(x: Tensor, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
    """`linear` of one x by several matrices."""
    return tuple(linear(x, w) for w in weights)


def norm_rope(
    x: Tensor, gamma: Tensor, *, positions: Tensor, eps: float, n_rot: int, theta: float, scale: float = 1.0
) -> Tensor:
    """Heads x f32 [n, heads, d] normed by gamma [d], turned to their positions int64 [n], scaled."""
    return rope(rms_norm(x, gamma, eps), positions, n_rot=n_rot, theta=theta) * scale


def add_norm(h: Tensor, added: Tensor | None, *, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h f32 [n, d], plus `added` f32 [n, d] if there is any -> that h, and its `rms_norm` by gamma [d]."""
    if added is not None:
        h = h + added
    return h, rms_norm(h, gamma, eps)


def attend_input(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    q_norm: Tensor,
    k_norm: Tensor,
    kv: KVLayer,
    rows: Rows,
    eps: float,
    n_rot: int,
    theta: float,
) -> Tensor:
    """Heads q f32 [n, heads, d], k and v [n, kv_heads, d] as the matrices give them: k normed by k_norm [d] and turned
    to its position goes with v into the blocks of `kv`; returns q normed, turned, and scaled by d^-0.5."""
    turned = norm_rope(q, q_norm, positions=rows.positions, eps=eps, n_rot=n_rot, theta=theta, scale=q.shape[2] ** -0.5)
    keys = norm_rope(k, k_norm, positions=rows.positions, eps=eps, n_rot=n_rot, theta=theta)
    write_kv(keys, v, kv=kv, rows=rows)
    return turned


def index_input(
    raw: Tensor,
    q: Tensor,
    *,
    k_norm: Tensor,
    q_norm: Tensor,
    kv: KVLayer,
    rows: Rows,
    eps: float,
    n_rot: int,
    theta: float,
) -> Tensor:
    """`index_pool` of raw f32 [n, index_dim] by k_norm; returns the queries q f32 [n, heads, index_dim] normed by
    q_norm and turned."""
    index_pool(raw, k_norm, kv=kv, rows=rows, eps=eps, n_rot=n_rot, theta=theta)
    return norm_rope(q, q_norm, positions=rows.positions, eps=eps, n_rot=n_rot, theta=theta)


@dataclass(frozen=True)
class MixerWeights:
    """A mixer of hyper-connections; norm f32 [streams * hidden], down to the low rank, up again; `inject` [streams,
    streams * hidden] is missing on the output mixers, which write nothing back."""

    norm: Tensor
    down: Weight
    up: Weight
    inject: Weight | None = None


def hc_combine(h: Tensor, inject: Tensor, out: Tensor) -> Tensor:
    """Adds a block's output [n, hidden] to every stream of h [n, streams, hidden], scaled by inject [n, streams]."""
    return h + inject[:, :, None] * out[:, None, :]


def hc_mix(
    h: Tensor, w: MixerWeights, *, eps: float, added: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """h f32 [n, streams, hidden], after `hc_combine` with `added` (inject, out) if there is any -> that h (a
    new one here; kernels may change h itself), the block's input f32 [n, hidden] and its own inject factors f32 [n,
    streams]."""
    if added is not None:
        h = hc_combine(h, *added)
    n, n_streams, hidden = h.shape
    normed = rms_norm(h, w.norm.view(n_streams, hidden), eps)
    flat = normed.reshape(n, -1)
    low = silu(linear(flat, w.down) / n_streams)
    weighted = (sigmoid(linear(low, w.up)) * flat).view_as(normed)
    total = weighted[:, 0]
    for i in range(1, n_streams):
        total = total + weighted[:, i]
    inject = None
    if w.inject is not None:
        inject = 2.0 * sigmoid(linear(flat, w.inject) / n_streams)
    return h, total / n_streams, inject


def ple_gate(
    key: Tensor, h: Tensor, value: Tensor, *, norm_key: Tensor, norm_query: Tensor, norm_conv: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """How much of an n-gram's value [n, hidden] each stream takes: by the product of its key with the stream.

    key, h f32 [n, streams, hidden]; the norms' gammas f32 [streams * hidden]. Returns the gated value f32 [n, streams,
    hidden], and it normed, f32 [n, streams * hidden].
    """
    n, n_streams, hidden = h.shape
    key_gamma, query_gamma, conv_gamma = (g.view(n_streams, hidden) for g in (norm_key, norm_query, norm_conv))
    dot = (rms_norm(key, key_gamma, eps) * rms_norm(h, query_gamma, eps)).sum(-1) * hidden**-0.5
    gate = sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    gated = gate[:, :, None] * value[:, None, :]
    return gated, rms_norm(gated, conv_gamma, eps).reshape(n, -1)


def gated_delta(
    qkv: Tensor,
    gate: Tensor,
    *,
    alpha: Tensor,
    beta: Tensor,
    conv: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    eps: float,
    sigmoid_gate: bool,
    conv_state: ConvState,
    state: DeltaState,
    rows: Rows,
) -> Tensor:
    """Gated DeltaNet between its matrices: qkv f32 [n, channels] through the convolution and silu, q and k normed, the
    delta rule with decay exp(a softplus(alpha + dt_bias)) and beta's sigmoid, normed, gated.

    gate f32 [n, v_heads * d_v]; alpha, beta f32 [n, v_heads]; a = -exp(A_log). Returns f32 [n, v_heads * d_v].
    """
    n, (n_k, k_dim), (n_v, v_dim) = qkv.shape[0], state.k.shape[2:], state.v.shape[2:]
    width = n_k * k_dim
    decay = torch.exp(a * softplus(alpha + dt_bias))
    mixed = silu(conv_step(qkv, conv, state=conv_state, rows=rows))
    q = l2_norm(mixed[:, :width].reshape(n, n_k, k_dim)) * k_dim**-0.5
    k = l2_norm(mixed[:, width : 2 * width].reshape(n, n_k, k_dim))
    v = mixed[:, 2 * width :].reshape(n, n_v, v_dim)
    out = delta_step(q, k, v=v, decay=decay, beta=sigmoid(beta), state=state, rows=rows)
    gate = gate.view(n, n_v, v_dim)
    gated = rms_norm(out, norm, eps) * (sigmoid(gate) if sigmoid_gate else silu(gate))
    return gated.view(n, -1)


def moe_input(
    x: Tensor, router: Weight, *, top_k: int, shared: tuple[Weight, Weight, Weight] | None, shared_gate: Weight | None
) -> tuple[Tensor, Tensor, Tensor]:
    """x f32 [n, hidden] -> what `route` gives of the router, and the shared expert's gated output f32 [n, hidden]
    (zeros without one)."""
    ids, weights = route(linear(x, router), top_k)
    if shared is None:
        return ids, weights, torch.zeros_like(x)
    assert shared_gate is not None
    return ids, weights, expert_ffn(x, *shared) * sigmoid(linear(x, shared_gate))
