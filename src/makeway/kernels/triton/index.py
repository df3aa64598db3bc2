"""The sparse indexer: pooled keys as blocks complete, scores of all complete blocks, and each row's best ones.

Owns the pooled keys' arithmetic and the scores; `choose` finds the best. Never scores a row that has no choice.
Hazard: scores are counted by their bins while they are written, once each; a program that ran twice would spoil them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import KVLayer, Rows
from makeway.kernels.triton.attend import high_and_low, key_places, times
from makeway.kernels.triton.choose import FIRST_BIN, LOW_BITS, N_BINS, IndexScratch, bin_place, choose
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.small import cos_sin, normed_and_turned, rope_turns

CHUNK_ROWS = 16  # rows of a chunk whose scores are made together
SCORE_KEYS = 64  # blocks a program scores at a time
MANY = 8  # times as many blocks as are chosen, from which on a chunk's programs score `TILES` tiles and count groups
TILES = 4
GROUP = 4  # neighbouring blocks, of which the best one's score is counted: fewer atomic additions


@quick
@triton.jit(do_not_specialize=["table_stride"])
def pool_kernel(
    raw,
    gamma,
    q,
    q_gamma,
    q_out,
    turns,
    pooled,
    ring,
    positions,
    row_segment,
    first_row,
    n_rows,
    places,
    block_tables,
    raw_stride,
    q_stride,
    ring_place,
    table_stride,
    eps,
    N_RING: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    D: tl.constexpr,
    PADDED: tl.constexpr,
    HALF: tl.constexpr,
    POOL: tl.constexpr,
    KEEP_RAW: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row: with POOL the pooled key of the block it completes, with KEEP_RAW its raw key into the ring; each
    further program has a head of its query, normed and turned."""
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    segment = tl.load(row_segment + row)
    if segment < 0:
        return
    position = tl.load(positions + row)
    i = tl.arange(0, PADDED)
    inside = i < D
    if tl.program_id(1) > 0:
        head = tl.program_id(1) - 1
        query = normed_and_turned(q + row * q_stride + head * D, q_gamma, turns, position, 1.0, eps, D, PADDED, HALF, 1)
        tl.store(q_out + (row * (tl.num_programs(1) - 1) + head) * D + i, query, mask=inside)
        return
    first = tl.load(first_row + segment)
    own_ring = ring + tl.load(places + segment).to(tl.int64) * ring_place
    if POOL:
        if (position + 1) % RATIO == 0:
            partner = tl.where(i < HALF, i + HALF, i - HALF)
            turned = i < 2 * HALF
            total = tl.zeros([PADDED], tl.float32)
            other = tl.zeros([PADDED], tl.float32)
            for j in tl.static_range(RATIO):
                source = row - (RATIO - 1) + j
                at = own_ring + (position - (RATIO - 1) + j) % N_RING * D
                if source >= first:
                    at = raw + source * raw_stride
                total += tl.load(at + i, mask=inside, other=0.0)
                other += tl.load(at + partner, mask=turned, other=0.0)
            mean = total / RATIO
            factor = tl.rsqrt(tl.sum(mean * mean, 0) / D + eps)
            key = mean * factor * tl.load(gamma + i, mask=inside, other=0.0)
            other = other / RATIO * factor * tl.load(gamma + partner, mask=turned, other=0.0)
            pair = tl.where(i < HALF, i, i - HALF)
            c, s = cos_sin(position - (RATIO - 1), tl.load(turns + pair, mask=turned, other=0.0))
            key = tl.where(turned, key * c + tl.where(i < HALF, -other, other) * s, key)
            number = position // RATIO
            block = tl.load(block_tables + segment.to(tl.int64) * table_stride + number // PER_BLOCK).to(tl.int64)
            target = pooled + (block * PER_BLOCK + number % PER_BLOCK) * D
            tl.store(target + i, key.to(pooled.dtype.element_ty), mask=inside)
    if KEEP_RAW:
        if row - first >= tl.load(n_rows + segment) - N_RING:
            value = tl.load(raw + row * raw_stride + i, mask=inside, other=0.0)
            tl.store(own_ring + position % N_RING * D + i, value, mask=inside)


def index_pool(raw: Tensor, gamma: Tensor, *, kv: KVLayer, rows: Rows, eps: float, n_rot: int, theta: float) -> None:
    """`kernels/reference_attention.py:index_pool`; raw f32 [n, index_dim]."""
    _pool(raw, gamma, kv=kv, rows=rows, eps=eps, n_rot=n_rot, theta=theta, queries=None)


def index_input(
    raw: Tensor,
    q: Tensor,
    *,
    k_norm: Tensor,
    q_norm: Tensor,
    kv: KVLayer,
    rows: Rows,
    eps: float,
    n_rot: int,
    theta: float,
) -> Tensor:
    """`kernels/reference_blocks.py:index_input`; a padding row's query holds anything."""
    n, heads, d = q.shape
    assert raw.shape == (n, d)
    assert q.stride(2) == 1
    assert heads == 1 or q.stride(1) == d
    out = torch.empty((n, heads, d), dtype=torch.float32, device=q.device)
    _pool(raw, k_norm, kv=kv, rows=rows, eps=eps, n_rot=n_rot, theta=theta, queries=(q, q_norm, out))
    return out


def _pool(
    raw: Tensor,
    gamma: Tensor,
    *,
    kv: KVLayer,
    rows: Rows,
    eps: float,
    n_rot: int,
    theta: float,
    queries: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    pooled, ring, ratio = kv.indexer
    n, d = raw.shape
    if n == 0:
        return
    assert raw.stride(1) == 1
    assert pooled.is_contiguous()
    assert ring.stride()[1:] == (d, 1)
    device, n_ring = rows.on_device, ring.shape[1]
    # A row may overwrite what another still pools, unless the ring is long enough for both.
    turns = ((True, True),) if n + ratio - 1 <= n_ring else ((True, False), (False, True))
    for pool, keep in turns:
        q, q_gamma, out = (raw, gamma, raw) if queries is None or not pool else queries
        heads = 0 if queries is None or not pool else q.shape[1]
        pool_kernel[(n, 1 + heads)](
            raw,
            gamma,
            q,
            q_gamma,
            out,
            rope_turns(raw.device, n_rot, theta),
            pooled,
            ring,
            device.positions,
            device.row_segment,
            device.first_row,
            device.n_rows,
            device.places,
            device.block_tables,
            raw.stride(0),
            q.stride(0),
            ring.stride(0),
            device.block_tables.stride(0),
            eps,
            N_RING=n_ring,
            RATIO=ratio,
            PER_BLOCK=pooled.shape[1],
            D=d,
            PADDED=triton.next_power_of_2(d),
            HALF=n_rot // 2,
            POOL=pool,
            KEEP_RAW=keep,
            num_warps=1,
            **overlap(raw.device),
        )


@triton.jit
def count_bins(bins, score, counted, N_BINS: tl.constexpr, LOW_BITS: tl.constexpr, FIRST_BIN: tl.constexpr):
    """Adds scores, where counted, to their rows' counts. Not bin 0: all could be in it, and one address takes one
    addition at a time."""
    place = bin_place(score, LOW_BITS, FIRST_BIN, N_BINS)
    tl.atomic_add(bins + place, 1, mask=counted & (place < N_BINS - 1), sem="relaxed")


@quick
@triton.jit(do_not_specialize=["table_stride"])
def row_score_kernel(
    q,
    pooled,
    positions,
    row_segment,
    block_tables,
    scores,
    bins,
    q_row,
    table_stride,
    score_stride,
    n_select,
    scale,
    N_BINS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of KEYS blocks for one row of a step, and the counts of their bins; the same as `score_kernel`'s.

    A query's high and low parts lie in one tile of the tensor cores: half the products, and half the registers, so that
    all programs of a long context run at once.
    """
    start = tl.program_id(0) * KEYS
    row = tl.program_id(1).to(tl.int64)
    segment = tl.load(row_segment + row)
    n = (tl.load(positions + row).to(tl.int32) + 1) // RATIO
    number = start + tl.arange(0, KEYS)
    inside = number < n
    tables = block_tables + tl.maximum(segment, 0).to(tl.int64) * table_stride
    place = key_places(number, inside, tables, PER_BLOCK)
    begin(PDL)
    if (segment < 0) | (start >= n) | (n <= n_select):
        return
    m = tl.arange(0, 2 * HEADS)[:, None]
    i = tl.arange(0, D)[None, :]
    query = tl.load(q + row * q_row + m % HEADS * D + i, mask=m % HEADS < N_HEADS, other=0.0)
    keys = tl.load(pooled + place[:, None] * D + i)
    if HALF:
        high, low = high_and_low(query, HALF)
        products = tl.dot(tl.where(m < HEADS, high, low), tl.trans(keys))
    else:
        products = tl.dot(tl.where(m < HEADS, query, 0.0), tl.trans(keys), input_precision="ieee")
    products = tl.sum(tl.reshape(products, (2, HEADS, KEYS)), 0)
    score = tl.sum(tl.maximum(products, 0.0), 0) * scale
    tl.store(scores + row * score_stride + number, score, mask=inside)
    count_bins(bins + row * N_BINS, score, inside, N_BINS, LOW_BITS, FIRST_BIN)


@quick
@triton.jit(do_not_specialize=["first", "n", "table_stride"])
def score_kernel(
    q,
    pooled,
    positions,
    row_segment,
    block_tables,
    scores,
    bins,
    first,
    n,
    q_row,
    table_stride,
    score_stride,
    n_select,
    scale,
    N_BINS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    TILES: tl.constexpr,
    GROUP: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of TILES times KEYS blocks for ROWS rows of one segment, from row `first` on, and the counts of their bins
    or, with GROUP > 1, of the best ones' of GROUP neighbours.

    scores f32 [rows, score_stride], bins int32 [rows, N_BINS], the highest first. Not counted: bin 0, for all
    could be in it, and rows that have no choice.
    """
    begin(PDL)
    start = tl.program_id(0) * (KEYS * TILES)
    base = tl.program_id(1) * ROWS
    m = tl.arange(0, ROWS * HEADS)
    row_of_m = base + m // HEADS
    head = m % HEADS
    row = base + tl.arange(0, ROWS)
    # all rows are of one segment; a padding row is one alone
    segment = tl.load(row_segment + first + base)
    if segment < 0:
        return
    position = tl.load(positions + first + row, mask=row < n, other=-1).to(tl.int32)
    n_complete = (position + 1) // RATIO
    most = tl.max(n_complete, 0)
    if (start >= most) | (most <= n_select):
        return
    i = tl.arange(0, D)
    q_at = q + (first + row_of_m).to(tl.int64)[:, None] * q_row + head[:, None] * D + i[None, :]
    mask = (row_of_m < n) & (head < N_HEADS)
    queries, low = high_and_low(tl.load(q_at, mask=mask[:, None], other=0.0), HALF)
    counted = (n_complete > n_select)[:, None]
    for tile in range(TILES):
        number = start + tile * KEYS + tl.arange(0, KEYS)
        visible = number < most
        place = key_places(number, visible, block_tables + segment.to(tl.int64) * table_stride, PER_BLOCK)
        keys = tl.load(pooled + place[:, None] * D + i[None, :])
        products = times(queries, low, tl.trans(keys), tl.zeros([ROWS * HEADS, KEYS], tl.float32), HALF)
        score = tl.sum(tl.reshape(tl.maximum(products, 0.0), (ROWS, HEADS, KEYS)), 1) * scale
        inside = number[None, :] < n_complete[:, None]
        tl.store(scores + row.to(tl.int64)[:, None] * score_stride + number[None, :], score, mask=inside)
        score = tl.where(inside, score, 0.0)  # bin 0 is not counted
        if GROUP > 1:
            score = tl.max(tl.reshape(score, (ROWS, KEYS // GROUP, GROUP)), 2)
        count_bins(bins + row[:, None] * N_BINS, score, counted, N_BINS, LOW_BITS, FIRST_BIN)


def index_select(q: Tensor, kv: KVLayer, *, rows: Rows, n_select: int, scratch: IndexScratch) -> Tensor:
    """`kernels/reference_attention.py:index_select`; q f32 [n, heads, index_dim], a power of two of at least 16.

    The scratch has room for `rows.max_keys` tokens and at least MAX_ROWS rows. Returns int32 [n, n_select].
    """
    n = q.shape[0]
    out = torch.empty((n, n_select), dtype=torch.int32, device=q.device)
    if n == 0:
        return out
    n_blocks = rows.max_keys // kv.indexer[2]
    n_rows, width = scratch.scores.shape
    assert n_blocks <= width
    parts = [(0, n)]
    if n > MAX_ROWS:
        ends = [(span.first, span.first + span.n) for span in rows.spans]
        parts = [(first, min(n_rows, end - first)) for start, end in ends for first in range(start, end, n_rows)]
    for first, n_part in parts:
        if n_blocks > n_select:
            _score(q, kv, rows, scratch, first=first, n=n_part, n_blocks=n_blocks, n_select=n_select)
        where = {"first": first, "n": n_part, "n_blocks": n_blocks, "ratio": kv.indexer[2]}
        grouped = _in_groups(n, n_blocks, n_select)
        choose(scratch, rows.on_device, out=out[first : first + n_part], grouped=grouped, **where)
    return out


def _score(
    q: Tensor,
    kv: KVLayer,
    rows: Rows,
    scratch: IndexScratch,
    *,
    first: int,
    n: int,
    n_blocks: int,
    n_select: int,
) -> None:
    """Scores of rows first .. first + n - 1, which are all of a step's or of one span."""
    pooled, _, ratio = kv.indexer
    _, n_heads, d = q.shape
    assert n <= scratch.scores.shape[0]
    assert pooled.is_contiguous()
    assert d == triton.next_power_of_2(d) >= 16
    q, device, heads = q.contiguous(), rows.on_device, triton.next_power_of_2(n_heads)
    pointers = (q, pooled, device.positions, device.row_segment, device.block_tables, scratch.scores, scratch.bins)
    sizes = (q.stride(0), device.block_tables.stride(0), scratch.scores.stride(0), n_select, d**-0.5)
    constants = {
        "N_BINS": N_BINS,
        "LOW_BITS": LOW_BITS,
        "FIRST_BIN": FIRST_BIN,
        "RATIO": ratio,
        "PER_BLOCK": pooled.shape[1],
        "N_HEADS": n_heads,
        "D": d,
        "KEYS": SCORE_KEYS,
        "HALF": pooled.dtype == torch.float16,
        "num_warps": 4,
    }
    n_tiles = triton.cdiv(n_blocks, SCORE_KEYS)
    if q.shape[0] <= MAX_ROWS:
        row_score_kernel[(n_tiles, n)](*pointers, *sizes, HEADS=max(heads, 8), **constants, **overlap(q.device))
    else:
        tiles, group = (TILES, GROUP) if _in_groups(q.shape[0], n_blocks, n_select) else (1, 1)
        grid = triton.cdiv(n_tiles, tiles), triton.cdiv(n, CHUNK_ROWS)
        tile = {"HEADS": heads, "ROWS": CHUNK_ROWS, "TILES": tiles, "GROUP": group}
        score_kernel[grid](*pointers, first, n, *sizes, **tile, **constants, **overlap(q.device))


def _in_groups(n: int, n_blocks: int, n_select: int) -> bool:
    """Whether the best scores of neighbours are counted, of a batch of `n` rows: where they tell nearly as well where
    the chosen ones begin."""
    return n > MAX_ROWS and n_blocks >= MANY * n_select
