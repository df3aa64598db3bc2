"""What stands between the matrices of a layer, in one launch each: residual and norm, SwiGLU, gates.

Owns no memory. Never rounds what it passes on: activations for matrices are written as a sum of bf16 parts, as
`linear.split` would make them, beside or instead of their f32 values.
Hazard: with one part (for chunks) activations are rounded to bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of

CHUNK_HEADS = 16  # heads of a chunk's row that a program norms and gates


@triton.jit
def store_parts(parts, at, stride, value, mask, PARTS: tl.constexpr):
    """value f32 as PARTS bf16, `stride` apart."""
    for j in tl.static_range(PARTS):
        part = value.to(tl.bfloat16)
        tl.store(parts + at + j * stride, part, mask=mask)
        value = value - part.to(tl.float32)


@quick
@triton.jit
def add_norm_kernel(
    h,
    added,
    gamma,
    new_h,
    x,
    parts,
    part_stride,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """A row: h + added where ADD, and it normed; f32 and parts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, PADDED)
    inside = i < D
    at = row * D + i
    value = tl.load(h + at, mask=inside, other=0.0)
    if ADD:
        value += tl.load(added + at, mask=inside, other=0.0)
        tl.store(new_h + at, value, mask=inside)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    value = value * tl.load(gamma + i, mask=inside, other=0.0)
    tl.store(x + at, value, mask=inside)
    store_parts(parts, at, part_stride, value, inside, PARTS)


