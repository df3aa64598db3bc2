"""The gated delta rule for chunks of a prompt: many tokens at once, the recurrent state in and out.

Owns no memory: scratch comes from the caller and bounds how many tokens are prepared at a time. Never reads ahead.
Hazard: matrix products run on bf16 operands with f32 sums; only the state itself stays f32 from chunk to chunk.
Source: Yang et al., Gated Delta Networks, section 3.3 (the WY form), with their Gamma as differences of log-decay sums.

A chunk is CHUNK tokens. With c the running sum of log decay inside the chunk, S the state before it:
    A[i, j] = beta_i (k_i . k_j) exp(c_i - c_j), i > j          T = (I + A)^-1
    u = T (beta v)                 w = T (beta exp(c) k)         change = u - w S
    o = exp(c) (q S) + tril((q k^T) exp(c_i - c_j)) change       S' = exp(c_last) S + k^T (exp(c_last - c) change)
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of, softplus_of

CHUNK = 64
BLOCK_V = 64  # columns of the state in one program
GATE_ROWS = 32  # rows in one program of `chunk_gates`
LEAST_DECAY = 1e-35  # nothing beside any state, and its logarithm is finite


@dataclass(frozen=True)
class DeltaScratch:
    """What `delta_rule_chunks` needs for `capacity` tokens (a multiple of CHUNK) at a time.

    change, recall bf16 [capacity, heads, d_v] and [capacity, heads, d_k] (u and w above); attend bf16
    [capacity / CHUNK, heads, CHUNK, CHUNK]; sums f32 [capacity, heads] (c above).
    """

    change: Tensor
    recall: Tensor
    attend: Tensor
    sums: Tensor

    @staticmethod
    def nbytes(capacity: int, n_heads: int, *, d_k: int, d_v: int) -> int:
        """Bytes of scratch for `capacity` tokens; each part is a multiple of 256 bytes where heads * 64 is."""
        return capacity * n_heads * (2 * (d_k + d_v + CHUNK) + 4)

    @staticmethod
    def of(room: Tensor, n_heads: int, *, d_k: int, d_v: int) -> "DeltaScratch":
        """Carve as many tokens as fit out of `room`, u8 and 16-byte aligned."""
        capacity = room.numel() // DeltaScratch.nbytes(1, n_heads, d_k=d_k, d_v=d_v) // CHUNK * CHUNK
        assert capacity > 0
        at, parts = 0, []
        for shape, dtype in (
            ((capacity, n_heads, d_v), torch.bfloat16),
            ((capacity, n_heads, d_k), torch.bfloat16),
            ((capacity // CHUNK, n_heads, CHUNK, CHUNK), torch.bfloat16),
            ((capacity, n_heads), torch.float32),
        ):
            n_bytes = torch.Size(shape).numel() * dtype.itemsize
            parts.append(room[at : at + n_bytes].view(dtype).view(shape))
            at += n_bytes
        return DeltaScratch(parts[0], parts[1], parts[2], parts[3])


def delta_rule_chunks(
    state: Tensor,
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    out: Tensor,
    scratch: DeltaScratch,
    tiled: bool = False,
) -> None:
    """`kernels/reference.py:delta_rule` for one sequence; the state is changed in place, o goes to `out`.

    state f32 [heads, d_k, d_v]; q, k bf16 [n, k_heads, d_k], v bf16 [n, heads, d_v] (rows may be strided, a row itself
    is contiguous); decay, beta f32 [n, heads]; out bf16 or f32 [n, heads, d_v]. Value head h uses key head h mod
    k_heads when `tiled`, else h div (heads / k_heads). Cutting n at multiples of CHUNK does not change bits.
    """
    n, n_k_heads, d_k = q.shape
    n_heads, d_v = v.shape[1:]
    assert state.shape == (n_heads, d_k, d_v)
    assert state.is_contiguous()
    assert state.dtype == torch.float32
    assert n_heads % n_k_heads == 0
    assert q.stride() == k.stride()
    assert all(t.stride(2) == 1 and t.stride(1) == t.shape[2] for t in (q, k, v))
    assert all(t.is_contiguous() for t in (decay, beta, out))
    capacity = scratch.change.shape[0]
    block_v = min(d_v, BLOCK_V)
    group = 0 if tiled else n_heads // n_k_heads
    for first in range(0, n, capacity):
        rows = slice(first, min(first + capacity, n))
        n_rows = rows.stop - first
        common = (q[rows], k[rows], v[rows], decay[rows], beta[rows], scratch.change, scratch.recall, scratch.attend)
        prepare_kernel[(triton.cdiv(n_rows, CHUNK), n_heads)](
            *common,
            scratch.sums,
            n_rows,
            q.stride(0),
            v.stride(0),
            n_heads,
            n_k_heads,
            LEAST=LEAST_DECAY,
            GROUP=group,
            D_K=d_k,
            D_V=d_v,
            CHUNK=CHUNK,
            num_warps=4,
            num_stages=1,
        )
        advance_kernel[(triton.cdiv(d_v, block_v), n_heads)](
            state,
            q[rows],
            k[rows],
            scratch.change,
            scratch.recall,
            scratch.attend,
            scratch.sums,
            out[rows],
            n_rows,
            q.stride(0),
            n_heads,
            n_k_heads,
            GROUP=group,
            D_K=d_k,
            D_V=d_v,
            BLOCK_V=block_v,
            CHUNK=CHUNK,
            num_warps=4,
            num_stages=2,
        )


@quick
@triton.jit(do_not_specialize=["n"])
def gates_kernel(
    alpha,
    beta,
    a,
    dt_bias,
    decay_out,
    beta_out,
    alpha_row,
    beta_row,
    n,
    n_heads,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decay and beta of some rows."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    head = tl.arange(0, HEADS)[None, :]
    inside = (rows < n) & (head < n_heads)
    step = softplus_of(
        tl.load(alpha + rows * alpha_row + head, mask=inside, other=0.0)
        + tl.load(dt_bias + head, mask=head < n_heads, other=0.0)
    )
    decay = tl.exp(tl.load(a + head, mask=head < n_heads, other=0.0) * step)
    tl.store(decay_out + rows * n_heads + head, decay, mask=inside)
    logit = tl.load(beta + rows * beta_row + head, mask=inside, other=0.0)
    tl.store(beta_out + rows * n_heads + head, sigmoid_of(logit), mask=inside)


def chunk_gates(alpha: Tensor, beta: Tensor, *, a: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Decay and beta f32 [n, heads] of a chunk: exp(a softplus(alpha + dt_bias)) and sigmoid(beta); alpha and beta f32
    [n, heads], rows of any stride."""
    n, n_heads = alpha.shape
    assert alpha.stride(1) == beta.stride(1) == 1
    assert a.is_contiguous()
    assert dt_bias.is_contiguous()
    decay_out, beta_out = (torch.empty((n, n_heads), dtype=torch.float32, device=alpha.device) for _ in range(2))
    gates_kernel[(triton.cdiv(n, GATE_ROWS),)](
        alpha,
        beta,
        a,
        dt_bias,
        decay_out,
        beta_out,
        alpha.stride(0),
        beta.stride(0),
        n,
        n_heads,
        HEADS=triton.next_power_of_2(n_heads),
        ROWS=GATE_ROWS,
        num_warps=4,
    )
    return decay_out, beta_out


