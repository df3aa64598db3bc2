"""Small row-wise kernels: norms with rope, activations, the router's choice.

Owns no memory. Never looks at another row: a row's bits depend on that row alone.
Hazard: rope's angles are f64 products of position and frequency; only their remainder modulo a turn is rounded to f32.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick

SIGMOID, SILU, SOFTPLUS, SWIGLU = 0, 1, 2, 3  # codes of `pointwise`


@cache
def rope_turns(device: torch.device, n_rot: int, theta: float) -> Tensor:
    """f64 [n_rot / 2]: turns (angle / 2 pi) a position adds to each pair: theta^(-2 i / n_rot) / (2 pi)."""
    exponents = torch.arange(n_rot // 2, dtype=torch.float64) * (-2.0 / n_rot)
    return (torch.pow(torch.tensor(theta, dtype=torch.float64), exponents) / (2.0 * torch.pi)).to(device)


@triton.jit
def sigmoid_of(x):
    return 1.0 / (1.0 + tl.exp(tl.minimum(-x, 88.0)))  # nothing is left of it beyond


@triton.jit
def softplus_of(x):
    """log(1 + exp(x)), x itself above 20."""
    small = tl.exp(tl.minimum(x, 20.0))
    one_more = 1.0 + small
    # log1p: what `one_more` rounded away of `small` is put back in proportion
    lost = tl.where(one_more == 1.0, small, tl.log(one_more) * (small / tl.where(one_more == 1.0, 1.0, one_more - 1.0)))
    return tl.where(x > 20.0, x, lost)


@triton.jit
def cos_sin(position, turns):
    """Cosine and sine f32 of position (int) * turns (f64) whole turns."""
    turn = position.to(tl.float64) * turns
    angle = ((turn - tl.floor(turn + 0.5)) * 6.283185307179586).to(tl.float32)
    return tl.cos(angle), tl.sin(angle)


@triton.jit
def normed_and_turned(
    x, gamma, turns, position, scale, eps, D: tl.constexpr, PADDED: tl.constexpr, HALF: tl.constexpr, MODE: tl.constexpr
):
    """One row of D values at pointer x: normed (MODE 1: rms with gamma; 2: l2; 0: not), its first 2 HALF values turned
    by the position, scaled. f32 [PADDED], zero behind D."""
    i = tl.arange(0, PADDED)
    inside = i < D
    value = tl.load(x + i, mask=inside, other=0.0)
    factor = 1.0
    if MODE == 1:
        factor = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    if MODE == 2:
        factor = tl.rsqrt(tl.sum(value * value, 0) + eps)
    value = value * factor
    if MODE == 1:
        value = value * tl.load(gamma + i, mask=inside, other=0.0)
    if HALF > 0:
        turned = i < 2 * HALF
        first = i < HALF
        partner = tl.where(first, i + HALF, i - HALF)
        other = tl.load(x + partner, mask=turned, other=0.0) * factor
        if MODE == 1:
            other = other * tl.load(gamma + partner, mask=turned, other=0.0)
        c, s = cos_sin(position, tl.load(turns + tl.where(first, i, i - HALF), mask=turned, other=0.0))
        value = tl.where(turned, value * c + tl.where(first, -other, other) * s, value)
    return value * scale


@quick
@triton.jit(do_not_specialize=["scale", "eps"])
def norm_kernel(
    x,
    gamma,
    positions,
    turns,
    out,
    x_row,
    x_head,
    gamma_stride,
    scale,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    MODE: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row and head: out [n, heads, D] contiguous."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    position = 0
    if HALF > 0:
        position = tl.load(positions + row)
    value = normed_and_turned(
        x + row * x_row + head * x_head, gamma + head * gamma_stride, turns, position, scale, eps, D, PADDED, HALF, MODE
    )
    i = tl.arange(0, PADDED)
    tl.store(out + (row * tl.num_programs(1) + head) * D + i, value, mask=i < D)


def _norm(
    x: Tensor, gamma: Tensor, *, mode: int, eps: float, turns: Tensor, positions: Tensor, half: int, scale: float
) -> Tensor:
    shape = x.shape
    rows = x if x.dim() == 3 else x.reshape(-1, 1, shape[-1])
    if rows.stride(2) != 1:
        rows = rows.contiguous()
    n, heads, d = rows.shape
    out = torch.empty(shape, dtype=torch.float32, device=x.device)
    if out.numel() == 0:
        return out
    norm_kernel[(n, heads)](
        rows,
        gamma,
        positions,
        turns,
        out,
        rows.stride(0),
        rows.stride(1),
        d if gamma.dim() == 2 else 0,
        scale,
        eps,
        D=d,
        PADDED=triton.next_power_of_2(d),
        HALF=half,
        MODE=mode,
        num_warps=4 if d > 512 else 1,
        **overlap(x.device),
    )
    return out


def rms_norm(x: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x f32 [..., d], gamma [d] or, for x [n, heads, d], [heads, d]."""
    assert gamma.is_contiguous()
    assert gamma.shape in (x.shape[-1:], x.shape[-2:])
    return _norm(x, gamma, mode=1, eps=eps, turns=x, positions=x, half=0, scale=1.0)