def add_norm(
    h: Tensor, added: Tensor | None, *, gamma: Tensor, eps: float, n_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """h f32 [n, d] (a new one with `added` f32 [n, d]), normed by gamma [d] as f32 [n, d] and as bf16 [n_parts, n,
    d]."""
    h = h.contiguous()
    n, d = h.shape
    other = h if added is None else added.contiguous()
    new_h = h if added is None else torch.empty_like(h)
    assert other.shape == h.shape
    assert gamma.shape == (d,)
    assert gamma.is_contiguous()
    x = torch.empty_like(h)
    parts = torch.empty((n_parts, n, d), dtype=torch.bfloat16, device=h.device)
    if n:
        add_norm_kernel[(n,)](
            h,
            other,
            gamma,
            new_h,
            x,
            parts,
            x.numel(),
            eps,
            D=d,
            PADDED=triton.next_power_of_2(d),
            ADD=added is not None,
            PARTS=n_parts,
            num_warps=8 if d > 512 else 1,
            **overlap(h.device),
        )
    return new_h, x, parts


@quick
@triton.jit
def ple_gate_kernel(
    key,
    h,
    value,
    norm_key,
    norm_query,
    norm_conv,
    gated,
    normed,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One stream of a row: gate from the product of normed key and stream; gated value, and it normed."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    i = tl.arange(0, PADDED)
    inside = i < D
    at = (row * tl.num_programs(1) + stream) * D + i
    k = tl.load(key + at, mask=inside, other=0.0)
    q = tl.load(h + at, mask=inside, other=0.0)
    k = k * tl.rsqrt(tl.sum(k * k, 0) / D + eps) * tl.load(norm_key + stream * D + i, mask=inside, other=0.0)
    q = q * tl.rsqrt(tl.sum(q * q, 0) / D + eps) * tl.load(norm_query + stream * D + i, mask=inside, other=0.0)
    dot = tl.sum(k * q, 0) * (1.0 / tl.sqrt(D * 1.0))
    root = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = sigmoid_of(tl.where(dot > 0.0, root, tl.where(dot < 0.0, -root, 0.0)))
    v = gate * tl.load(value + row * D + i, mask=inside, other=0.0)
    tl.store(gated + at, v, mask=inside)
    v = v * tl.rsqrt(tl.sum(v * v, 0) / D + eps) * tl.load(norm_conv + stream * D + i, mask=inside, other=0.0)
    tl.store(normed + at, v, mask=inside)


def ple_gate(
    key: Tensor, h: Tensor, value: Tensor, *, norm_key: Tensor, norm_query: Tensor, norm_conv: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`kernels/reference_blocks.py:ple_gate`."""
    key, h, value = key.contiguous(), h.contiguous(), value.contiguous()
    n, n_streams, hidden = h.shape
    gated = torch.empty_like(h)
    normed = torch.empty((n, n_streams * hidden), dtype=torch.float32, device=h.device)
    ple_gate_kernel[(n, n_streams)](
        key,
        h,
        value,
        norm_key,
        norm_query,
        norm_conv,
        gated,
        normed,
        eps,
        D=hidden,
        PADDED=triton.next_power_of_2(hidden),
        num_warps=8,
        **overlap(h.device),
    )
    return gated, normed


@quick
@triton.jit
def silu_kernel(x, parts, part_stride, scale, x_row, D, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr):
    """silu(x * scale) of a row, as parts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + row * x_row + i, mask=i < D, other=0.0) * scale
    store_parts(parts, row * D + i, part_stride, value * sigmoid_of(value), i < D, PARTS)


def silu_parts(x: Tensor, *, scale: float, n_parts: int) -> Tensor:
    """silu(x * scale) of f32 [n, d], rows of any stride, as bf16 [n_parts, n, d]."""
    n, d = x.shape
    assert x.stride(1) == 1
    parts = torch.empty((n_parts, n, d), dtype=torch.bfloat16, device=x.device)
    silu_kernel[(n, triton.cdiv(d, 512))](
        x, parts, parts[0].numel(), scale, x.stride(0), d, BLOCK=512, PARTS=n_parts, num_warps=4, **overlap(x.device)
    )
    return parts


@quick
@triton.jit
def swiglu_kernel(
    gate, up, parts, part_stride, gate_row, up_row, D, BLOCK: tl.constexpr, PARTS: tl.constexpr, PDL: tl.constexpr
):
    """silu(gate) * up of a row, as parts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    value = tl.load(gate + row * gate_row + i, mask=inside, other=0.0)
    value = value * sigmoid_of(value) * tl.load(up + row * up_row + i, mask=inside, other=0.0)
    store_parts(parts, row * D + i, part_stride, value, inside, PARTS)


def swiglu_parts(gate: Tensor, up: Tensor, *, n_parts: int) -> Tensor:
    """silu(gate) * up, f32 [n, d], rows of any stride: bf16 [n_parts, n, d]."""
    n, d = gate.shape
    assert gate.stride(1) == up.stride(1) == 1
    parts = torch.empty((n_parts, n, d), dtype=torch.bfloat16, device=gate.device)
    swiglu_kernel[(n, triton.cdiv(d, 512))](
        gate,
        up,
        parts,
        n * d,
        gate.stride(0),
        up.stride(0),
        d,
        BLOCK=512,
        PARTS=n_parts,
        num_warps=4,
        **overlap(gate.device),
    )
    return parts


@quick
@triton.jit
def gated_norm_kernel(
    x,
    gate,
    gamma,
    out,
    parts,
    part_stride,
    gate_row,
    n_heads,
    eps,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    SIGMOID: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """HEADS heads of a row: rms norm of x, times sigmoid or silu of the gate, f32 where WHOLE, and parts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    i = tl.arange(0, D)[None, :]
    inside = (head < n_heads) & (i < D)
    at = (row * n_heads + head) * D + i
    value = tl.load(x + at, mask=inside, other=0.0)
    value = value * tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None] * tl.load(gamma + i)
    g = tl.load(gate + row * gate_row + head * D + i, mask=inside, other=0.0)
    factor = sigmoid_of(g)
    if not SIGMOID:
        factor = factor * g
    if WHOLE:
        tl.store(out + at, value * factor, mask=inside)
    store_parts(parts, at, part_stride, value * factor, inside, PARTS)


def gated_norm_parts(
    x: Tensor, gate: Tensor, gamma: Tensor, *, eps: float, sigmoid_gate: bool, n_parts: int
) -> tuple[Tensor, Tensor]:
    """x f32 [n, heads, d] normed by gamma [d], gated by gate f32 [n, heads * d], rows of any stride: f32 [n, heads *
    d] and bf16 [n_parts, n, heads * d]; with one part the former is that part, as of `stream_norm`."""
    n, heads, d = x.shape
    assert x.is_contiguous()
    assert gate.stride(1) == 1
    assert d == triton.next_power_of_2(d)
    parts = torch.empty((n_parts, n, heads * d), dtype=torch.bfloat16, device=x.device)
    out = parts[0] if n_parts == 1 else torch.empty((n, heads * d), dtype=torch.float32, device=x.device)
    # A step has few rows and wants many programs, a chunk has many and wants programs that move kilobytes each.
    n_together = 1 if n <= MAX_ROWS else min(CHUNK_HEADS, triton.next_power_of_2(heads))
    gated_norm_kernel[(n, triton.cdiv(heads, n_together))](
        x,
        gate,
        gamma,
        out,
        parts,
        x.numel(),
        gate.stride(0),
        heads,
        eps,
        D=d,
        HEADS=n_together,
        SIGMOID=sigmoid_gate,
        WHOLE=n_parts != 1,
        PARTS=n_parts,
        num_warps=1 if n_together == 1 else 4,
        **overlap(x.device),
    )
    return out, parts
