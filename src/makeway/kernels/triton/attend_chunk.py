"""Attention of a prompt's chunk over the paged KV cache, on tensor cores: all keys, or selected blocks of keys.

Owns the tiling and the order of sums: key tiles lie at fixed places of a row's keys and are added in ascending order,
so a row's bits depend on its own keys alone, not on the chunk. Never reads behind the block of a row's position.
Hazard: every place of a block must hold a finite value; masked keys are multiplied by exact zeros.

All keys: one program takes `rows` / heads consecutive rows of a span and one KV head, its heads side by side in one
tile: first the tiles of keys that every row sees whole, without a mask, then the few that reach past the first row's
position. Selected keys: one program takes one row, for rows choose differently.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import KVLayer, Rows
from makeway.kernels.triton.gemm import described
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of

LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class ChunkTiling:
    """Rows (queries times heads) and keys of a tile, warps, stages. `described`: keys and values are loaded through
    tensor descriptors, for which a tile must not reach over a block of the cache."""

    rows: int
    keys: int
    warps: int
    stages: int
    described: bool = False


EXACT = ChunkTiling(rows=16, keys=16, warps=4, stages=1)  # f32 keys
AMPERE = {
    False: ChunkTiling(rows=64, keys=64, warps=4, stages=2),
    True: ChunkTiling(rows=64, keys=32, warps=8, stages=2),
}
HOPPER = {
    False: ChunkTiling(rows=64, keys=64, warps=4, stages=4, described=True),
    True: ChunkTiling(rows=128, keys=64, warps=8, stages=2),
}


def chunk_tiling(d: int, half: bool, device: torch.device) -> ChunkTiling:
    """The fixed tiling, by head dimension, type of the keys and architecture; CPU tensors (Triton's interpreter) take
    the smaller."""
    if not half:
        return EXACT
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return (HOPPER if is_hopper else AMPERE)[d > 128]


@triton.jit
def attend_tiles(
    queries,
    position,
    keys,
    values,
    blocks,
    start,
    stop,
    best,
    total,
    acc,
    column,
    row_stride,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    DESCRIBED: tl.constexpr,
    MASKED: tl.constexpr,
):
    """The online softmax over keys start .. stop - 1, tile by tile; the KV head's values begin at `column` of a token's
    row_stride ones."""
    t = tl.arange(0, KEYS)
    i = column + tl.arange(0, D)
    for first in range(start, stop, KEYS):
        if DESCRIBED:
            place = tl.load(blocks + first // BLOCK_TOKENS) * BLOCK_TOKENS + first % BLOCK_TOKENS
            k = keys.load([place, column])
        elif BLOCK_TOKENS % KEYS == 0:
            block = tl.load(blocks + first // BLOCK_TOKENS).to(tl.int64)
            base = (block * BLOCK_TOKENS + first % BLOCK_TOKENS) * row_stride
            at = base + (t * row_stride)[:, None] + i[None, :]
            k = tl.load(keys + at)
        else:
            tokens = tl.minimum(first + t, stop - 1)
            block = tl.load(blocks + tokens // BLOCK_TOKENS).to(tl.int64)
            at = ((block * BLOCK_TOKENS + tokens % BLOCK_TOKENS) * row_stride)[:, None] + i[None, :]
            k = tl.load(keys + at)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        if MASKED:
            scores = tl.where((first + t)[None, :] <= position[:, None], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))  # every row sees the first key, so never -inf
        weights = tl.exp2(scores - new_best[:, None])
        scale = tl.exp2(best - new_best)
        total = total * scale + tl.sum(weights, 1)
        if DESCRIBED:
            v = values.load([place, column])
        else:
            v = tl.load(values + at)
        acc = tl.dot(weights.to(v.dtype), v, acc * scale[:, None], input_precision="ieee")
        best = new_best
    return best, total, acc


@quick
@triton.jit(do_not_specialize=["first", "n"])
def chunk_kernel(
    q,
    gate,
    key_pool,
    value_pool,
    positions,
    blocks,
    out,
    first,
    n,
    q_row,
    q_head,
    gate_row,
    gate_head,
    scale,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    QUERIES: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    KEYS: tl.constexpr,
    KIND: tl.constexpr,
    DESCRIBED: tl.constexpr,
    GATED: tl.constexpr,
):
    """QUERIES rows of the span first .. first + n - 1, times GROUP heads (padded to HEADS) of a KV head. KIND: the type
    of keys and values."""
    tile = tl.num_programs(1) - 1 - tl.program_id(1)  # the longest first
    kv_head = tl.program_id(0)
    n_kv = tl.num_programs(0)
    m = tl.arange(0, QUERIES * HEADS)
    query = tile * QUERIES + m // HEADS
    head = m % HEADS
    inside = (query < n) & (head < GROUP)
    row = (first + tl.minimum(query, n - 1)).to(tl.int64)
    before = tl.load(positions + first).to(tl.int32)  # rows of a span are consecutive tokens
    position = before + tl.minimum(query, n - 1)
    i = tl.arange(0, D)
    q_at = q + (row * q_row + (kv_head * GROUP + head) * q_head)[:, None] + i[None, :]
    queries = (tl.load(q_at, mask=inside[:, None], other=0.0) * scale).to(KIND)
    best = tl.full([QUERIES * HEADS], -float("inf"), tl.float32)
    total = tl.zeros([QUERIES * HEADS], tl.float32)
    acc = tl.zeros([QUERIES * HEADS, D], tl.float32)
    seen_by_all = (before + tile * QUERIES + 1) // KEYS * KEYS
    seen_by_last = before + tl.minimum(tile * QUERIES + QUERIES, n)
    column = kv_head * D
    stride = n_kv * D
    # a loop each, for the compiler keeps the mask out of the first
    best, total, acc = attend_tiles(
        queries,
        position,
        key_pool,
        value_pool,
        blocks,
        0,
        seen_by_all,
        best,
        total,
        acc,
        column,
        stride,
        D,
        BLOCK_TOKENS,
        KEYS,
        DESCRIBED,
        False,
    )
    best, total, acc = attend_tiles(
        queries,
        position,
        key_pool,
        value_pool,
        blocks,
        seen_by_all,
        seen_by_last,
        best,
        total,
        acc,
        column,
        stride,
        D,
        BLOCK_TOKENS,
        KEYS,
        DESCRIBED,
        True,
    )
    result = acc / total[:, None]
    if GATED:
        gate_at = gate + (row * gate_row + (kv_head * GROUP + head) * gate_head)[:, None] + i[None, :]
        result = result * sigmoid_of(tl.load(gate_at, mask=inside[:, None], other=0.0))
    tl.store(
        out + (row * (n_kv * GROUP) + kv_head * GROUP + head)[:, None] * D + i[None, :], result, mask=inside[:, None]
    )


def attend_chunk(
    q: Tensor,
    kv: KVLayer,
    *,
    rows: Rows,
    gate: Tensor | None,
    scale: float,
    out: Tensor,
    tiling: ChunkTiling | None = None,
) -> None:
    """Writes `out` f32 [n, heads, d]; arguments as of `attend`. `tiling`: another one than the table's."""
    n_heads, d = q.shape[1:]
    n_kv = kv.keys.shape[2]
    group = n_heads // n_kv
    tiles = tiling or chunk_tiling(d, kv.keys.dtype == torch.float16, q.device)
    gates = q if gate is None else gate
    heads = triton.next_power_of_2(group)
    queries = max(1, tiles.rows // heads)
    device, pools = rows.on_device, (kv.keys, kv.values)
    is_described = tiles.described and kv.block_tokens % tiles.keys == 0
    keys, values = (described(pool.view(-1, n_kv * d), tiles.keys, d) if is_described else pool for pool in pools)
    for i, s in enumerate(rows.spans):
        chunk_kernel[(n_kv, triton.cdiv(s.n, queries))](
            q,
            gates,
            keys,
            values,
            device.positions,
            device.block_tables[i],
            out,
            s.first,
            s.n,
            q.stride(0),
            q.stride(1),
            gates.stride(0),
            gates.stride(1),
            scale * LOG2_E,
            GROUP=group,
            HEADS=heads,
            QUERIES=queries,
            D=d,
            BLOCK_TOKENS=kv.block_tokens,
            KEYS=tiles.keys,
            KIND=tl.float16 if kv.keys.dtype == torch.float16 else tl.float32,
            DESCRIBED=is_described,
            GATED=gate is not None,
            num_warps=tiles.warps,
            num_stages=tiles.stages,
        )


@dataclass(frozen=True)
class SelectedTiling:
    """Keys of a tile, warps, stages."""

    keys: int
    warps: int
    stages: int


def selected_tiling(half: bool) -> SelectedTiling:
    """The fixed tiling, by type of the keys."""
    if not half:
        return SelectedTiling(keys=16, warps=4, stages=1)
    return SelectedTiling(keys=64, warps=4, stages=2)


@quick
@triton.jit(do_not_specialize=["table_stride"])
def selected_kernel(
    q,
    gate,
    key_pool,
    value_pool,
    selected,
    positions,
    row_segment,
    block_tables,
    out,
    q_row,
    q_head,
    gate_row,
    gate_head,
    table_stride,
    n_select,
    scale,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    KEYS: tl.constexpr,
    GATED: tl.constexpr,
):
    """A row's GROUP heads of a KV head: key e is token e % RATIO of the block number e // RATIO of the row's choice,
    the incomplete block coming last."""
    kv_head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    n_kv = tl.num_programs(0)
    position = tl.load(positions + row).to(tl.int32)
    n_complete = (position + 1) // RATIO
    n_chosen = tl.minimum(n_complete, n_select)
    n_keys = n_chosen * RATIO + (position + 1) % RATIO
    head = tl.arange(0, M)
    i = tl.arange(0, D)
    inside = head < GROUP
    q_at = q + row * q_row + ((kv_head * GROUP + head) * q_head)[:, None] + i[None, :]
    queries = (tl.load(q_at, mask=inside[:, None], other=0.0) * scale).to(key_pool.dtype.element_ty)
    blocks = block_tables + tl.load(row_segment + row).to(tl.int64) * table_stride
    chosen = selected + row * n_select
    keys = key_pool + kv_head * D
    values = value_pool + kv_head * D
    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for first in range(0, n_keys, KEYS):
        e = tl.minimum(first + tl.arange(0, KEYS), n_keys - 1)
        number = e // RATIO
        token = tl.where(number < n_chosen, tl.load(chosen + tl.minimum(number, n_select - 1)), n_complete) * RATIO
        token += e % RATIO
        block = tl.load(blocks + token // BLOCK_TOKENS).to(tl.int64)
        at = ((block * BLOCK_TOKENS + token % BLOCK_TOKENS) * (n_kv * D))[:, None] + i[None, :]
        k = tl.load(keys + at)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        scores = tl.where((first + tl.arange(0, KEYS) < n_keys)[None, :], scores, -float("inf"))
        new_best = tl.maximum(best, tl.max(scores, 1))
        weights = tl.exp2(scores - new_best[:, None])
        scale_down = tl.exp2(best - new_best)
        total = total * scale_down + tl.sum(weights, 1)
        v = tl.load(values + at)
        acc = tl.dot(weights.to(v.dtype), v, acc * scale_down[:, None], input_precision="ieee")
        best = new_best
    result = acc / total[:, None]
    if GATED:
        gate_at = gate + row * gate_row + ((kv_head * GROUP + head) * gate_head)[:, None] + i[None, :]
        result = result * sigmoid_of(tl.load(gate_at, mask=inside[:, None], other=0.0))
    out_at = out + (row * (n_kv * GROUP) + kv_head * GROUP + head)[:, None] * D + i[None, :]
    tl.store(out_at, result, mask=inside[:, None])


def attend_selected(
    q: Tensor,
    kv: KVLayer,
    *,
    rows: Rows,
    selected: Tensor,
    gate: Tensor | None,
    scale: float,
    out: Tensor,
    tiling: SelectedTiling | None = None,
) -> None:
    """Writes `out` f32 [n, heads, d]; arguments as of `attend`, no padding rows. `tiling`: another than the table's."""
    assert selected.is_contiguous()
    assert selected.dtype == torch.int32
    n, n_heads, d = q.shape
    n_kv = kv.keys.shape[2]
    group = n_heads // n_kv
    tiles = tiling or selected_tiling(kv.keys.dtype == torch.float16)
    gates = q if gate is None else gate
    device = rows.on_device
    selected_kernel[(n_kv, n)](
        q,
        gates,
        kv.keys,
        kv.values,
        selected,
        device.positions,
        device.row_segment,
        device.block_tables,
        out,
        q.stride(0),
        q.stride(1),
        gates.stride(0),
        gates.stride(1),
        device.block_tables.stride(0),
        selected.shape[1],
        scale * LOG2_E,
        GROUP=group,
        M=max(16, triton.next_power_of_2(group)),
        D=d,
        BLOCK_TOKENS=kv.block_tokens,
        RATIO=kv.indexer[2],
        KEYS=tiles.keys,
        GATED=gate is not None,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