@triton.jit
def unit_lower_inverse(a, CHUNK: tl.constexpr):
    """(I + a)^-1 for a strictly lower triangular f32 [CHUNK, CHUNK], CHUNK = 64.

    Forward substitution inside the four diagonal blocks of 16 (all at once), D their inverse; then with N = D L, L the
    blocks below the diagonal, N^4 = 0 and the inverse is (I - N)(I + N^2) D. Powers are taken of N only: powers of
    `a` itself lose all digits when keys repeat.
    """
    N_BLOCKS: tl.constexpr = CHUNK // 16
    blocks = tl.arange(0, N_BLOCKS)
    on_diagonal = blocks[:, None, None, None] == blocks[None, None, :, None]
    parts = tl.reshape(a, (N_BLOCKS, 16, N_BLOCKS, 16))
    inverse = -tl.sum(tl.where(on_diagonal, parts, 0.0), axis=2)  # [N_BLOCKS, 16, 16]
    rows = tl.arange(0, 16)
    for i in range(1, 16):
        here = (rows == i)[None, :, None]
        row = tl.sum(tl.where(here, inverse, 0.0), axis=1)  # [N_BLOCKS, 16]
        row += tl.sum(row[:, :, None] * inverse, axis=1)
        inverse = tl.where(here, row[:, None, :], inverse)
    inverse += (rows[:, None] == rows[None, :])[None, :, :].to(tl.float32)
    diagonal = tl.where(on_diagonal, inverse[:, :, None, :], 0.0)
    diagonal = tl.reshape(diagonal, (CHUNK, CHUNK))
    below = tl.reshape(tl.where(on_diagonal, 0.0, parts), (CHUNK, CHUNK))
    step = tl.dot(diagonal, below, input_precision="tf32x3")
    places = tl.arange(0, CHUNK)
    identity = (places[:, None] == places[None, :]).to(tl.float32)
    twice = tl.dot(step, step, input_precision="tf32x3")
    series = tl.dot(identity - step, identity + twice, input_precision="tf32x3")
    return tl.dot(series, diagonal, input_precision="tf32x3")


