"""The recurrent parts of linear attention, token by token: causal convolution and the gated delta rule.

Owns no memory: states, tails and kept rows are the pools' own, changed in place. Never reads another sequence's place.
Hazard: a step that keeps rows reads a place's kept rows (to replay them) and writes new ones; K heads are shared by
several programs, so what the delta rule keeps is written by a second launch.

A sequence's rows come behind its replayed kept rows, and these behind its tail or state, in one loop with one body:
replayed or run at once, a row changes the state by the same bits.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import ConvState, DeltaState, Rows
from makeway.kernels.triton.chunk_delta import DeltaScratch, delta_rule_chunks
from makeway.kernels.triton.linear import MAX_ROWS

LEAVE, ADVANCE, KEEP, REPLAY = 0, 1, 2, 3
"""What a launch does to the memory of a sequence: nothing; moves it behind the rows; moves it behind the replayed rows
and keeps the new ones' inputs; moves it behind the replayed rows, and there are no others."""
CONV_ROWS = 32  # rows of a chunk that a program convolves
DELTA_COLUMNS = 32  # columns of a head's state in a program


@triton.jit
def input_at(i, c, inside, x, tail, kept, first, n_replay, channels, x_stride, kept_row, N_TAIL: tl.constexpr):
    """Channels c of input number i of a sequence: its tail, its replayed rows, its new rows; pointers to its place."""
    at = x + (first + i - N_TAIL - n_replay).to(tl.int64) * x_stride
    if i < N_TAIL:
        at = tail + i * channels
    elif i < N_TAIL + n_replay:
        at = kept + (i - N_TAIL) * kept_row
    return tl.load(at + c, mask=inside, other=0.0)


@triton.jit
def conv_kernel(
    x,
    kernel,
    out,
    tail,
    kept,
    first_row,
    n_rows,
    places,
    n_replay,
    channels,
    x_stride,
    tail_place,
    kept_place,
    kept_row,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    N_TAIL: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    RUN: tl.constexpr,
    MODE: tl.constexpr,
):
    """Some channels of one segment. RUN: its rows from ROWS * program_id(2) on. MODE: what becomes of its tail."""
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    segment = tl.program_id(1)
    n = tl.load(n_rows + segment)
    replayed = tl.load(n_replay + segment)
    first = tl.load(first_row + segment)
    place = tl.load(places + segment).to(tl.int64)
    tail += place * tail_place
    kept += place * kept_place
    if MODE == 3:
        n = 0
        if replayed == 0:
            return
    elif n == 0:
        return
    if RUN:
        start = tl.program_id(2) * ROWS
        for r in range(start, tl.minimum(start + ROWS, n)):
            acc = tl.zeros([BLOCK], tl.float32)
            for t in tl.static_range(TAPS):
                i = replayed + r + t * DILATION
                value = input_at(i, c, inside, x, tail, kept, first, replayed, channels, x_stride, kept_row, N_TAIL)
                acc += value * tl.load(kernel + c * TAPS + t, mask=inside, other=0.0)
            tl.store(out + (first + r).to(tl.int64) * channels + c, acc, mask=inside)
    if MODE > 0:
        moved = replayed
        if MODE == 1:
            moved = replayed + n
        # all of the new tail is read before any of it is written
        t = tl.arange(0, TAIL_TILE)[:, None]
        i = moved + t
        mask = (t < N_TAIL) & inside[None, :]
        old = tl.load(tail + i * channels + c[None, :], mask=mask & (i < N_TAIL), other=0.0)
        again = mask & (i >= N_TAIL) & (i < N_TAIL + replayed)
        from_kept = tl.load(kept + (i - N_TAIL) * kept_row + c[None, :], mask=again, other=0.0)
        new = mask & (i >= N_TAIL + replayed)
        row = first + i - N_TAIL - replayed
        from_x = tl.load(x + row.to(tl.int64) * x_stride + c[None, :], mask=new, other=0.0)
        tl.debug_barrier()
        value = tl.where(i < N_TAIL, old, tl.where(new, from_x, from_kept))
        tl.store(tail + t * channels + c[None, :], value, mask=mask)
        if MODE == 2:
            for r in range(n):
                value = tl.load(x + (first + r).to(tl.int64) * x_stride + c, mask=inside)
                tl.store(kept + r * kept_row + c, value, mask=inside)


def conv_step(x: Tensor, kernel: Tensor, *, state: ConvState, rows: Rows, dilation: int = 1) -> Tensor:
    """`kernels/reference.py:conv_step`; x f32 [n, channels] with rows of any stride, kernel f32 [channels, taps]."""
    out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    mode = KEEP if rows.keep else ADVANCE
    if x.shape[0] <= MAX_ROWS:
        _convolve(x, kernel, out, state, rows, dilation=dilation, run=True, mode=mode)
    else:  # programs that run a segment's later rows must not see its tail changed
        _convolve(x, kernel, out, state, rows, dilation=dilation, run=True, mode=LEAVE)
        _convolve(x, kernel, out, state, rows, dilation=dilation, run=False, mode=mode)
    return out


