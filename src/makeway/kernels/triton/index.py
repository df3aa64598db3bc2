"""The sparse indexer: pooled keys as blocks complete, scores of all complete blocks, and each row's best ones.

Owns the scratch for scores. Never sorts: a histogram of the scores' leading bits finds the few that could be the last
chosen one, a search over their remaining bits finds it. Hazard: scores are compared as the bits of floats, so they must
not be negative (they are sums of relu) and not NaN; counts in the scratch must be zero before, and are after.

For each row: a score's *bin* is its leading BIN_BITS bits. Blocks in bins above the bin of the last chosen block are
chosen; those in it are the *candidates*. The threshold is the largest score that enough blocks reach, found bit by bit
among the candidates; among blocks equal to it the lower ones are chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import KVLayer, Rows
from makeway.kernels.triton.attend import high_and_low, key_places, times
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import MAX_ROWS
from makeway.kernels.triton.small import cos_sin, normed_and_turned, rope_turns

LOW_BITS = 17  # of a score behind its bin's; eight bits of exponent and six of the mantissa tell the bin
N_BINS = 1 << (31 - LOW_BITS)
CHUNK_ROWS = 16  # rows of a chunk whose scores are made together
SCORE_KEYS = 64  # blocks a program scores
SELECT_TILE = 8192  # scores looked at in one turn; below 2^15, for two counts share 32 bits
SELECT_WARPS = 32
BIN_TILE = 8192
SMALL_LIST = 1024  # candidates that are searched without reading them again


@triton.jit
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


@triton.jit(do_not_specialize=["first", "n"])
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
    RATIO: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEADS: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    KEYS: tl.constexpr,
    HALF: tl.constexpr,
    PDL: tl.constexpr,
):
    """Scores of KEYS blocks for ROWS rows of one segment, from row `first` on, and the counts of their bins.

    scores f32 [rows, score_stride], bins int32 [rows, N_BINS], the highest first. Not counted: bin 0, for all
    could be in it, and rows that have no choice.
    """
    begin(PDL)
    start = tl.program_id(0) * KEYS
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
    number = start + tl.arange(0, KEYS)
    visible = number < most
    place = key_places(number, visible, block_tables + segment.to(tl.int64) * table_stride, PER_BLOCK)
    keys = tl.load(pooled + place[:, None] * D + i[None, :])
    products = times(queries, low, tl.trans(keys), tl.zeros([ROWS * HEADS, KEYS], tl.float32), HALF)
    score = tl.sum(tl.reshape(tl.maximum(products, 0.0), (ROWS, HEADS, KEYS)), 1) * scale
    inside = number[None, :] < n_complete[:, None]
    tl.store(scores + row.to(tl.int64)[:, None] * score_stride + number[None, :], score, mask=inside)
    bin_of = score.to(tl.int32, bitcast=True) >> LOW_BITS
    counted = inside & (bin_of > 0) & (n_complete > n_select)[:, None]
    tl.atomic_add(bins + row[:, None] * N_BINS + (N_BINS - 1 - bin_of), 1, mask=counted, sem="relaxed")


@triton.jit
def threshold_bin(bins, n_wanted, N_BINS: tl.constexpr, TILE: tl.constexpr):
    """The highest bin such that n_wanted blocks lie in it or above, and how many lie above it; zeroes the bins."""
    i = tl.arange(0, TILE)
    found = tl.zeros([], tl.int64)  # the bin, and how many lie above it, in one sum
    seen = 0
    for t in range(N_BINS // TILE):
        place = t * TILE + i
        counts = tl.load(bins + place)
        tl.store(bins + place, tl.zeros([TILE], tl.int32))
        running = seen + tl.cumsum(counts, 0)
        crossing = (running >= n_wanted) & (running - counts < n_wanted)
        found += tl.sum(tl.where(crossing, ((N_BINS - 1 - place).to(tl.int64) << 32) + (running - counts), 0), 0)
        seen += tl.sum(counts, 0)
    chosen = (found >> 32).to(tl.int32)
    # bin 0 is not counted; it is below all others
    return chosen, tl.where(chosen > 0, (found & 0xFFFFFFFF).to(tl.int32), seen)


@triton.jit
def n_reaching(lows, n_candidates, least, TILE: tl.constexpr):
    """How many candidates are at least `least`."""
    c = tl.arange(0, TILE)
    count = 0
    for at in range(0, n_candidates, TILE):
        low = tl.load(lows + at + c, mask=at + c < n_candidates, other=-1, cache_modifier=".cg")
        count += tl.sum((low >= least).to(tl.int32), 0)
    return count


@triton.jit(do_not_specialize=["first"])
def select_kernel(
    scores,
    bins,
    candidates,
    positions,
    row_segment,
    out,
    first,
    score_stride,
    n_select,
    N_BINS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    BIN_TILE: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
    SMALL: tl.constexpr,
    SELECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One row's choice: out int32 [rows, n_select], ascending, then -1.

    candidates int32 [rows, score_stride], a multiple of TILE; what lies behind a row's scores is read and not used.
    """
    begin(PDL)
    row = tl.program_id(0).to(tl.int64)
    target = out + row * n_select
    position = tl.load(positions + first + row).to(tl.int32)
    n = (position + 1) // RATIO
    if tl.load(row_segment + first + row) < 0:
        n = 0
    if n <= n_select:
        s = tl.arange(0, SELECT)
        tl.store(target + s, tl.where(s < n, s, -1), mask=s < n_select)
        return
    scores += row * score_stride
    lows = candidates + row * score_stride
    the_bin, n_above = threshold_bin(bins + row * N_BINS, n_select, N_BINS, BIN_TILE)

    i = tl.arange(0, TILE)
    n_candidates = 0
    for at in range(0, n, TILE):
        value = tl.load(scores + at + i).to(tl.int32, bitcast=True)  # no mask, so that loads are wide
        is_candidate = ((value >> LOW_BITS) == the_bin) & (at + i < n)
        count = is_candidate.to(tl.int32)
        place = n_candidates + tl.cumsum(count, 0) - count
        tl.store(lows + place, value & ((1 << LOW_BITS) - 1), mask=is_candidate)
        n_candidates += tl.sum(count, 0)
    tl.debug_barrier()  # the list is read by other threads than wrote it

    n_wanted = n_select - n_above
    threshold = 0
    if n_candidates <= SMALL:
        c = tl.arange(0, SMALL)
        low = tl.load(lows + c, mask=c < n_candidates, other=-1, cache_modifier=".cg")
        for b in range(LOW_BITS):
            trial = threshold | (1 << (LOW_BITS - 1 - b))
            threshold = tl.where(tl.sum((low >= trial).to(tl.int32), 0) >= n_wanted, trial, threshold)
    else:
        for b in range(LOW_BITS):
            trial = threshold | (1 << (LOW_BITS - 1 - b))
            threshold = tl.where(n_reaching(lows, n_candidates, trial, SMALL) >= n_wanted, trial, threshold)
    n_equal = n_wanted - n_reaching(lows, n_candidates, threshold + 1, SMALL)
    threshold = (the_bin << LOW_BITS) | threshold

    n_larger = 0
    n_same = 0
    for at in range(0, n, TILE):
        value = tl.where(at + i < n, tl.load(scores + at + i).to(tl.int32, bitcast=True), -1)
        both = (value > threshold).to(tl.int32) + ((value == threshold).to(tl.int32) << 16)  # two counts in one scan
        before = tl.cumsum(both, 0) - both
        larger_before = n_larger + (before & 0xFFFF)
        same_before = n_same + (before >> 16)
        chosen = (value > threshold) | ((value == threshold) & (same_before < n_equal))
        tl.store(target + larger_before + tl.minimum(same_before, n_equal), at + i, mask=chosen)
        total = tl.sum(both, 0)
        n_larger += total & 0xFFFF
        n_same += total >> 16


