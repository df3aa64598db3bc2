"""The causal convolution for chunks of a prompt: tiles of rows and channels, inputs loaded a tile at a time.

Owns no memory and changes none but its output: the tail is moved behind the rows by `conv`, in a launch of its own.
Never reads another sequence's place.
Hazard: only the first tiles of a segment reach back into its tail and kept rows, so both must hold what was before it.
"""

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import ConvState, Rows
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of

TILE_ROWS = 16


@quick
@triton.jit
def chunk_conv_kernel(
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
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
):
    """ROWS rows of one segment times BLOCK channels. NORM: as of `conv.conv_kernel`."""
    segment = tl.program_id(1)
    n = tl.load(n_rows + segment)
    start = tl.program_id(2) * ROWS
    if start >= n:
        return
    replayed = tl.load(n_replay + segment)
    first = tl.load(first_row + segment)
    place = tl.load(places + segment).to(tl.int64)
    tail += place * tail_place
    kept += place * kept_place
    r = (start + tl.arange(0, ROWS))[:, None]
    c = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (r < n) & (c < channels)[None, :]
    acc = tl.zeros([ROWS, BLOCK], tl.float32)
    for t in tl.static_range(TAPS):
        i = r + (t * DILATION - N_TAIL)
        value = tl.load(x + (first + i).to(tl.int64) * x_stride + c[None, :], mask=inside & (i >= 0), other=0.0)
        if start < N_TAIL:
            j = i + N_TAIL + replayed
            from_tail = tl.load(tail + j * channels + c[None, :], mask=inside & (i < 0) & (j < N_TAIL), other=0.0)
            at = kept + (j - N_TAIL) * kept_row + c[None, :]
            from_kept = tl.load(at, mask=inside & (i < 0) & (j >= N_TAIL), other=0.0)
            value = tl.where(i >= 0, value, tl.where(j < N_TAIL, from_tail, from_kept))
        acc += value * tl.load(kernel + c * TAPS + t, mask=c < channels, other=0.0)[None, :]
    if NORM:
        acc = acc * sigmoid_of(acc)
        if tl.program_id(0) < 2 * n_k_heads:
            acc = acc * tl.rsqrt(tl.sum(acc * acc, 1) + 1e-6)[:, None]
            if tl.program_id(0) < n_k_heads:
                acc = acc * q_scale
    target = out + (first + r).to(tl.int64) * channels + c[None, :]
    tl.store(target, acc.to(out.dtype.element_ty), mask=inside)


def conv_arguments(
    x: Tensor,
    kernel: Tensor,
    out: Tensor,
    state: ConvState,
    rows: Rows,
    *,
    dilation: int,
    k_heads: tuple[int, int] | None,
    runs: bool = True,
) -> tuple[list[Any], dict[str, Any]]:
    """What the convolution's kernels take, of a chunk and of a step, checked: arguments, and constants by name. `runs`:
    the weights are read."""
    channels, n_tail = x.shape[1], state.tail.shape[1]
    taps = n_tail // dilation + 1
    assert state.tail.stride()[1:] == (channels, 1)
    assert state.kept.stride(2) == 1
    assert x.stride(1) == 1
    assert not runs or (kernel.shape == (channels, taps) and kernel.is_contiguous())
    device = rows.on_device
    n_k_heads, block = (0, 128) if k_heads is None else k_heads
    spans = [device.first_row, device.n_rows, device.places, device.n_replay]
    strides = [x.stride(0), state.tail.stride(0), state.kept.stride(0), state.kept.stride(1)]
    arguments = [x, kernel, out, state.tail, state.kept, *spans, channels, *strides, n_k_heads, block**-0.5]
    constants = {"TAPS": taps, "DILATION": dilation, "N_TAIL": n_tail, "BLOCK": block, "NORM": k_heads is not None}
    return arguments, constants


def chunk_conv(
    x: Tensor,
    kernel: Tensor,
    state: ConvState,
    rows: Rows,
    *,
    dilation: int,
    k_heads: tuple[int, int] | None,
    out: Tensor,
) -> None:
    """Writes `out` f32 or bf16 [n, channels]; x f32 [n, channels] with rows of any stride, kernel f32 [channels, taps].

    `k_heads` (their number and d_k): with silu and norms, see `conv.conv_kernel`.
    """
    assert out.is_contiguous()
    arguments, constants = conv_arguments(x, kernel, out, state, rows, dilation=dilation, k_heads=k_heads)
    n, channels = x.shape
    grid = (triton.cdiv(channels, constants["BLOCK"]), rows.on_device.n_rows.shape[0], triton.cdiv(n, TILE_ROWS))
    chunk_conv_kernel[grid](*arguments, ROWS=TILE_ROWS, num_warps=4, **constants)
