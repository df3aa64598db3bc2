"""Each row's best blocks by their scores, found by several programs a row in one launch.

Owns the scratch for scores, and what the programs of a row tell each other. Never sorts: counts of the scores' leading
bits give a floor that few scores beyond the wanted ones reach; these are listed, and searched for the last one.
Hazard: scores are compared as the bits of floats, so they must not be negative (they are sums of relu) and not NaN;
counts and arrivals in the scratch must be zero before, and are after.

A score's *bin* is its exponent and the first bits of its mantissa, as a number from FIRST_BIN on; scores below all bins
or above them lie in the first or last. The floor is the least score of the bin in which the last chosen block lies.
Every program lists, in ascending order, the blocks of its tile that reach the floor. The last of a row's programs to
come to its end sees all lists: it narrows the range of the last chosen score down to one value, the threshold; among
blocks equal to it the lower ones are chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import DeviceRows
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import arrived_last

LOW_BITS = 17  # of a score behind its bin's, which tell the exponent and six bits of the mantissa
N_BINS = 2048  # 32 exponents
FIRST_BIN = (127 - 16) << (23 - LOW_BITS)  # scores below 2^-16 lie in bin 0
SELECT_TILE = 2048  # scores of a program
SELECT_WARPS = 4  # few: each thread adds up what all warps found, in every scan
LIST_PART = 1024  # places for listed blocks, of which the last stays empty, that are looked at together
LEAST_TILES = 32  # a row's tiles; longer contexts than this allows (262,144 tokens of four a block) have another kernel


@triton.jit
def bin_place(score, LOW_BITS: tl.constexpr, FIRST_BIN: tl.constexpr, N_BINS: tl.constexpr):
    """Of scores f32, the places of their bins among the counts: the highest comes first, bin 0 is N_BINS - 1."""
    number = (score.to(tl.int32, bitcast=True) >> LOW_BITS) - FIRST_BIN
    return N_BINS - 1 - tl.minimum(tl.maximum(number, 0), N_BINS - 1)


@triton.jit
def scattered(numbers, first, total, ends, gaps, several, PART: tl.constexpr):
    """Entries first .. first + PART - 2 of the tiles' lists, one behind the other: their blocks, 0 behind the last.
    ends [tiles]: where a tile's entries end; gaps: what its list leaves empty; several: whether there are such."""
    k = tl.arange(0, PART)
    inside = (k < PART - 1) & (first + k < total)
    at = first + k
    if several:
        at += tl.sum(tl.where((first + k)[None, :] >= ends[:, None], gaps[:, None], 0), 0)
    return tl.load(numbers + at, mask=inside, other=0, cache_modifier=".cg")


