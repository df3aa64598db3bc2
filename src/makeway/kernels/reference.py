"""The specification of every operation in plain torch, and the CPU backend.

Owns no state. Never depends on how many rows come in one call: each row's bits are the same alone, in any
chunk and at any place of a chunk. Three rules give that: matrix products run on tiles of `ROW_TILE` rows
(a GEMM of fixed shape rounds a row the same wherever it lies; `F.linear` picks other code for other shapes),
sums run over fixed axes, and transcendental functions are built from `exp` (torch's vector and scalar forms of
sigmoid, silu and softplus differ in the last bit, so the end of a buffer would differ from its middle).
Hazard: it is a specification, not a fast path.
"""

import torch
from torch import Tensor

from makeway.kernels.rows import ConvState, DeltaState, Rows, Span
from makeway.kernels.weight import Weight

ROW_TILE = 16  # rows of a matrix product; part of the specification of the bits
KEY_TILE = 64  # keys of an attention tile, at absolute positions 0, 64, 128, ...
DECODE_ELEMENTS = 1 << 22  # weights decoded at once (16 MiB of float32)


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x f32 [n, n_cols] times the transposed weight: f32 [n, n_rows]; decodes the weight piece by piece."""
    n, n_cols = x.shape
    assert n_cols == weight.n_cols
    tiles = _row_tiles(x)
    out = x.new_empty((tiles.shape[0] * ROW_TILE, weight.n_rows))
    step = max(1, DECODE_ELEMENTS // n_cols)
    for first in range(0, weight.n_rows, step):
        piece = weight.decode(first, first + step).to(x.device).t()
        for i, tile in enumerate(tiles):
            out[i * ROW_TILE : (i + 1) * ROW_TILE, first : first + step] = tile @ piece
    return out[:n]


def decode(rows: Weight) -> Tensor:
    """All rows of a small matrix: f32 [n_rows, n_cols], on its device."""
    return rows.decode()


def _row_tiles(x: Tensor) -> Tensor:
    """x [n, d] padded with zero rows to [tiles, ROW_TILE, d]; always a fresh, aligned buffer."""
    n, d = x.shape
    n_tiles = -(-n // ROW_TILE)
    padded = x.new_zeros((n_tiles * ROW_TILE, d))
    padded[:n] = x
    return padded.view(n_tiles, ROW_TILE, d)


def sigmoid(x: Tensor) -> Tensor:
    return 1.0 / (1.0 + torch.exp(-x))


def silu(x: Tensor) -> Tensor:
    return x * sigmoid(x)


def softplus(x: Tensor) -> Tensor:
    """log(1 + exp(x)), x itself above 20 (as torch and llama.cpp cut it)."""
    return torch.where(x > 20.0, x, torch.log1p(torch.exp(x.clamp(max=20.0))))


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x f32 [..., d] / rms over d, times gamma [d] or any shape that broadcasts."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * gamma


def l2_norm(x: Tensor) -> Tensor:
    """x * rsqrt(sum of squares + 1e-6) over the last axis (as the delta-rule layers norm q and k)."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def rope(x: Tensor, positions: Tensor, *, n_rot: int, theta: float) -> Tensor:
    """Half-split rotary embedding of the first `n_rot` values; x [n, heads, d], positions int64 [n].

    Interleaved position sections of the Qwen models change nothing for text: the three positions are equal.
    """
    half = n_rot // 2
    exponents = torch.arange(half, dtype=torch.float64, device=x.device) * (-2.0 / n_rot)
    angles = positions.to(torch.float64)[:, None] * torch.pow(torch.tensor(theta, dtype=torch.float64), exponents)
    cos = torch.cos(angles).to(torch.float32)[:, None, :]
    sin = torch.sin(angles).to(torch.float32)[:, None, :]
    a, b, rest = x[..., :half], x[..., half:n_rot], x[..., n_rot:]
    return torch.cat((a * cos - b * sin, b * cos + a * sin, rest), dim=-1)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Router: softmax over all experts, the `top_k` best (ties to the lower id), renormalised.

    logits f32 [n, experts] -> ids int64 [n, top_k], best first, and weights f32 [n, top_k].
    """
    shifted = torch.exp(logits - logits.amax(-1, keepdim=True))
    probabilities = shifted / shifted.sum(-1, keepdim=True)
    values, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    values, ids = values[:, :top_k], ids[:, :top_k]
    return ids.contiguous(), values / values.sum(-1, keepdim=True)


def expert_ffn(x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
    """SwiGLU of one expert: x f32 [n, hidden] -> f32 [n, hidden]."""
    return linear(silu(linear(x, gate)) * linear(x, up), down)


def causal_conv(window: Tensor, kernel: Tensor, *, dilation: int = 1) -> Tensor:
    """Depthwise causal convolution: window f32 [dilation * (k - 1) + n, channels], kernel f32 [channels, k].

    Returns f32 [n, channels]; taps are added oldest first.
    """
    taps = kernel.shape[1]
    n = window.shape[0] - dilation * (taps - 1)
    out = window[:n] * kernel[:, 0]
    for tap in range(1, taps):
        out = out + window[tap * dilation : tap * dilation + n] * kernel[:, tap]
    return out


def delta_rule(state: Tensor, q: Tensor, k: Tensor, *, v: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """The gated delta rule as its token recurrence.

    state f32 [heads, d_k, d_v]; q, k f32 [n, heads, d_k]; v f32 [n, heads, d_v]; decay, beta f32 [n, heads].
    For each token: S = decay S; S += k (beta (v - k S)); o = q S. Returns o f32 [n, heads, d_v] and the new state.
    Source: Yang et al., Gated Delta Networks, eq. 10.
    """
    out = torch.empty_like(v)
    for t in range(q.shape[0]):
        state = state * decay[t, :, None, None]
        recalled = (state * k[t, :, :, None]).sum(1)
        change = (v[t] - recalled) * beta[t, :, None]
        state = state + k[t, :, :, None] * change[:, None, :]
        out[t] = (state * q[t, :, :, None]).sum(1)
    return out, state


def delta_step(
    q: Tensor, k: Tensor, *, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows
) -> Tensor:
    """The delta rule over every span from its sequence's state, which moves on, or is replayed and kept (`rows.keep`).

    q, k f32 [n, k_heads, d_k]; v f32 [n, v_heads, d_v]; decay, beta f32 [n, v_heads]. Returns f32 [n, v_heads, d_v].
    """
    out = torch.empty_like(v)
    for s in rows.spans:
        r, kept = s.rows, state.k[s.place]
        before = _replayed(state, s)
        out[r], after = delta_rule(
            before, _spread(q[r], state), _spread(k[r], state), v=v[r], decay=decay[r], beta=beta[r]
        )
        if rows.keep:
            assert s.n <= kept.shape[0], f"{s.n} rows of a verify step, room for {kept.shape[0]}"
            kept[: s.n] = k[r]
            state.v[s.place, : s.n] = v[r]
            state.gates[s.place, : s.n] = torch.stack((decay[r], beta[r]), dim=1)
            after = before
        state.state[s.place] = after
    return out


def replay_delta(state: DeltaState, rows: Rows) -> None:
    """Moves the states on by the kept rows that stand (`n_replay`); the spans' own rows do not matter."""
    for s in rows.spans:
        state.state[s.place] = _replayed(state, s)


