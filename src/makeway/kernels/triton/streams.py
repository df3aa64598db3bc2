"""Hyper-connections beside their matrices, in one launch each: streams normed, mixed to one, and combined.

Owns no memory. Never rounds what it passes on: activations for matrices are written as a sum of bf16 parts, as
`linear.split` would make them, beside or instead of their f32 values.
Hazard: with one part (for chunks) activations are rounded to bf16.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.fused import store_parts
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of


@quick
@triton.jit
def stream_norm_kernel(
    h,
    inject,
    added,
    gamma,
    new_h,
    normed,
    parts,
    part_stride,
    eps,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    ADD: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One stream of a row: h + inject * added where ADD, normed over the stream; f32 where WHOLE, and parts."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    n_streams = tl.num_programs(1)
    i = tl.arange(0, PADDED)
    inside = i < D
    at = (row * n_streams + stream) * D + i
    value = tl.load(h + at, mask=inside, other=0.0)
    if ADD:
        factor = tl.load(inject + row * n_streams + stream)
        value += factor * tl.load(added + row * D + i, mask=inside, other=0.0)
        tl.store(new_h + at, value, mask=inside)
    value = value * tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    value = value * tl.load(gamma + stream * D + i, mask=inside, other=0.0)
    if WHOLE:
        tl.store(normed + at, value, mask=inside)
    store_parts(parts, at, part_stride, value, inside, PARTS)


def stream_norm(
    h: Tensor, gamma: Tensor, *, eps: float, n_parts: int, added: tuple[Tensor, Tensor] | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """h f32 [n, streams, hidden] (a new one with `added`: inject, out), each stream normed as f32 [n, streams * hidden]
    and as bf16 [n_parts, n, streams * hidden]; with one part the former is that part, for a chunk's matrices round it
    anyway and bytes are what a chunk's mixer waits for. For the same reason `added` goes into h itself then."""
    h = h.contiguous()
    n, n_streams, hidden = h.shape
    new_h = h if added is None or n_parts == 1 else torch.empty_like(h)
    inject, out = (h, h) if added is None else (added[0].contiguous(), added[1].contiguous())
    parts = torch.empty((n_parts, n, n_streams * hidden), dtype=torch.bfloat16, device=h.device)
    normed = parts[0] if n_parts == 1 else torch.empty(parts.shape[1:], dtype=torch.float32, device=h.device)
    stream_norm_kernel[(n, n_streams)](
        h,
        inject,
        out,
        gamma,
        new_h,
        normed,
        parts,
        normed.numel(),
        eps,
        D=hidden,
        PADDED=triton.next_power_of_2(hidden),
        ADD=added is not None,
        WHOLE=n_parts != 1,
        PARTS=n_parts,
        num_warps=8,
        **overlap(h.device),
    )
    return new_h, normed, parts


@quick
@triton.jit
def combine_kernel(h, inject, out, new_h, D, BLOCK: tl.constexpr, PDL: tl.constexpr):
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    n_streams = tl.num_programs(1)
    i = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    at = (row * n_streams + stream) * D + i
    factor = tl.load(inject + row * n_streams + stream)
    value = tl.load(h + at, mask=inside) + factor * tl.load(out + row * D + i, mask=inside)
    tl.store(new_h + at, value, mask=inside)


def hc_combine(h: Tensor, inject: Tensor, out: Tensor) -> Tensor:
    """`kernels/reference_blocks.py:hc_combine`."""
    h, inject, out = h.contiguous(), inject.contiguous(), out.contiguous()
    n, n_streams, hidden = h.shape
    new_h = torch.empty_like(h)
    if n:
        combine_kernel[(n, n_streams, triton.cdiv(hidden, 1024))](
            h, inject, out, new_h, hidden, BLOCK=1024, num_warps=4, **overlap(h.device)
        )
    return new_h


@quick
@triton.jit
def mix_kernel(
    up,
    normed,
    raw_inject,
    x,
    parts,
    inject,
    part_stride,
    D,
    inject_row,
    N_STREAMS: tl.constexpr,
    PADDED_STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
    INJECT: tl.constexpr,
    WHOLE: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """The mean over streams of sigmoid(up) * normed, f32 where WHOLE, and parts; the inject factors."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = i < D
    total = tl.zeros([BLOCK], tl.float32)
    for s in tl.static_range(N_STREAMS):
        at = (row * N_STREAMS + s) * D + i
        gate = sigmoid_of(tl.load(up + at, mask=inside, other=0.0).to(tl.float32))
        total += gate * tl.load(normed + at, mask=inside, other=0.0)
    total = total / N_STREAMS
    at = row * D + i
    if WHOLE:
        tl.store(x + at, total, mask=inside)
    store_parts(parts, at, part_stride, total, inside, PARTS)
    if INJECT:
        if tl.program_id(1) == 0:
            k = tl.arange(0, PADDED_STREAMS)
            raw = tl.load(raw_inject + row * inject_row + k, mask=k < N_STREAMS, other=0.0)
            tl.store(inject + row * N_STREAMS + k, 2.0 * sigmoid_of(raw / N_STREAMS), mask=k < N_STREAMS)


def mixed(
    up: Tensor, normed: Tensor, raw_inject: Tensor | None, *, n_streams: int, n_parts: int
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The end of `hc_mix`: up and normed, each f32 or bf16 [n, streams * hidden] -> x f32 [n, hidden], its parts,
    inject factors. With one part x is that part, as of `stream_norm`."""
    n, hidden = up.shape[0], up.shape[1] // n_streams
    parts = torch.empty((n_parts, n, hidden), dtype=torch.bfloat16, device=up.device)
    x = parts[0] if n_parts == 1 else torch.empty((n, hidden), dtype=torch.float32, device=up.device)
    inject = None if raw_inject is None else torch.empty((n, n_streams), dtype=torch.float32, device=up.device)
    assert up.is_contiguous()
    assert normed.is_contiguous()
    assert raw_inject is None or raw_inject.stride(1) == 1
    mix_kernel[(n, triton.cdiv(hidden, 256))](
        up,
        normed,
        up if raw_inject is None else raw_inject,
        x,
        parts,
        up if inject is None else inject,
        x.numel(),
        hidden,
        0 if raw_inject is None else raw_inject.stride(0),
        N_STREAMS=n_streams,
        PADDED_STREAMS=triton.next_power_of_2(n_streams),
        BLOCK=256,
        INJECT=inject is not None,
        WHOLE=n_parts != 1,
        PARTS=n_parts,
        num_warps=2,
        **overlap(up.device),
    )
    return x, parts, inject
