"""Gated DeltaNet between its matrices: convolution, norms, delta rule, output norm and gate, three launches in a step.

Owns the order of launches. Never rounds what passes between them in a step; a chunk's q, k and v are rounded to bf16.
Hazard: a verify step takes a fourth launch, which stores the kept rows when all programs have read the old ones.
"""

import torch
from torch import Tensor

from makeway.kernels.rows import ConvState, DeltaState, Rows
from makeway.kernels.triton.chunk_delta import DeltaScratch, chunk_gates
from makeway.kernels.triton.conv import ADVANCE, KEEP, conv_rows
from makeway.kernels.triton.delta import delta_step, keep_rows, run_delta
from makeway.kernels.triton.fused import gated_norm_parts
from makeway.kernels.triton.linear import MAX_ROWS


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
    scratch: DeltaScratch | None,
    n_parts: int,
) -> tuple[Tensor, Tensor]:
    """`kernels/reference_blocks.py:gated_delta`, as f32 [n, v_heads * d_v] and as bf16 [n_parts, n, v_heads * d_v].

    More than MAX_ROWS rows need `scratch`.
    """
    (n_k, d_k), (n_v, d_v), n = state.k.shape[2:], state.v.shape[2:], qkv.shape[0]
    mixed = conv_rows(qkv, conv, conv_state, rows, dilation=1, k_heads=(n_k, d_k))
    width = n_k * d_k
    q, k, v = (
        mixed[:, first:last].unflatten(1, (-1, d))
        for first, last, d in ((0, width, d_k), (width, 2 * width, d_k), (2 * width, mixed.shape[1], d_v))
    )
    if n <= MAX_ROWS:
        out = torch.empty((n, n_v, d_v), dtype=torch.float32, device=qkv.device)
        gates = torch.empty((2, n, n_v), dtype=torch.float32, device=qkv.device)
        alpha, beta = alpha.contiguous(), beta.contiguous()
        mode = KEEP if rows.keep else ADVANCE
        run_delta(q, k, v, alpha, beta, out, state, rows, mode=mode, raw=(a, dt_bias, gates))
        if rows.keep:
            keep_rows(k, v, gates[0], gates[1], state, rows)
    else:
        assert scratch is not None
        decay, beta = chunk_gates(alpha, beta, a=a, dt_bias=dt_bias)
        out = delta_step(q, k, v=v, decay=decay, beta=beta, state=state, rows=rows, scratch=scratch)
    return gated_norm_parts(out, gate, norm, eps=eps, sigmoid_gate=sigmoid_gate, n_parts=n_parts)