def replay_conv(state: ConvState, rows: Rows) -> None:
    """`kernels/reference.py:replay_conv`."""
    tail = state.tail
    _convolve(tail[0], tail[0], tail[0], state, rows, dilation=tail.shape[1], run=False, mode=REPLAY)


def _convolve(
    x: Tensor, kernel: Tensor, out: Tensor, state: ConvState, rows: Rows, *, dilation: int, run: bool, mode: int
) -> None:
    n, channels = x.shape
    n_tail = state.tail.shape[1]
    taps = n_tail // dilation + 1
    assert state.tail.stride()[1:] == (channels, 1)
    assert state.kept.stride(2) == 1
    assert x.stride(1) == 1
    assert not run or (kernel.shape == (channels, taps) and kernel.is_contiguous())
    device = rows.on_device
    n_segments = device.n_rows.shape[0]
    if n == 0:
        return
    row_tiles = triton.cdiv(n, CONV_ROWS) if run else 1
    conv_kernel[(triton.cdiv(channels, 128), n_segments, row_tiles)](
        x,
        kernel,
        out,
        state.tail,
        state.kept,
        device.first_row,
        device.n_rows,
        device.places,
        device.n_replay,
        channels,
        x.stride(0),
        state.tail.stride(0),
        state.kept.stride(0),
        state.kept.stride(1),
        TAPS=taps,
        DILATION=dilation,
        N_TAIL=n_tail,
        ROWS=CONV_ROWS,
        BLOCK=128,
        TAIL_TILE=triton.next_power_of_2(n_tail),
        RUN=run,
        MODE=mode,
        num_warps=1,
    )


@triton.jit
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
    n_k_heads,
    GROUP: tl.constexpr,
    D_K: tl.constexpr,
    D_V: tl.constexpr,
    COLUMNS: tl.constexpr,
    MODE: tl.constexpr,
):
    """Some columns of one head's state of one segment: replayed rows, then new ones. GROUP 0: V heads are tiled."""
    head = tl.program_id(1)
    n_heads = tl.num_programs(1)
    segment = tl.program_id(2)
    n = tl.load(n_rows + segment)
    replayed = tl.load(n_replay + segment)
    if MODE == 3:
        n = 0
        if replayed == 0:
            return
    elif n == 0:
        return
    first = tl.load(first_row + segment)
    place = tl.load(places + segment).to(tl.int64)
    k_head = head % n_k_heads if GROUP == 0 else head // GROUP
    i = tl.arange(0, D_K)
    j = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    state_at = state + place * state_place + (head * D_K + i[:, None]) * D_V + j[None, :]
    kept_k += place * k_place + k_head * D_K
    kept_v += place * kept_v_place + head * D_V
    kept_gates += place * gates_place + head
    s = tl.load(state_at)
    for t in range(replayed + n):
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
        s = s * tl.load(decay_at)
        recalled = tl.sum(s * keys[:, None], 0)
        change = (tl.load(v_at + j) - recalled) * tl.load(beta_at)
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
):
    """One row's k, v, decay and beta among the kept rows of its place."""
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
    rounds q, k and v to bf16. q, k f32 [n, k_heads, d_k], v f32 [n, v_heads, d_v]: rows of any stride."""
    decay, beta = decay.contiguous(), beta.contiguous()
    out = torch.empty(v.shape, dtype=torch.float32, device=v.device)
    if v.shape[0] <= MAX_ROWS or scratch is None:
        _run_delta(q, k, v, decay, beta, out, state, rows, mode=KEEP if rows.keep else ADVANCE)
        if rows.keep:
            _keep(k, v, decay, beta, state, rows)
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
    _run_delta(k, k, v, gates, gates, v, state, rows, mode=REPLAY)


def _run_delta(
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
) -> None:
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
        out,
        device.first_row,
        device.n_rows,
        device.places,
        device.n_replay,
        q.stride(0),
        v.stride(0),
        state.state.stride(0),
        *_kept_strides(state),
        n_k_heads,
        GROUP=0 if state.tiled else n_heads // n_k_heads,
        D_K=d_k,
        D_V=d_v,
        COLUMNS=columns,
        MODE=mode,
        num_warps=4,
    )


def _kept_strides(state: DeltaState) -> list[int]:
    return [t.stride(i) for t in (state.k, state.v, state.gates) for i in (0, 1)]


def _keep(k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows) -> None:
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
    )
