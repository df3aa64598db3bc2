"""The layers of qwen4exp for training: whole sequences, vectorised, differentiable; float32 or bfloat16.

Owns no weights: every function gets a dict with the layer's tensors by their GGUF names without `blk.N.`.
Hazard: what is called under torch.compile must not depend on Python values that change from step to step.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo_model.shape import Shape

Weights = dict[str, Tensor]


def linear(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w.to(x.dtype))


def norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * gamma).to(x.dtype)


def rope(x: Tensor, positions: Tensor, s: Shape) -> Tensor:
    """x [b, t, heads, dim], positions [t]: half-split rotation of the first n_rot dims."""
    half = s.n_rot // 2
    freq = s.theta ** (-torch.arange(half, device=x.device, dtype=torch.float32) / half)
    angle = positions[:, None].float() * freq
    cos, sin = angle.cos()[None, :, None], angle.sin()[None, :, None]
    a, b, rest = x[..., :half].float(), x[..., half : s.n_rot].float(), x[..., s.n_rot :]
    return torch.cat(((a * cos - b * sin).to(x.dtype), (b * cos + a * sin).to(x.dtype), rest), dim=-1)


def mix(w: Weights, prefix: str, h: Tensor, s: Shape) -> tuple[Tensor, Tensor | None]:
    """h [b, t, streams, hidden] -> the block's input [b, t, hidden] and the inject factors [b, t, streams]."""
    normed = norm(h, w[prefix + "norm.weight"].view(s.n_streams, s.hidden), s.eps)
    flat = normed.flatten(-2)
    low = F.silu(linear(flat, w[prefix + "down.weight"]) / s.n_streams)
    x = (torch.sigmoid(linear(low, w[prefix + "up.weight"])).view_as(normed) * normed).mean(-2)
    if prefix + "inject.weight" not in w:
        return x, None
    return x, 2 * torch.sigmoid(linear(flat, w[prefix + "inject.weight"]) / s.n_streams)


def causal_conv(x: Tensor, w: Tensor, dilation: int = 1) -> Tensor:
    """Depthwise; x [b, t, channels], w [channels, taps]."""
    taps, t = w.shape[1], x.shape[1]
    padded = F.pad(x, (0, 0, (taps - 1) * dilation, 0))
    total = torch.zeros_like(x, dtype=torch.float32)
    for j in range(taps):
        total = total + padded[:, j * dilation : j * dilation + t].float() * w[:, j]
    return F.silu(total).to(x.dtype)


