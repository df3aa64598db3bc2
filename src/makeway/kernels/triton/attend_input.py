"""In front of attention: queries and keys normed and turned, keys and values into their blocks, in one launch.

Owns no memory. Never touches a block for a padding row, whose query is computed all the same.
Hazard: a program has one head of one row, so its norm is the same whatever else is launched.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import KVLayer, Rows
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import normed_and_turned, rope_turns


@quick
@triton.jit(do_not_specialize=["table_stride", "scale", "eps"])
def attend_input_kernel(
    q,
    k,
    v,
    q_gamma,
    k_gamma,
    turns,
    positions,
    row_segment,
    block_tables,
    out,
    key_pool,
    value_pool,
    q_row,
    q_head,
    k_row,
    v_row,
    table_stride,
    scale,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of a row: of q, then of k, then of v."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    i = tl.arange(0, PADDED)
    inside = i < D
    position = tl.load(positions + row)
    segment = tl.load(row_segment + row)
    table = block_tables + tl.maximum(segment, 0).to(tl.int64) * table_stride
    block = tl.load(table + position // BLOCK_TOKENS)
    begin(PDL)
    if head < HEADS:
        at = q + row * q_row + head * q_head
        value = normed_and_turned(at, q_gamma, turns, position, scale, eps, D, PADDED, HALF, 1)
        tl.store(out + (row * HEADS + head) * D + i, value, mask=inside)
    else:
        lives = i < tl.where(segment >= 0, D, 0)
        place = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
        if head < HEADS + KV_HEADS:
            kv_head = head - HEADS
            at = k + row * k_row + kv_head * D
            key = normed_and_turned(at, k_gamma, turns, position, 1.0, eps, D, PADDED, HALF, 1)
            tl.store(key_pool + (place * KV_HEADS + kv_head) * D + i, key.to(key_pool.dtype.element_ty), mask=lives)
        else:
            kv_head = head - HEADS - KV_HEADS
            value = tl.load(v + row * v_row + kv_head * D + i, mask=lives, other=0.0)
            target = value_pool + (place * KV_HEADS + kv_head) * D + i
            tl.store(target, value.to(value_pool.dtype.element_ty), mask=lives)


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
    """`kernels/reference_blocks.py:attend_input`; the values of a head lie side by side, and k's and v's heads too."""
    n, n_heads, d = q.shape
    n_kv = k.shape[1]
    assert k.shape == v.shape == (n, n_kv, d)
    assert kv.keys.shape[2:] == kv.values.shape[2:] == (n_kv, d)
    assert q.stride(2) == k.stride(2) == v.stride(2) == 1
    assert n_kv == 1 or k.stride(1) == v.stride(1) == d
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    assert q_norm.is_contiguous()
    assert k_norm.is_contiguous()
    out = torch.empty((n, n_heads, d), dtype=torch.float32, device=q.device)
    if n == 0:
        return out
    device = rows.on_device
    attend_input_kernel[(n, n_heads + 2 * n_kv)](
        q,
        k,
        v,
        q_norm,
        k_norm,
        rope_turns(q.device, n_rot, theta),
        device.positions,
        device.row_segment,
        device.block_tables,
        out,
        kv.keys,
        kv.values,
        q.stride(0),
        q.stride(1),
        k.stride(0),
        v.stride(0),
        device.block_tables.stride(0),
        d**-0.5,
        eps,
        HEADS=n_heads,
        KV_HEADS=n_kv,
        D=d,
        PADDED=triton.next_power_of_2(d),
        HALF=n_rot // 2,
        BLOCK_TOKENS=kv.block_tokens,
        num_warps=1,
        **overlap(q.device),
    )
    return out
