"""The causal convolution of linear attention and of PLE, over tails and kept rows that live in the state pool.

Owns no memory: tails and kept rows are the pools' own, changed in place. Never reads another sequence's place.
Hazard: a sequence's inputs are its tail, its replayed kept rows and its new rows, one behind the other; a launch that
moves the tail must have read all that it needs of it before.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import ConvState, Rows
from makeway.kernels.triton.chunk_conv import chunk_conv, conv_arguments
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of

ADVANCE, KEEP, REPLAY = 1, 2, 3
"""What a launch does to the memory of a sequence: moves it behind the rows; moves it behind the replayed rows and keeps
the new ones' inputs; moves it behind the replayed rows, and there are no others."""


@triton.jit
def input_at(i, c, inside, x, tail, kept, first, n_replay, channels, x_stride, kept_row, N_TAIL: tl.constexpr):
    """Channels c of input number i of a sequence: its tail, its replayed rows, its new rows; pointers to its place."""
    at = x + (first + i - N_TAIL - n_replay).to(tl.int64) * x_stride
    if i < N_TAIL:
        at = tail + i * channels
    elif i < N_TAIL + n_replay:
        at = kept + (i - N_TAIL) * kept_row
    return tl.load(at + c, mask=inside, other=0.0)


@quick
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
    n_k_heads,
    q_scale,
    TAPS: tl.constexpr,
    DILATION: tl.constexpr,
    N_TAIL: tl.constexpr,
    BLOCK: tl.constexpr,
    TAIL_TILE: tl.constexpr,
    RUN: tl.constexpr,
    MODE: tl.constexpr,
    NORM: tl.constexpr,
    PDL: tl.constexpr,
):
    """Some channels of one segment. RUN: its rows. MODE: what becomes of its tail.

    NORM: silu behind the convolution, and the first 2 n_k_heads blocks of channels are heads of q (scaled) and k, of
    length 1 then.
    """
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = c < channels
    segment = tl.program_id(1)
    n = tl.load(n_rows + segment)
    replayed = tl.load(n_replay + segment)
    first = tl.load(first_row + segment)
    place = tl.load(places + segment).to(tl.int64)
    begin(PDL)
    tail += place * tail_place
    kept += place * kept_place
    if MODE == 3:
        n = 0
        if replayed == 0:
            return
    elif n == 0:
        return
    if RUN:
        for r in range(n):
            acc = tl.zeros([BLOCK], tl.float32)
            for t in tl.static_range(TAPS):
                i = replayed + r + t * DILATION
                value = input_at(i, c, inside, x, tail, kept, first, replayed, channels, x_stride, kept_row, N_TAIL)
                acc += value * tl.load(kernel + c * TAPS + t, mask=inside, other=0.0)
            if NORM:
                acc = acc * sigmoid_of(acc)
                if tl.program_id(0) < 2 * n_k_heads:
                    acc = acc * tl.rsqrt(tl.sum(acc * acc, 0) + 1e-6)
                    if tl.program_id(0) < n_k_heads:
                        acc = acc * q_scale
            tl.store(out + (first + r).to(tl.int64) * channels + c, acc, mask=inside)
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
            new_row = tl.load(x + (first + r).to(tl.int64) * x_stride + c, mask=inside)
            tl.store(kept + r * kept_row + c, new_row, mask=inside)


def conv_step(x: Tensor, kernel: Tensor, *, state: ConvState, rows: Rows, dilation: int = 1) -> Tensor:
    """`kernels/reference.py:conv_step`; x f32 [n, channels] with rows of any stride, kernel f32 [channels, taps]."""
    return conv_rows(x, kernel, state, rows, dilation=dilation, k_heads=None)


def conv_rows(
    x: Tensor, kernel: Tensor, state: ConvState, rows: Rows, *, dilation: int, k_heads: tuple[int, int] | None
) -> Tensor:
    """`k_heads` (their number and d_k): with silu and norms, see `conv_kernel`; of a chunk that output is bf16."""
    mode = KEEP if rows.keep else ADVANCE
    if x.shape[0] <= MAX_ROWS:
        out = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        _convolve(x, kernel, out, state, rows, dilation=dilation, run=True, mode=mode, k_heads=k_heads)
    else:  # programs that run a segment's later rows must not see its tail changed
        out = torch.empty(x.shape, dtype=torch.float32 if k_heads is None else torch.bfloat16, device=x.device)
        chunk_conv(x, kernel, state, rows, dilation=dilation, k_heads=k_heads, out=out)
        _convolve(x, kernel, out, state, rows, dilation=dilation, run=False, mode=mode)
    return out


def replay_conv(state: ConvState, rows: Rows) -> None:
    """`kernels/reference.py:replay_conv`."""
    tail = state.tail
    _convolve(tail[0], tail[0], tail[0], state, rows, dilation=tail.shape[1], run=False, mode=REPLAY)


def _convolve(
    x: Tensor,
    kernel: Tensor,
    out: Tensor,
    state: ConvState,
    rows: Rows,
    *,
    dilation: int,
    run: bool,
    mode: int,
    k_heads: tuple[int, int] | None = None,
) -> None:
    arguments, constants = conv_arguments(x, kernel, out, state, rows, dilation=dilation, k_heads=k_heads, runs=run)
    n, channels = x.shape
    if n == 0:
        return
    conv_kernel[(triton.cdiv(channels, constants["BLOCK"]), rows.on_device.n_rows.shape[0])](
        *arguments,
        TAIL_TILE=triton.next_power_of_2(constants["N_TAIL"]),
        RUN=run,
        MODE=mode,
        num_warps=1,
        **constants,
        **overlap(x.device),
    )
