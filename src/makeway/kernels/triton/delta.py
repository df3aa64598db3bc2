"""The gated delta rule token by token, for the rows of a step, with replay of kept rows.

Owns no memory: states and kept rows are the pools' own, changed in place. Never reads another sequence's place.
Hazard: a step that keeps rows reads a place's kept rows (to replay them) and writes new ones; K heads are shared by
several programs, so what the delta rule keeps is written by a second launch.

A sequence's rows come behind its replayed kept rows in one loop with one body: replayed or run at once, a row changes
the state by the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import DeltaState, Rows
from makeway.kernels.triton.chunk_delta import DeltaScratch, delta_rule_chunks
from makeway.kernels.triton.conv import ADVANCE, KEEP, REPLAY
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of, softplus_of

DELTA_COLUMNS = 32  # columns of a head's state in a program
DELTA_WARPS = 4


@quick
@triton.jit(do_not_specialize=["n"])
def delta_kernel(
    state,
    q,
    k,
    v,
    decay,
    beta,
    kept_k,
    kept_v,
    kept_gates,
    a,
    dt_bias,
    gates_out,
    out,
    first_row,
    n_rows,
    places,
    n_replay,
    q_row,
    v_row,
    state_place,
    k_place,
    k_row,
    kept_v_place,
    kept_v_row,
    gates_place,
    gates_row,
    n,
    n_k_heads,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
    RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some columns of one head's state of one segment: replayed rows, then new ones. GROUP 0: V heads are tiled.

    RAW: decay and beta of new rows are alpha and beta's logit; what they become goes to gates_out [2, n, heads].
    """
    head = tl.program_id(1)
    n_heads = tl.num_programs(1)
    segment = tl.program_id(2)
    n_new = tl.load(n_rows + segment)
    replayed = tl.load(n_replay + segment)
    first = tl.load(first_row + segment)
    place = tl.load(places + segment).to(tl.int64)
    n_run = n_new
    if MODE == 3:
        n_new = 0
        n_run = replayed
    k_head = head % n_k_heads if GROUP == 0 else head // GROUP
    i = tl.arange(0, D_K)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    state_at = state + place * state_place + (head * D_K + i[:, None]) * D_V + j[None, :]
    kept_k += place * k_place + k_head * D_K
    kept_v += place * kept_v_place + head * D_V
    kept_gates += place * gates_place + head
    s = tl.load(state_at, mask=i[:, None] < n_run * D_K, other=0.0)
    begin(PDL)
    if n_run == 0:
        return
    for t in range(replayed + n_new):
        row = (first + t - replayed).to(tl.int64)
        k_at = k + row * q_row + k_head * D_K
        q_at = q + row * q_row + k_head * D_K
        v_at = v + row * v_row + head * D_V
        decay_at = decay + row * n_heads + head
        beta_at = beta + row * n_heads + head
        if t < replayed:
            k_at = kept_k + t * k_row
            q_at = k_at
            v_at = kept_v + t * kept_v_row
            decay_at = kept_gates + t * gates_row
            beta_at = decay_at + n_heads
        elif (MODE == 2) & (t == replayed) & (replayed > 0):
            tl.store(state_at, s)
        keys = tl.load(k_at + i)
        queries = tl.load(q_at + i)
        decay_now = tl.load(decay_at)
        beta_now = tl.load(beta_at)
        if RAW:
            if t >= replayed:
                decay_now = tl.exp(tl.load(a + head) * softplus_of(decay_now + tl.load(dt_bias + head)))
                beta_now = sigmoid_of(beta_now)
                if tl.program_id(0) == 0:
                    tl.store(gates_out + row * n_heads + head, decay_now)
                    tl.store(gates_out + (n + row) * n_heads + head, beta_now)
        s = s * decay_now
        recalled = tl.sum(s * keys[:, None], 0)
        change = (tl.load(v_at + j) - recalled) * beta_now
        s = s + keys[:, None] * change[None, :]
        answer = tl.sum(s * queries[:, None], 0)
        if t >= replayed:
            tl.store(out + (row * n_heads + head) * D_V + j, answer)
    if MODE != 2:
        tl.store(state_at, s)