def l2_norm(x: Tensor) -> Tensor:
    """x f32 [..., d] * rsqrt(sum of squares + 1e-6)."""
    return _norm(x, x, mode=2, eps=1e-6, turns=x, positions=x, half=0, scale=1.0)


def rope(x: Tensor, positions: Tensor, *, n_rot: int, theta: float) -> Tensor:
    """x f32 [n, heads, d], positions int64 [n]."""
    turns = rope_turns(x.device, n_rot, theta)
    return _norm(x, x, mode=0, eps=0.0, turns=turns, positions=positions, half=n_rot // 2, scale=1.0)


def norm_rope(
    x: Tensor, gamma: Tensor, *, positions: Tensor, eps: float, n_rot: int, theta: float, scale: float = 1.0
) -> Tensor:
    """rope(rms_norm(x)) * scale in one launch; x f32 [n, heads, d], heads may be strided."""
    turns = rope_turns(x.device, n_rot, theta)
    return _norm(x, gamma, mode=1, eps=eps, turns=turns, positions=positions, half=n_rot // 2, scale=scale)


@quick
@triton.jit(do_not_specialize=["n"])
def pointwise_kernel(x, y, out, n, FUNCTION: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """out = a function of x, and of y for SWIGLU."""
    begin(PDL)
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + i, mask=i < n)
    if FUNCTION == 0:
        value = sigmoid_of(value)
    elif FUNCTION == 1:
        value = value * sigmoid_of(value)
    elif FUNCTION == 2:
        value = softplus_of(value)
    else:
        value = value * sigmoid_of(value) * tl.load(y + i, mask=i < n)
    tl.store(out + i, value, mask=i < n)


def pointwise(function: int, x: Tensor, y: Tensor | None = None) -> Tensor:
    """SIGMOID, SILU, SOFTPLUS of x f32, or SWIGLU: silu(x) * y."""
    x = x.contiguous()
    y = x if y is None else y.contiguous()
    assert y.shape == x.shape
    out = torch.empty_like(x)
    if x.numel():
        pointwise_kernel[(triton.cdiv(x.numel(), 1024),)](
            x, y, out, x.numel(), FUNCTION=function, BLOCK=1024, num_warps=4, **overlap(x.device)
        )
    return out


@triton.jit
def route_row(
    logits, ids, weights, row, EXPERTS: tl.constexpr, PADDED: tl.constexpr, TOP_K: tl.constexpr, PADDED_K: tl.constexpr
):
    """One row: softmax, TOP_K times the largest that is left (the lowest id among equals), renormalised."""
    i = tl.arange(0, PADDED)
    logit = tl.load(logits + row * EXPERTS + i, mask=i < EXPERTS, other=-float("inf"))
    shifted = tl.exp(logit - tl.max(logit, 0))
    left = tl.where(i < EXPERTS, shifted / tl.sum(shifted, 0), -1.0)
    left = tl.where(left == left, left, 0.0)  # logits that are no numbers still name different experts that exist
    k = tl.arange(0, PADDED_K)
    chosen = tl.zeros([PADDED_K], tl.int32)
    values = tl.zeros([PADDED_K], tl.float32)
    for j in tl.static_range(TOP_K):
        best = tl.max(left, 0)
        at = tl.min(tl.where(left == best, i, PADDED), 0)
        chosen = tl.where(k == j, at, chosen)
        values = tl.where(k == j, best, values)
        left = tl.where(i == at, -1.0, left)
    total = tl.sum(values, 0)
    tl.store(ids + row * TOP_K + k, chosen.to(tl.int64), mask=k < TOP_K)
    tl.store(weights + row * TOP_K + k, values / total, mask=k < TOP_K)


@quick
@triton.jit
def route_kernel(
    logits,
    ids,
    weights,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    route_row(logits, ids, weights, tl.program_id(0).to(tl.int64), EXPERTS, PADDED, TOP_K, PADDED_K)


def route(logits: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """`kernels/reference.py:route`: ids int64 [n, top_k], best first, weights f32 [n, top_k]."""
    logits = logits.contiguous()
    n, n_experts = logits.shape
    assert 0 < top_k <= n_experts
    ids = torch.empty((n, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((n, top_k), dtype=torch.float32, device=logits.device)
    if n:
        route_kernel[(n,)](
            logits,
            ids,
            weights,
            EXPERTS=n_experts,
            PADDED=triton.next_power_of_2(n_experts),
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            num_warps=1,
            **overlap(logits.device),
        )
    return ids, weights