@triton.jit
def bits_of(scores, number, first, total, PART: tl.constexpr):
    """Of entries first .. first + PART - 2, blocks `number`: the bits of their scores, -1 behind the last."""
    k = tl.arange(0, PART)
    inside = (k < PART - 1) & (first + k < total)
    bits = tl.load(scores + number, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(inside, bits, -1)


@triton.jit
def more_bits(scores, numbers, first, total, PART: tl.constexpr):
    """The same of a list without gaps: blocks and bits."""
    k = tl.arange(0, PART)
    number = tl.load(numbers + first + k, mask=first + k < total, other=0, cache_modifier=".cg")
    return number, bits_of(scores, number, first, total, PART)


@triton.jit
def n_reaching(bits, least, step):
    """How many are at least least + step, + 2 step and + 3 step: three counts of ten bits."""
    one = (bits >= least + step).to(tl.int32)
    two = (bits >= least + 2 * step).to(tl.int32) << 10
    three = (bits >= least + 3 * step).to(tl.int32) << 20
    return tl.sum(one + two + three, 0)


@triton.jit
def larger_and_same(bits, threshold):
    """Whether larger than the threshold, and whether equal to it, as two counts in one number."""
    return (bits > threshold).to(tl.int32) + ((bits == threshold).to(tl.int32) << 16)


@triton.jit(do_not_specialize=["first"])
def select_kernel(
    scores,
    bins,
    numbers,
    counts,
    arrived,
    positions,
    row_segment,
    out,
    first,
    score_stride,
    n_select,
    N_BINS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    PART: tl.constexpr,
    SELECT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one row's scores; the last of the row's programs writes its choice: out int32 [rows, n_select],
    ascending, then -1.

    numbers int32 [rows, score_stride], a multiple of TILE: the tiles' lists; counts int32 [rows, TILES]: their lengths.
    What lies behind a row's scores is read and not used.
    """
    begin(PDL)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    out += row * n_select
    position = tl.load(positions + first + row).to(tl.int32)
    n = (position + 1) // RATIO
    if tl.load(row_segment + first + row) < 0:
        n = 0
    if n <= n_select:
        s = tl.arange(0, SELECT)
        tl.store(out + s, tl.where(s < n, s, -1), mask=s < tl.where(tile == 0, n_select, 0))
        return
    n_tiles = tl.cdiv(n, TILE)
    if tile >= n_tiles:
        return
    scores += row * score_stride
    numbers += row * score_stride
    bins += row * N_BINS
    counts += row * TILES

    i = tile * TILE + tl.arange(0, TILE)
    bits = tl.load(scores + i).to(tl.int32, bitcast=True)  # no mask, so that loads are wide
    b = tl.arange(0, N_BINS)
    running = tl.cumsum(tl.load(bins + b), 0)
    # bin 0 is not counted; all blocks lie in it or above
    the_bin = N_BINS - 1 - tl.min(tl.where(running >= n_select, b, N_BINS - 1), 0)
    floor = tl.where(the_bin > 0, (the_bin + FIRST_BIN) << LOW_BITS, 0)
    reaches = ((bits >= floor) & (i < n)).to(tl.int32)
    place = tl.cumsum(reaches, 0) - reaches
    tl.store(numbers + tile * TILE + place, i, mask=reaches > 0)
    tl.store(counts + tile, tl.sum(reaches, 0))
    if n_tiles > 1:
        if not arrived_last(arrived + row, n_tiles):
            return
    else:
        tl.debug_barrier()  # the list is read by other threads than wrote it
    tl.store(bins + b, tl.zeros([N_BINS], tl.int32))

    t = tl.arange(0, TILES)
    count = tl.load(counts + t, mask=t < n_tiles, other=0, cache_modifier=".cg")
    ends = tl.cumsum(count, 0)
    gaps = TILE - count
    total = tl.sum(count, 0)
    number = scattered(numbers, 0, total, ends, gaps, n_tiles > 1, PART)
    bits = bits_of(scores, number, 0, total, PART)

    # At least n_select blocks have a score of `low` or more, and fewer have one above `high`.
    ceiling = tl.where(the_bin < N_BINS - 1, (the_bin + 1 + FIRST_BIN) << LOW_BITS, 0x7FFFFFFF)
    low = floor
    high = tl.max(tl.where(bits < ceiling, bits, floor), 0)
    k = tl.arange(0, PART)
    for at in range(PART - 1, total, PART - 1):  # the rare rest: behind what it lists no other is read any more
        more = scattered(numbers, at, total, ends, gaps, n_tiles > 1, PART)
        tl.debug_barrier()
        tl.store(numbers + at + k, more, mask=(k < PART - 1) & (at + k < total))
        tl.debug_barrier()
        others = bits_of(scores, more, at, total, PART)
        high = tl.maximum(high, tl.max(tl.where(others < ceiling, others, floor), 0))
    while low < high:
        step = (high - low) // 4 + 1
        three = n_reaching(bits, low, step)
        n1 = three & 1023
        n2 = (three >> 10) & 1023
        n3 = three >> 20
        for at in range(PART - 1, total, PART - 1):
            _, others = more_bits(scores, numbers, at, total, PART)
            three = n_reaching(others, low, step)
            n1 += three & 1023
            n2 += (three >> 10) & 1023
            n3 += three >> 20
        passed = (n1 >= n_select).to(tl.int32) + (n2 >= n_select).to(tl.int32) + (n3 >= n_select).to(tl.int32)
        low += passed * step
        high = tl.minimum(high, low + step - 1)
    threshold = low

    n_equal = n_select - tl.sum((bits > threshold).to(tl.int32), 0)
    for at in range(PART - 1, total, PART - 1):
        _, others = more_bits(scores, numbers, at, total, PART)
        n_equal -= tl.sum((others > threshold).to(tl.int32), 0)
    n_larger = 0
    n_same = 0
    for at in range(0, total, PART - 1):
        if at > 0:
            number, bits = more_bits(scores, numbers, at, total, PART)
        both = larger_and_same(bits, threshold)
        before = tl.cumsum(both, 0) - both
        larger_before = n_larger + (before & 0xFFFF)
        same_before = n_same + (before >> 16)
        chosen = (bits > threshold) | ((bits == threshold) & (same_before < n_equal))
        tl.store(out + larger_before + tl.minimum(same_before, n_equal), number, mask=chosen)
        sums = tl.sum(both, 0)
        n_larger += sums & 0xFFFF
        n_same += sums >> 16


class IndexScratch:
    """Scores, counts and lists of `n_rows` rows with at most `n_blocks` blocks; used by one launch at a time."""

    def __init__(self, device: torch.device, *, n_blocks: int, n_rows: int) -> None:
        n_tiles = triton.cdiv(n_blocks, SELECT_TILE)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.scores = torch.empty((n_rows, n_tiles * SELECT_TILE), dtype=torch.float32, device=device)
        self.numbers = torch.empty((n_rows, n_tiles * SELECT_TILE), dtype=torch.int32, device=device)
        self.counts = zeros(n_rows, max(LEAST_TILES, triton.next_power_of_2(n_tiles)))
        self.bins = zeros(n_rows, N_BINS)
        self.arrived = zeros(n_rows)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.scores, self.numbers, self.counts, self.bins, self.arrived))


def choose(
    scratch: IndexScratch, rows: DeviceRows, *, out: Tensor, first: int, n: int, n_blocks: int, ratio: int
) -> None:
    """The best blocks of rows first .. first + n - 1, whose scores and bins are the scratch's first n: out int32
    [n, n_select], as `kernels/reference_attention.py:best_blocks` gives them; no row has more than n_blocks."""
    n_select = out.shape[1]
    assert out.is_contiguous()
    n_tiles = triton.cdiv(n_blocks, SELECT_TILE) if n_blocks > n_select else 1
    select_kernel[(n_tiles, n)](
        scratch.scores,
        scratch.bins,
        scratch.numbers,
        scratch.counts,
        scratch.arrived,
        rows.positions,
        rows.row_segment,
        out,
        first,
        scratch.scores.stride(0),
        n_select,
        N_BINS=N_BINS,
        LOW_BITS=LOW_BITS,
        FIRST_BIN=FIRST_BIN,
        RATIO=ratio,
        TILE=SELECT_TILE,
        TILES=scratch.counts.shape[1],
        PART=LIST_PART,
        SELECT=triton.next_power_of_2(n_select),
        num_warps=SELECT_WARPS,
        **overlap(out.device),
    )