@triton.jit
def keep_kernel(
    k,
    v,
    decay,
    beta,
    kept_k,
    kept_v,
    kept_gates,
    row_segment,
    first_row,
    places,
    q_row,
    v_row,
    k_place,
    k_row,
    kept_v_place,
    kept_v_row,
    gates_place,
    gates_row,
    k_width,
    v_width,
    n_heads,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's k, v, decay and beta among the kept rows of its place."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(row_segment + row)
    if segment < 0:
        return
    place = tl.load(places + segment).to(tl.int64)
    r = row - tl.load(first_row + segment)
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    target = kept_k + place * k_place + r * k_row + i
    tl.store(target, tl.load(k + row * q_row + i, mask=i < k_width), mask=i < k_width)
    target = kept_v + place * kept_v_place + r * kept_v_row + i
    tl.store(target, tl.load(v + row * v_row + i, mask=i < v_width), mask=i < v_width)
    gates = kept_gates + place * gates_place + r * gates_row
    tl.store(gates + i, tl.load(decay + row * n_heads + i, mask=i < n_heads), mask=i < n_heads)
    tl.store(gates + n_heads + i, tl.load(beta + row * n_heads + i, mask=i < n_heads), mask=i < n_heads)


def delta_step(
    q: Tensor,
    k: Tensor,
    *,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    state: DeltaState,
    rows: Rows,
    scratch: DeltaScratch | None = None,
) -> Tensor:
    """`kernels/reference.py:delta_step`. With `scratch` more than MAX_ROWS rows go through `delta_rule_chunks`, which
    rounds q, k and v to bf16, if they are not. q, k f32 [n, k_heads, d_k], v f32 [n, v_heads, d_v]: rows of any stride.
    """
    decay, beta = decay.contiguous(), beta.contiguous()
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if v.shape[0] <= MAX_ROWS or scratch is None:
        run_delta(q, k, v, decay, beta, out, state, rows, mode=KEEP if rows.keep else ADVANCE)
        if rows.keep:
            keep_rows(k, v, decay, beta, state, rows)
        return out
    assert not rows.keep, "a verify step has at most MAX_ROWS rows"
    if any(s.n_replay for s in rows.spans):
        replay_delta(state, rows)
    q, k, v = q.bfloat16(), k.bfloat16(), v.bfloat16()
    for s in rows.spans:
        delta_rule_chunks(
            state.state[s.place],
            q[s.rows],
            k[s.rows],
            v=v[s.rows],
            decay=decay[s.rows],
            beta=beta[s.rows],
            out=out[s.rows],
            scratch=scratch,
            tiled=state.tiled,
        )
    return out


def replay_delta(state: DeltaState, rows: Rows) -> None:
    """`kernels/reference.py:replay_delta`."""
    k, v, gates = state.k[0], state.v[0], state.gates[0]
    run_delta(k, k, v, gates, gates, v, state, rows, mode=REPLAY)


def run_delta(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    decay: Tensor,
    beta: Tensor,
    out: Tensor,
    state: DeltaState,
    rows: Rows,
    *,
    mode: int,
    raw: tuple[Tensor, Tensor, Tensor] | None = None,
) -> None:
    """`raw` (a, dt_bias, room for what they become): decay and beta are still alpha and beta's logit."""
    _, n_heads, d_k, d_v = state.state.shape
    n_k_heads = state.k.shape[2]
    assert q.stride() == k.stride()
    assert k.stride()[1:] == (d_k, 1)
    assert v.stride()[1:] == (d_v, 1)
    assert state.state.stride()[1:] == (d_k * d_v, d_v, 1)
    assert state.k.stride()[2:] == (d_k, 1)
    assert state.v.stride()[2:] == (d_v, 1)
    assert state.gates.stride()[2:] == (n_heads, 1)
    assert d_k == triton.next_power_of_2(d_k)
    assert d_v == triton.next_power_of_2(d_v)
    device = rows.on_device
    columns = min(d_v, DELTA_COLUMNS)
    delta_kernel[(d_v // columns, n_heads, device.n_rows.shape[0])](
        state.state,
        q,
        k,
        v,
        decay,
        beta,
        state.k,
        state.v,
        state.gates,
        *(raw or (decay, decay, decay)),
        out,
        device.first_row,
        device.n_rows,
        device.places,
        device.n_replay,
        q.stride(0),
        v.stride(0),
        state.state.stride(0),
        *_kept_strides(state),
        v.shape[0],
        n_k_heads,
        GROUP=0 if state.tiled else n_heads // n_k_heads,
        D_K=d_k,
        D_V=d_v,
        COLUMNS=columns,
        MODE=mode,
        RAW=raw is not None,
        num_warps=DELTA_WARPS,
        **overlap(state.state.device),
    )


def _kept_strides(state: DeltaState) -> list[int]:
    return [t.stride(i) for t in (state.k, state.v, state.gates) for i in (0, 1)]


def keep_rows(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows) -> None:
    device = rows.on_device
    n, n_heads = decay.shape
    k_width, v_width = k.shape[1] * k.shape[2], v.shape[1] * v.shape[2]
    keep_kernel[(n, triton.cdiv(max(k_width, v_width, n_heads), 1024))](
        k,
        v,
        decay,
        beta,
        state.k,
        state.v,
        state.gates,
        device.row_segment,
        device.first_row,
        device.places,
        k.stride(0),
        v.stride(0),
        *_kept_strides(state),
        k_width,
        v_width,
        n_heads,
        BLOCK=1024,
        num_warps=4,
        **overlap(k.device),
    )
