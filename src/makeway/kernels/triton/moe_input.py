"""Behind the router's matrix: the choice of experts, and beside it what a layer's sum begins with, in one launch.

Owns no memory. Never looks at another row: a row's bits depend on that row alone.
Hazard: a row's choice is one warp's work, so everything in the launch runs in programs of one warp.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.fused import store_parts
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import route_row, sigmoid_of


@quick
@triton.jit
def choice_kernel(
    logits,
    gate,
    up,
    shared_gate,
    ids,
    weights,
    out,
    parts,
    part_stride,
    d,
    gate_row,
    up_row,
    shared_row,
    EXPERTS: tl.constexpr,
    PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARED: tl.constexpr,
    PARTS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Of a row, the choice in the first program; in the others `out`: zeros, or where SHARED silu(gate) * up *
    sigmoid(shared_gate), as PARTS bf16 if there are any."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    if tl.program_id(1) == 0:
        route_row(logits, ids, weights, row, EXPERTS, PADDED, TOP_K, PADDED_K)
    else:
        i = (tl.program_id(1) - 1) * BLOCK + tl.arange(0, BLOCK)
        inside = i < d
        at = row * d + i
        if SHARED:
            value = tl.load(gate + row * gate_row + i, mask=inside, other=0.0)
            value = value * sigmoid_of(value) * tl.load(up + row * up_row + i, mask=inside, other=0.0)
            value = value * sigmoid_of(tl.load(shared_gate + row * shared_row))
            if PARTS > 0:
                store_parts(parts, at, part_stride, value, inside, PARTS)
            else:
                tl.store(out + at, value, mask=inside)
        else:
            tl.store(out + at, tl.zeros([BLOCK], tl.float32), mask=inside)


def choice_and_zeros(logits: Tensor, top_k: int, *, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    """`small.route` of logits f32 [n, experts], and zeros f32 [n, hidden]."""
    out = torch.empty((logits.shape[0], hidden), dtype=torch.float32, device=logits.device)
    return *_launch(logits, top_k, inputs=None, out=out, n_parts=0), out


def choice_and_swiglu(
    logits: Tensor, top_k: int, *, gate: Tensor, up: Tensor, shared_gate: Tensor, n_parts: int
) -> tuple[Tensor, Tensor, Tensor]:
    """`small.route` of logits f32 [n, experts], and silu(gate) * up * sigmoid(shared_gate) of f32 [n, d] and [n, 1],
    rows of any stride: f32 [n, d], or with `n_parts` bf16 [n_parts, n, d]."""
    shape = (n_parts, *gate.shape) if n_parts else gate.shape
    out = torch.empty(shape, dtype=torch.bfloat16 if n_parts else torch.float32, device=gate.device)
    return *_launch(logits, top_k, inputs=(gate, up, shared_gate), out=out, n_parts=n_parts), out


def _launch(
    logits: Tensor, top_k: int, *, inputs: tuple[Tensor, Tensor, Tensor] | None, out: Tensor, n_parts: int
) -> tuple[Tensor, Tensor]:
    logits = logits.contiguous()
    n, n_experts = logits.shape
    d, block = out.shape[-1], 256
    assert 0 < top_k <= n_experts
    ids = torch.empty((n, top_k), dtype=torch.int64, device=logits.device)
    weights = torch.empty((n, top_k), dtype=torch.float32, device=logits.device)
    gate, up, shared_gate = (logits, logits, logits) if inputs is None else inputs
    assert gate.stride(1) == up.stride(1) == 1
    if n:
        choice_kernel[(n, 1 + triton.cdiv(d, block))](
            logits,
            gate,
            up,
            shared_gate,
            ids,
            weights,
            out,
            out,
            n * d,
            d,
            gate.stride(0),
            up.stride(0),
            shared_gate.stride(0),
            EXPERTS=n_experts,
            PADDED=triton.next_power_of_2(n_experts),
            TOP_K=top_k,
            PADDED_K=triton.next_power_of_2(top_k),
            BLOCK=block,
            SHARED=inputs is not None,
            PARTS=n_parts,
            num_warps=1,
            **overlap(logits.device),
        )
    return ids, weights
