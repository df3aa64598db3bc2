"""Attention over the paged KV cache: all keys or selected blocks of keys, for a step's rows and for a prompt's chunks.

Owns the tilings and the order of sums: where tiles and splits of a row's keys lie depends on its position alone, and
their parts are added in ascending order, so a row's bits depend on its own keys alone. Never reads behind a row's
position. Hazard: every place of a block must hold a finite value; masked keys are multiplied by exact zeros.

A step (at most MAX_ROWS rows): one program for each row, KV head and split of its keys, then one for each row and head
that adds the splits. A chunk: `attend_chunk`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import KVLayer, Rows
from makeway.kernels.triton.attend_chunk import attend_chunk, attend_selected
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import sigmoid_of

MOST_SPLITS = 64  # of a row's keys, which are cut by tiles as long as there are no more than so many
COMBINE_SPLITS = 16  # whose parts are loaded at once


@quick
@triton.jit(do_not_specialize=["table_stride"])
def write_kernel(
    keys,
    values,
    key_pool,
    value_pool,
    positions,
    row_segment,
    block_tables,
    table_stride,
    key_stride,
    value_stride,
    n_key,
    n_value,
    BLOCK_TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's keys (n_key values of all heads) and values into their place."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(row_segment + row)
    if segment < 0:
        return
    position = tl.load(positions + row)
    block = tl.load(block_tables + segment.to(tl.int64) * table_stride + position // BLOCK_TOKENS)
    place = block.to(tl.int64) * BLOCK_TOKENS + position % BLOCK_TOKENS
    i = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys + row * key_stride + i, mask=i < n_key, other=0.0)
    tl.store(key_pool + place * n_key + i, key.to(key_pool.dtype.element_ty), mask=i < n_key)
    value = tl.load(values + row * value_stride + i, mask=i < n_value, other=0.0)
    tl.store(value_pool + place * n_value + i, value.to(value_pool.dtype.element_ty), mask=i < n_value)


def write_kv(keys: Tensor, values: Tensor, *, kv: KVLayer, rows: Rows) -> None:
    """`kernels/reference_attention.py:write_kv`; keys, values f32 [n, kv_heads, d]."""
    keys, values = keys.flatten(1), values.flatten(1)
    assert keys.stride(1) == values.stride(1) == 1
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    n, n_key = keys.shape
    n_value = values.shape[1]
    if n == 0:
        return
    device = rows.on_device
    write_kernel[(n, triton.cdiv(max(n_key, n_value), 512))](
        keys,
        values,
        kv.keys,
        kv.values,
        device.positions,
        device.row_segment,
        device.block_tables,
        device.block_tables.stride(0),
        keys.stride(0),
        values.stride(0),
        n_key,
        n_value,
        BLOCK_TOKENS=kv.block_tokens,
        BLOCK=512,
        num_warps=4,
        **overlap(keys.device),
    )


@triton.jit
def high_and_low(x, HALF: tl.constexpr):
    """x f32 as the sum of two f16 when HALF, else x and nothing."""
    if HALF:
        high = x.to(tl.float16)
        low = (x - high.to(tl.float32)).to(tl.float16)
    else:
        high = x
        low = x
    return high, low


@triton.jit
def times(a, low, b, acc, HALF: tl.constexpr):
    """acc + a b, in f16 with a's low part too, or in full f32."""
    if HALF:
        acc = tl.dot(low, b, tl.dot(a, b, acc))
    else:
        acc = tl.dot(a, b, acc, input_precision="ieee")
    return acc


@triton.jit
def attend_tile(q, q_low, keys, values, seen, best, total, acc, HALF: tl.constexpr):
    """One step of the online softmax: q [M, D], keys, values [K, D], seen [M or 1, K]."""
    scores = tl.zeros([q.shape[0], keys.shape[0]], tl.float32)
    scores = times(q, q_low, tl.trans(keys), scores, HALF)
    scores = tl.where(seen, scores, -float("inf"))
    new_best = tl.maximum(best, tl.max(scores, 1))
    # without a key so far the maximum is -inf, and exp(-inf - -inf) must be 0
    shift = tl.where(new_best == -float("inf"), 0.0, new_best)
    weights = tl.exp(scores - shift[:, None])
    scale = tl.exp(best - shift)
    total = total * scale + tl.sum(weights, 1)
    acc = acc * scale[:, None]
    high, low = high_and_low(weights, HALF)
    acc = times(high, low, values, acc, HALF)
    return new_best, total, acc