class IndexScratch:
    """Scores, bins and candidates of `n_rows` rows with at most `n_blocks` blocks; used by one launch at a time."""

    def __init__(self, device: torch.device, *, n_blocks: int, n_rows: int) -> None:
        n_blocks = triton.cdiv(n_blocks, SELECT_TILE) * SELECT_TILE
        self.scores = torch.empty((n_rows, n_blocks), dtype=torch.float32, device=device)
        self.candidates = torch.empty((n_rows, n_blocks), dtype=torch.int32, device=device)
        self.bins = torch.zeros((n_rows, N_BINS), dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.scores.nbytes + self.candidates.nbytes + self.bins.nbytes


def index_select(q: Tensor, kv: KVLayer, *, rows: Rows, n_select: int, scratch: IndexScratch) -> Tensor:
    """`kernels/reference_attention.py:index_select`; q f32 [n, heads, index_dim], a power of two of at least 16.

    The scratch has room for `rows.max_keys` tokens and at least MAX_ROWS rows. Returns int32 [n, n_select].
    """
    q = q.contiguous()
    n = q.shape[0]
    out = torch.empty((n, n_select), dtype=torch.int32, device=q.device)
    if n == 0:
        return out
    assert rows.max_keys // kv.indexer[2] <= scratch.scores.shape[1]
    if n <= MAX_ROWS:
        assert n <= scratch.scores.shape[0]
        _select_rows(q, kv, rows, out, scratch, first=0, n=n, together=1)
        return out
    step = scratch.scores.shape[0]
    for span in rows.spans:
        for first in range(span.first, span.first + span.n, step):
            n_part = min(step, span.first + span.n - first)
            _select_rows(q, kv, rows, out, scratch, first=first, n=n_part, together=CHUNK_ROWS)
    return out


def _select_rows(
    q: Tensor, kv: KVLayer, rows: Rows, out: Tensor, scratch: IndexScratch, *, first: int, n: int, together: int
) -> None:
    """Rows first .. first + n - 1; `together` of them (of one span, if above 1) share a tile of scores."""
    pooled, _, ratio = kv.indexer
    _, n_heads, d = q.shape
    assert pooled.is_contiguous()
    assert d == triton.next_power_of_2(d) >= 16
    device, half, n_select = rows.on_device, pooled.dtype == torch.float16, out.shape[1]
    most = rows.max_keys // ratio
    heads = triton.next_power_of_2(n_heads)
    if most > n_select:
        score_kernel[(triton.cdiv(most, SCORE_KEYS), triton.cdiv(n, together))](
            q,
            pooled,
            device.positions,
            device.row_segment,
            device.block_tables,
            scratch.scores,
            scratch.bins,
            first,
            n,
            q.stride(0),
            device.block_tables.stride(0),
            scratch.scores.stride(0),
            n_select,
            d**-0.5,
            N_BINS=N_BINS,
            LOW_BITS=LOW_BITS,
            RATIO=ratio,
            PER_BLOCK=pooled.shape[1],
            N_HEADS=n_heads,
            HEADS=max(heads, 16 // together),
            ROWS=together,
            D=d,
            KEYS=SCORE_KEYS,
            HALF=half,
            num_warps=4,
            **overlap(q.device),
        )
    select_kernel[(n,)](
        scratch.scores,
        scratch.bins,
        scratch.candidates,
        device.positions,
        device.row_segment,
        out[first:],
        first,
        scratch.scores.stride(0),
        n_select,
        N_BINS=N_BINS,
        LOW_BITS=LOW_BITS,
        BIN_TILE=BIN_TILE,
        RATIO=ratio,
        TILE=SELECT_TILE,
        SMALL=SMALL_LIST,
        SELECT=triton.next_power_of_2(n_select),
        num_warps=SELECT_WARPS,
        **overlap(q.device),
    )