def _replayed(state: DeltaState, span: Span) -> Tensor:
    """The state [heads, d_k, d_v] of a span's sequence after the kept rows that stand; a copy when there are any."""
    now, n = state.state[span.place], span.n_replay
    if n:
        k = _spread(state.k[span.place, :n], state)
        decay, beta = state.gates[span.place, :n].unbind(1)
        _, now = delta_rule(now, k, k, v=state.v[span.place, :n], decay=decay, beta=beta)
    return now


def _spread(x: Tensor, state: DeltaState) -> Tensor:
    """The K heads [n, k_heads, d] that the V heads use: [n, v_heads, d]."""
    group = state.v.shape[2] // x.shape[1]
    return x.repeat(1, group, 1) if state.tiled else x.repeat_interleave(group, dim=1)


def conv_step(x: Tensor, kernel: Tensor, *, state: ConvState, rows: Rows, dilation: int = 1) -> Tensor:
    """`causal_conv` over every span behind its sequence's tail, which moves on, or is replayed and kept (`rows.keep`).

    x f32 [n, channels], kernel f32 [channels, k]; the tail has dilation * (k - 1) rows. Returns f32 [n, channels].
    """
    out = torch.empty_like(x)
    for s in rows.spans:
        before = _replayed_tail(state, s)
        window = torch.cat((before, x[s.rows]))
        out[s.rows] = causal_conv(window, kernel, dilation=dilation)
        if rows.keep:
            assert s.n <= state.kept.shape[1], f"{s.n} rows of a verify step, room for {state.kept.shape[1]}"
            state.kept[s.place, : s.n] = x[s.rows]
            state.tail[s.place] = before
        else:
            state.tail[s.place] = window[s.n :]
    return out


def replay_conv(state: ConvState, rows: Rows) -> None:
    """Moves the tails on by the kept rows that stand (`n_replay`); the spans' own rows do not matter."""
    for s in rows.spans:
        state.tail[s.place] = _replayed_tail(state, s)


def _replayed_tail(state: ConvState, span: Span) -> Tensor:
    n = span.n_replay
    return torch.cat((state.tail[span.place], state.kept[span.place, :n]))[n:]