@quick
@triton.jit(do_not_specialize=["n"])
def prepare_kernel(
    q,
    k,
    v,
    decay,
    beta,
    change,
    recall,
    attend,
    sums,
    n,
    qk_stride,
    v_stride,
    n_heads,
    n_k_heads,
    LEAST: tl.constexpr,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """u, w, the masked q k^T and the sums of log decay of one chunk and head. Rows past n change nothing later:
    their decay is 1 and their k, v and beta are 0."""
    chunk = tl.program_id(0)
    head = tl.program_id(1)
    k_head = head % n_k_heads if GROUP == 0 else head // GROUP
    rows = chunk * CHUNK + tl.arange(0, CHUNK)
    inside = rows < n
    at = rows.to(tl.int64)
    columns_k = tl.arange(0, D_K)
    columns_v = tl.arange(0, D_V)

    fall = tl.load(decay + at * n_heads + head, mask=inside, other=1.0)
    c = tl.cumsum(tl.log(tl.maximum(fall, LEAST)), axis=0)
    tl.store(sums + at * n_heads + head, c)
    b = tl.load(beta + at * n_heads + head, mask=inside, other=0.0)

    qk_at = at[:, None] * qk_stride + k_head * D_K + columns_k[None, :]
    keys = tl.load(k + qk_at, mask=inside[:, None], other=0.0)
    queries = tl.load(q + qk_at, mask=inside[:, None], other=0.0)
    i = tl.arange(0, CHUNK)
    not_after = i[:, None] >= i[None, :]
    fade = tl.where(not_after, tl.exp(tl.where(not_after, c[:, None] - c[None, :], 0.0)), 0.0)
    keys_t = tl.trans(keys)
    seen = tl.dot(queries, keys_t) * fade
    attend_at = ((chunk * n_heads + head) * CHUNK).to(tl.int64) * CHUNK + i[:, None] * CHUNK + i[None, :]
    tl.store(attend + attend_at, seen.to(tl.bfloat16))

    overlap = tl.dot(keys, keys_t) * fade * b[:, None]
    solve = unit_lower_inverse(tl.where(i[:, None] > i[None, :], overlap, 0.0), CHUNK)
    values = tl.load(v + at[:, None] * v_stride + head * D_V + columns_v[None, :], mask=inside[:, None], other=0.0)
    u = tl.dot(solve, values.to(tl.float32) * b[:, None], input_precision="tf32")
    tl.store(change + (at[:, None] * n_heads + head) * D_V + columns_v[None, :], u.to(tl.bfloat16))
    w = tl.dot(solve, keys.to(tl.float32) * (b * tl.exp(c))[:, None], input_precision="tf32")
    tl.store(recall + (at[:, None] * n_heads + head) * D_K + columns_k[None, :], w.to(tl.bfloat16))


@quick
@triton.jit(do_not_specialize=["n"])
def advance_kernel(
    state,
    q,
    k,
    change,
    recall,
    attend,
    sums,
    out,
    n,
    qk_stride,
    n_heads,
    n_k_heads,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Some columns of one head's state through all chunks in order, and their outputs."""
    head = tl.program_id(1)
    k_head = head % n_k_heads if GROUP == 0 else head // GROUP
    columns = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    columns_k = tl.arange(0, D_K)
    i = tl.arange(0, CHUNK)
    state_at = state + (head * D_K + columns_k[:, None]) * D_V + columns[None, :]
    s = tl.load(state_at)
    for chunk in range(tl.cdiv(n, CHUNK)):
        rows = chunk * CHUNK + i
        inside = rows < n
        at = rows.to(tl.int64)
        w = tl.load(recall + (at[:, None] * n_heads + head) * D_K + columns_k[None, :])
        u = tl.load(change + (at[:, None] * n_heads + head) * D_V + columns[None, :])
        qk_at = at[:, None] * qk_stride + k_head * D_K + columns_k[None, :]
        queries = tl.load(q + qk_at, mask=inside[:, None], other=0.0)
        keys = tl.load(k + qk_at, mask=inside[:, None], other=0.0)
        attend_at = ((chunk * n_heads + head) * CHUNK).to(tl.int64) * CHUNK + i[:, None] * CHUNK + i[None, :]
        seen = tl.load(attend + attend_at)
        c = tl.load(sums + at * n_heads + head)
        last = tl.sum(tl.where(i == CHUNK - 1, c, 0.0), axis=0)

        known = s.to(tl.bfloat16)
        new = u.to(tl.float32) - tl.dot(w, known)
        o = tl.dot(queries, known) * tl.exp(c)[:, None]
        o += tl.dot(seen, new.to(tl.bfloat16))
        out_at = out + (at[:, None] * n_heads + head) * D_V + columns[None, :]
        tl.store(out_at, o.to(out.dtype.element_ty), mask=inside[:, None])
        faded = (new * tl.exp(last - c)[:, None]).to(tl.bfloat16)
        s = s * tl.exp(last) + tl.dot(tl.trans(keys), faded)
    tl.store(state_at, s)