@triton.jit
def key_places(tokens, visible, blocks, BLOCK_TOKENS: tl.constexpr):
    """Where tokens of a segment lie in the pools, in tokens; 0 where not visible."""
    block = tl.load(blocks + tokens // BLOCK_TOKENS, mask=visible, other=0)
    return tl.where(visible, block.to(tl.int64) * BLOCK_TOKENS + tokens % BLOCK_TOKENS, 0)


@triton.jit
def tiles_of(n_keys, KEYS: tl.constexpr, MOST_SPLITS: tl.constexpr):
    """Tiles of KEYS keys, and how many of them a split has."""
    n_tiles = tl.cdiv(n_keys, KEYS)
    return n_tiles, tl.cdiv(n_tiles, MOST_SPLITS)


@quick
@triton.jit(do_not_specialize=["table_stride"])
def row_kernel(
    q,
    key_pool,
    value_pool,
    selected,
    positions,
    row_segment,
    block_tables,
    parts,
    sums,
    q_row,
    q_head,
    table_stride,
    n_select,
    scale,
    GROUP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    RATIO: tl.constexpr,
    KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """One split of the keys that a row's GROUP heads of a KV head see.

    RATIO 0: token t is key t. Else key e is token e % RATIO of the block number e // RATIO of the row's choice, the
    incomplete block coming last.
    """
    split = tl.program_id(0)
    kv_head = tl.program_id(1)
    row = tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(1) * GROUP
    segment = tl.load(row_segment + row)
    position = tl.load(positions + row).to(tl.int32)
    n_complete = (position + 1) // RATIO if RATIO > 0 else 0
    n_chosen = tl.minimum(n_complete, n_select)
    n_keys = n_chosen * RATIO + (position + 1) % RATIO if RATIO > 0 else position + 1
    n_tiles, n_together = tiles_of(n_keys, KEYS, MOST_SPLITS)
    first = split * n_together
    blocks = block_tables + tl.maximum(segment, 0).to(tl.int64) * table_stride
    block = tl.load(blocks + tl.minimum(first, n_tiles - 1) * KEYS // BLOCK_TOKENS)  # where a tile of all keys lies
    begin(PDL)
    if (segment < 0) | (first >= n_tiles):
        return
    head = tl.arange(0, M)
    i = tl.arange(0, D)
    q_at = q + row * q_row + (kv_head * GROUP + head[:, None]) * q_head + i[None, :]
    queries, low = high_and_low(tl.load(q_at, mask=head[:, None] < GROUP, other=0.0) * scale, HALF)
    best = tl.full([M], -float("inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    acc = tl.zeros([M, D], tl.float32)
    for tile in range(first, tl.minimum(first + n_together, n_tiles)):
        e = tile * KEYS + tl.arange(0, KEYS)
        visible = e < n_keys
        if RATIO > 0:
            number = e // RATIO
            chosen = tl.load(selected + row * n_select + number, mask=number < n_chosen, other=0)
            tokens = tl.where(number < n_chosen, chosen, n_complete) * RATIO + e % RATIO
            place = key_places(tokens, visible, blocks, BLOCK_TOKENS)
        else:
            place = block.to(tl.int64) * BLOCK_TOKENS + e % BLOCK_TOKENS
            block = tl.load(blocks + tl.minimum(tile + 1, n_tiles - 1) * KEYS // BLOCK_TOKENS)
        at = (place * tl.num_programs(1) + kv_head)[:, None] * D + i[None, :]
        keys = tl.load(key_pool + at)
        values = tl.load(value_pool + at)
        best, total, acc = attend_tile(queries, low, keys, values, visible[None, :], best, total, acc, HALF)
    inside = head < GROUP
    heads = row * n_heads + kv_head * GROUP + head
    place = heads * tl.num_programs(0) + split
    tl.store(parts + place[:, None] * D + i[None, :], acc, mask=inside[:, None])
    tl.store(sums + place * 2, best, mask=inside)
    tl.store(sums + place * 2 + 1, total, mask=inside)


@quick
@triton.jit(do_not_specialize=["n_splits"])
def combine_kernel(
    gate,
    parts,
    sums,
    positions,
    row_segment,
    out,
    gate_row,
    gate_head,
    n_splits,
    n_select,
    D: tl.constexpr,
    RATIO: tl.constexpr,
    KEYS: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
    AT_ONCE: tl.constexpr,
    GATED: tl.constexpr,
    PDL: tl.constexpr,
):
    """The splits of a row and head, in order; a padding row gets zeros."""
    head = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    segment = tl.load(row_segment + row)
    position = tl.load(positions + row).to(tl.int32)
    begin(PDL)
    i = tl.arange(0, D)
    place = row * tl.num_programs(0) + head
    acc = tl.zeros([D], tl.float32)
    if segment < 0:
        tl.store(out + place * D + i, acc)
        return
    n_keys = position + 1
    if RATIO > 0:
        n_keys = tl.minimum((position + 1) // RATIO, n_select) * RATIO + (position + 1) % RATIO
    n_tiles, n_together = tiles_of(n_keys, KEYS, MOST_SPLITS)
    used = tl.cdiv(n_tiles, n_together)
    best = -float("inf")
    total = 0.0
    for at in range(0, used, AT_ONCE):
        s = at + tl.arange(0, AT_ONCE)
        inside = s < used
        split_at = place * n_splits + s
        split_best = tl.load(sums + split_at * 2, mask=inside, other=-float("inf"))
        split_total = tl.load(sums + split_at * 2 + 1, mask=inside, other=0.0)
        part = tl.load(parts + split_at[:, None] * D + i[None, :], mask=inside[:, None], other=0.0)
        new_best = tl.maximum(best, tl.max(split_best, 0))
        weights = tl.exp(split_best - new_best)
        scale = tl.exp(best - new_best)
        total = total * scale + tl.sum(weights * split_total, 0)
        acc = acc * scale + tl.sum(weights[:, None] * part, 0)
        best = new_best
    result = acc / total
    if GATED:
        result = result * sigmoid_of(tl.load(gate + row * gate_row + head * gate_head + i))
    tl.store(out + place * D + i, result)


def row_keys(half: bool) -> int:
    """Keys of a tile of a step's attention: few, so that a short context is read by many multiprocessors."""
    return 16 if not half else 64


def attend(
    q: Tensor,
    kv: KVLayer,
    *,
    rows: Rows,
    selected: Tensor | None = None,
    gate: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """`kernels/reference_attention.py:attend` of q * scale, times sigmoid(gate) if there is one; padding rows of a
    step get zeros.

    q, gate f32 [n, heads, d], a head's values side by side; d is a power of two of at least 16. Returns f32 [n, heads,
    d].
    """
    n, n_heads, d = q.shape
    n_kv = kv.keys.shape[2]
    assert kv.keys.shape[3] == kv.values.shape[3] == d
    assert d == triton.next_power_of_2(d) >= 16
    assert q.stride(2) == 1
    assert gate is None or (gate.shape == q.shape and gate.stride(2) == 1)
    assert kv.keys.is_contiguous()
    assert kv.values.is_contiguous()
    out = torch.empty((n, n_heads, d), dtype=torch.float32, device=q.device)
    if n == 0:
        return out
    device, group, half = rows.on_device, n_heads // n_kv, kv.keys.dtype == torch.float16
    gates = q if gate is None else gate
    strides = (q.stride(0), q.stride(1), gates.stride(0), gates.stride(1))
    if n > MAX_ROWS and selected is None:
        attend_chunk(q, kv, rows=rows, gate=gate, scale=scale, out=out)
        return out
    if n > MAX_ROWS:
        assert selected is not None
        attend_selected(q, kv, rows=rows, selected=selected, gate=gate, scale=scale, out=out)
        return out
    ratio, n_select, most = 0, 0, rows.max_keys
    if selected is not None:
        assert selected.is_contiguous()
        assert selected.dtype == torch.int32
        ratio, n_select = kv.indexer[2], selected.shape[1]
        most = min(most, n_select * ratio + ratio - 1)
    keys = row_keys(half)
    n_splits = min(triton.cdiv(most, keys), MOST_SPLITS)
    assert ratio or kv.block_tokens % keys == 0
    parts = torch.empty((n, n_heads, n_splits, d), dtype=torch.float32, device=q.device)
    sums = torch.empty((n, n_heads, n_splits, 2), dtype=torch.float32, device=q.device)
    row_kernel[(n_splits, n_kv, n)](
        q,
        kv.keys,
        kv.values,
        device.positions if selected is None else selected,
        device.positions,
        device.row_segment,
        device.block_tables,
        parts,
        sums,
        strides[0],
        strides[1],
        device.block_tables.stride(0),
        n_select,
        scale,
        GROUP=group,
        M=max(16, triton.next_power_of_2(group)),
        D=d,
        BLOCK_TOKENS=kv.block_tokens,
        RATIO=ratio,
        KEYS=keys,
        MOST_SPLITS=MOST_SPLITS,
        HALF=half,
        num_warps=8 if half else 4,
        num_stages=2,
        **overlap(q.device),
    )
    combine_kernel[(n_heads, n)](
        gates,
        parts,
        sums,
        device.positions,
        device.row_segment,
        out,
        strides[2],
        strides[3],
        n_splits,
        n_select,
        D=d,
        RATIO=ratio,
        KEYS=keys,
        MOST_SPLITS=MOST_SPLITS,
        AT_ONCE=COMBINE_SPLITS,
        GATED=gate is not None,
        num_warps=4,
        **overlap(q.device),
    )
    return out