def delta_before(w: Weights, h: Tensor, s: Shape) -> tuple[Tensor, ...]:
    """Mixer and projections: q, k, v [b, t, v_heads, dim], decay (log) and beta [b, t, v_heads], gate, inject."""
    x, inject = mix(w, "hc_attn_", h, s)
    b, t, _ = x.shape
    qkv = causal_conv(linear(x, w["attn_qkv.weight"]), w["ssm_conv1d.weight"])
    keys, d = s.k_heads * s.delta_dim, s.delta_dim
    q, k, v = qkv.split((keys, keys, s.v_heads * d), dim=-1)
    q, k = (part.reshape(b, t, s.k_heads, d).repeat(1, 1, s.v_heads // s.k_heads, 1) for part in (q, k))
    step = F.softplus(linear(x, w["ssm_alpha.weight"]).float() + w["ssm_dt.bias"])
    decay = -torch.exp(w["ssm_a"]) * step
    beta = torch.sigmoid(linear(x, w["ssm_beta.weight"]).float())
    gate = linear(x, w["attn_gate.weight"])
    assert inject is not None
    return q, k, v.reshape(b, t, s.v_heads, d), decay, beta.to(x.dtype), gate, inject


def delta_after(w: Weights, h: Tensor, out: Tensor, gate: Tensor, inject: Tensor, s: Shape) -> Tensor:
    normed = norm(out, w["ssm_norm.weight"], s.eps).flatten(-2)
    y = linear((normed.float() * torch.sigmoid(gate.float())).to(h.dtype), w["ssm_out.weight"])
    return h + inject[..., None] * y[..., None, :]


def delta_rule(q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, chunk: int = 64) -> Tensor:
    """The gated delta rule in chunks, plain torch, float32, on CPU and GPU."""
    dtype, t = q.dtype, q.shape[1]
    pad = -t % chunk

    def chunks(x: Tensor) -> Tensor:  # [b, t, heads, ...] -> [b, heads, n, chunk, ...]
        x = F.pad(x.float(), (0, 0) * (x.dim() - 2) + (0, pad)).transpose(1, 2)
        return x.unflatten(2, (-1, chunk))

    q = q.float() * torch.rsqrt(q.float().pow(2).sum(-1, keepdim=True) + 1e-6) * q.shape[-1] ** -0.5
    k = k.float() * torch.rsqrt(k.float().pow(2).sum(-1, keepdim=True) + 1e-6)
    q, k, v, decay, beta = chunks(q), chunks(k), chunks(v), chunks(decay), chunks(beta)
    total = decay.cumsum(-1)
    later = torch.ones(chunk, chunk, dtype=torch.bool, device=q.device).triu(1)
    fade = (total[..., :, None] - total[..., None, :]).masked_fill(later, float("-inf")).exp()
    kb = k * beta[..., None]
    system = (kb @ k.mT * fade).tril(-1) + torch.eye(chunk, device=q.device)
    values = torch.linalg.solve_triangular(system, v * beta[..., None], upper=False, unitriangular=True)
    reads = torch.linalg.solve_triangular(system, kb * total.exp()[..., None], upper=False, unitriangular=True)
    inner = (q @ k.mT) * fade
    q = q * total.exp()[..., None]
    k = k * (total[..., -1:] - total).exp()[..., None]
    last = total[..., -1].exp()[..., None, None]
    state = torch.zeros(*q.shape[:2], q.shape[-1], v.shape[-1], device=q.device).flatten(0, 1)
    keys, last = k.mT.flatten(0, 1).unbind(1), last.flatten(0, 1).unbind(1)
    reads, values = reads.flatten(0, 1).unbind(1), values.flatten(0, 1).unbind(1)
    states, news = [], []
    for n in range(q.shape[2]):
        new = torch.baddbmm(values[n], reads[n], state, alpha=-1)
        states.append(state)
        news.append(new)
        state = torch.baddbmm(state * last[n], keys[n], new)
    grid = q.shape[:2]
    out = q @ torch.stack(states, 1).unflatten(0, grid) + inner @ torch.stack(news, 1).unflatten(0, grid)
    return out.flatten(2, 3)[:, :, :t].transpose(1, 2).to(dtype)


def attention_before(w: Weights, h: Tensor, s: Shape) -> tuple[Tensor, ...]:
    """Mixer and projections: x, q [b, heads, t, dim], k and v [b, kv, t, dim], gate, inject."""
    x, inject = mix(w, "hc_attn_", h, s)
    b, t, _ = x.shape
    pos = torch.arange(t, device=x.device)
    q, gate = linear(x, w["attn_q.weight"]).view(b, t, s.n_heads, 2, s.head_dim).unbind(3)
    q = rope(norm(q, w["attn_q_norm.weight"], s.eps), pos, s)
    k = linear(x, w["attn_k.weight"]).view(b, t, s.n_kv, s.head_dim)
    k = rope(norm(k, w["attn_k_norm.weight"], s.eps), pos, s)
    v = linear(x, w["attn_v.weight"]).view(b, t, s.n_kv, s.head_dim)
    group = s.n_heads // s.n_kv
    k, v = (part.transpose(1, 2).repeat_interleave(group, dim=1) for part in (k, v))
    assert inject is not None
    return x, q.transpose(1, 2), k, v, gate.flatten(-2), inject


def attention_after(w: Weights, h: Tensor, out: Tensor, gate: Tensor, inject: Tensor) -> Tensor:
    y = out.transpose(1, 2).flatten(-2)
    y = linear((y.float() * torch.sigmoid(gate.float())).to(h.dtype), w["attn_output.weight"])
    return h + inject[..., None] * y[..., None, :]


def pooled_keys(w: Weights, x: Tensor, s: Shape) -> Tensor:
    """[b, blocks, dim]: mean of a complete block's raw keys, normed, roped at the block's first position."""
    b, n = x.shape[0], x.shape[1] // s.ratio
    raw = linear(x[:, : n * s.ratio], w["indexer.k_proj.weight"])
    pooled = raw.view(b, n, s.ratio, s.index_dim).float().mean(2).to(x.dtype)
    pooled = norm(pooled, w["indexer.k_norm.weight"], s.eps)
    starts = torch.arange(n, device=x.device) * s.ratio
    return rope(pooled[:, :, None], starts, s)[:, :, 0]


def block_scores(w: Weights, x: Tensor, positions: Tensor, keys: Tensor, s: Shape) -> Tensor:
    """Indexer scores f32 [b, queries, blocks]; incomplete or later blocks are not masked here."""
    b, n, _ = x.shape
    q = norm(
        linear(x, w["indexer.q_proj.weight"]).view(b, n, s.index_heads, s.index_dim), w["indexer.q_norm.weight"], s.eps
    )
    q = rope(q, positions, s)
    total = torch.zeros(b, n, keys.shape[1], device=x.device)
    for i in range(s.index_heads):
        total = total + torch.relu((q[:, :, i] @ keys.mT).float())
    return total * s.index_dim**-0.5


def selection(w: Weights, x: Tensor, s: Shape) -> Tensor:
    """Bool [b, t, t]: which keys each query may see (causal included)."""
    b, t, _ = x.shape
    pos = torch.arange(t, device=x.device)
    keys = pooled_keys(w, x, s)
    n = keys.shape[1]
    complete = torch.arange(n, device=x.device) < ((pos + 1) // s.ratio)[:, None]
    scores = block_scores(w, x, pos, keys, s).masked_fill(~complete, float("-inf"))
    best = scores.topk(min(s.n_select, n), dim=-1, sorted=False).indices
    chosen = torch.zeros(b, t, n, dtype=torch.bool, device=x.device).scatter(-1, best, True) & complete
    seen = F.pad(chosen.repeat_interleave(s.ratio, dim=-1), (0, t - n * s.ratio))
    tail = (pos >= ((pos + 1) // s.ratio * s.ratio)[:, None]) & (pos <= pos[:, None])
    return seen | tail


def indexer_loss(w: Weights, x: Tensor, q: Tensor, k: Tensor, positions: Tensor, s: Shape) -> Tensor:
    """KL of the indexer's block distribution from the attention's, block-summed, at some query positions."""
    n = x.shape[1] // s.ratio
    with torch.no_grad():
        logits = (q[:, :, positions] @ k.mT).float() * s.head_dim**-0.5
        later = torch.arange(x.shape[1], device=x.device) > positions[:, None]
        target = logits.masked_fill(later, float("-inf")).softmax(-1).sum(1)
        target = target[..., : n * s.ratio].unflatten(-1, (n, s.ratio)).sum(-1)
        complete = torch.arange(n, device=x.device) < ((positions + 1) // s.ratio)[:, None]
        target = target * complete
        target = target / target.sum(-1, keepdim=True).clamp(min=1e-9)
    scores = block_scores(w, x[:, positions], positions, pooled_keys(w, x, s), s)
    logp = scores.masked_fill(~complete, -1e30).log_softmax(-1)
    return (target * (target.clamp(min=1e-9).log() - logp)).sum(-1).mean()


def attend(w: Weights, x: Tensor, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, s: Shape, *, sparse: bool):
    """Attention's output [b, heads, t, dim] and the indexer's loss (zero where there are no query positions)."""
    x = x.detach()
    loss = indexer_loss(w, x, q.detach(), k.detach(), positions, s) if positions.numel() else x.new_zeros(())
    if sparse and x.shape[1] // s.ratio > s.n_select:
        with torch.no_grad():
            allowed = selection(w, x, s)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed[:, None]), loss
    return F.scaled_dot_product_attention(q, k, v, is_causal=True), loss


def moe(w: Weights, h: Tensor, s: Shape) -> tuple[Tensor, Tensor, Tensor]:
    """Mixer, router, experts: new h, balance loss, tokens per expert. All experts are computed, the chosen counted:
    at this size one wide product is faster than sorting tokens, and the sum is the same."""
    x, inject = mix(w, "hc_ffn_", h, s)
    probs = F.linear(x.float(), w["ffn_gate_inp.weight"]).softmax(-1)
    best, ids = probs.topk(s.top_k, dim=-1)
    share = torch.zeros_like(probs).scatter(-1, ids, best / best.sum(-1, keepdim=True))
    used = (share > 0).float().mean((0, 1))
    balance = s.n_experts * (used / s.top_k * probs.mean((0, 1))).sum()
    a = linear(x, w["ffn_gate_exps.weight"].flatten(0, 1))
    b = linear(x, w["ffn_up_exps.weight"].flatten(0, 1))
    act = (F.silu(a.float()) * b.float()).unflatten(-1, (s.n_experts, s.expert_ff)) * share[..., None]
    down = w["ffn_down_exps.weight"].permute(1, 0, 2).flatten(1)
    y = linear(act.flatten(-2).to(h.dtype), down)
    a, b = linear(x, w["ffn_gate_shexp.weight"]), linear(x, w["ffn_up_shexp.weight"])
    shared = linear((F.silu(a.float()) * b.float()).to(h.dtype), w["ffn_down_shexp.weight"])
    y = y + torch.sigmoid(linear(x, w["ffn_gate_inp_shexp.weight"])) * shared
    assert inject is not None
    return h + inject[..., None] * y[..., None, :], balance, used


def ngram_rows(tokens: Tensor, s: Shape) -> Tensor:
    """Rows of the n-gram table, int64 [b, t, heads]; EOS cuts the window."""
    mixed = tokens * s.multipliers[0]
    cut = torch.zeros_like(tokens, dtype=torch.bool)
    columns = []
    for back in range(1, s.ngram):
        previous = F.pad(tokens, (back, 0), value=s.eos)[:, : tokens.shape[1]]
        cut = cut | (previous == s.eos)
        mixed = mixed ^ (torch.where(cut, s.eos, previous) * s.multipliers[back])
        for i in range((back - 1) * s.heads_per_ngram, back * s.heads_per_ngram):
            columns += [mixed % s.head_sizes[i] + s.head_offsets[i]]
    return torch.stack(columns, dim=-1)


def ple(w: Weights, h: Tensor, embedded: Tensor, s: Shape) -> Tensor:
    """h plus the n-gram embeddings [b, t, heads * row], gated into every stream."""
    grid = (s.n_streams, s.hidden)
    key = norm(linear(embedded, w["ple_key.weight"]).unflatten(-1, grid), w["ple_norm_key.weight"].view(grid), s.eps)
    query = norm(h, w["ple_norm_query.weight"].view(grid), s.eps)
    dot = (key.float() * query.float()).sum(-1) * s.hidden**-0.5
    gate = torch.sigmoid(torch.sign(dot) * torch.sqrt(dot.abs().clamp(min=1e-6)))
    gated = gate[..., None].to(h.dtype) * linear(embedded, w["ple_value.weight"])[..., None, :]
    normed = norm(gated, w["ple_norm_conv.weight"].view(grid), s.eps).flatten(-2)
    return h + gated + causal_conv(normed, w["ple_conv1d.weight"], s.ngram).view_as(gated)
