"""Each row's best blocks by their scores, found by several programs a row in one launch.

Owns the scratch for scores, and what the programs of a row tell each other. Never sorts: counts of the scores' leading
bits give a floor that few scores beyond the wanted ones reach; these are listed, and searched for the last one. (Of a
chunk the best of each few may be counted: as many groups reach the floor then, and so do at least as many blocks.)
Hazard: scores are compared as the bits of floats, so they must not be negative (they are sums of relu) and not NaN;
counts and arrivals in the scratch must be zero before, and are after.

A score's *bin* is its exponent and the first bits of its mantissa, as a number from FIRST_BIN on; scores below all bins
or above them lie in the first or last. The floor is the least score of the bin in which the last chosen block lies.
Every program lists, in ascending order, the blocks of its tile that reach the floor. The last of a row's programs to
come to its end sees all lists: it narrows the range in which the last chosen score lies until as many blocks as wanted
reach it, or until it is one value; among blocks with this value the lower ones are chosen.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from makeway.kernels.rows import DeviceRows
from makeway.kernels.triton.launch import begin, overlap
from makeway.kernels.triton.linear import arrived_last
from makeway.kernels.triton.quick import quick

LOW_BITS = 17  # of a score behind its bin's, which tell the exponent and six bits of the mantissa
N_BINS = 2048  # 32 exponents
FIRST_BIN = (127 - 16) << (23 - LOW_BITS)  # scores below 2^-16 lie in bin 0
SELECT_TILE = 2048  # scores of a program; below 2^16
SELECT_WARPS = 4  # few: each thread adds up what all warps found, in every scan
LIST_PART = 1024  # places for listed blocks, of which the last stays empty, that are looked at together


@triton.jit
def bin_place(score, LOW_BITS: tl.constexpr, FIRST_BIN: tl.constexpr, N_BINS: tl.constexpr):
    """Of scores f32, the places of their bins among the counts: the highest comes first, bin 0 is N_BINS - 1."""
    number = (score.to(tl.int32, bitcast=True) >> LOW_BITS) - FIRST_BIN
    return N_BINS - 1 - tl.minimum(tl.maximum(number, 0), N_BINS - 1)


@triton.jit
def scattered(numbers, counts, first, n_tiles, TILE: tl.constexpr, PART: tl.constexpr):
    """Entries first .. first + PART - 2 of the tiles' lists, one behind the other: their blocks, 0 behind the last; and
    how many entries there are in all."""
    k = tl.arange(0, PART)
    at = first + k
    total = 0
    for t in range(0, n_tiles, 4):
        four = tl.load((counts + t).to(tl.pointer_type(tl.int64)))
        for u in tl.static_range(4):
            count = tl.where(t + u < n_tiles, (four >> (16 * u)).to(tl.int32) & 0xFFFF, 0)
            total += count
            at += tl.where(first + k >= total, TILE - count, 0)
    return tl.load(numbers + at, mask=(k < PART - 1) & (first + k < total), other=0, cache_modifier=".cg"), total


@triton.jit
def bits_of(scores, number, first, total, PART: tl.constexpr):
    """Of entries first .. first + PART - 2, blocks `number`: the bits of their scores, -1 behind the last."""
    k = tl.arange(0, PART)
    inside = (k < PART - 1) & (first + k < total)
    bits = tl.load(scores + number, mask=inside, other=0.0).to(tl.int32, bitcast=True)
    return tl.where(inside, bits, -1)


@triton.jit
def more_bits(scores, numbers, first, total, PART: tl.constexpr):
    """Entries first .. first + PART - 2 of a list without gaps: blocks, and their scores' bits."""
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
def write_chosen(out, number, bits, threshold, n_equal, n_larger, n_same):
    """Blocks above the threshold, and those equal to it while fewer than n_equal are, behind n_larger and n_same that
    came before. Returns which are: 1 above, 2^16 equal."""
    both = (bits > threshold).to(tl.int32) + ((bits == threshold).to(tl.int32) << 16)  # two counts in one scan
    before = tl.cumsum(both, 0) - both
    larger_before = n_larger + (before & 0xFFFF)
    same_before = n_same + (before >> 16)
    chosen = (bits > threshold) | ((bits == threshold) & (same_before < n_equal))
    tl.store(out + larger_before + tl.minimum(same_before, n_equal), number, mask=chosen)
    return both


@quick
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
    count_stride,
    n_select,
    N_BINS: tl.constexpr,
    LOW_BITS: tl.constexpr,
    FIRST_BIN: tl.constexpr,
    RATIO: tl.constexpr,
    TILE: tl.constexpr,
    PART: tl.constexpr,
    SELECT: tl.constexpr,
    GROUPED: tl.constexpr,
    PDL: tl.constexpr,
):
    """One tile of one row's scores; the last of the row's programs writes its choice: out int32 [rows, n_select],
    ascending, then -1. GROUPED: a count is of groups with a score in the bin or above, so it may be too low.

    numbers int32 [rows, score_stride], a multiple of TILE: the tiles' lists; counts int16 [rows, count_stride], a
    multiple of 4: their lengths. What lies behind a row's scores and counts is read and not used.
    """
    begin(PDL)
    tile = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    out += row * n_select
    scores += row * score_stride
    numbers += row * score_stride
    bins += row * N_BINS
    counts += row * count_stride
    # All that is read at first is on its way before anything waits for it: the compiler moves loads behind a branch,
    # but not behind a barrier. No masks, so that loads are wide.
    segment = tl.load(row_segment + first + row)
    position = tl.load(positions + first + row).to(tl.int32)
    i = tile * TILE + tl.arange(0, TILE)
    bits = tl.load(scores + i).to(tl.int32, bitcast=True)
    b = tl.arange(0, N_BINS)
    in_bins = tl.load(bins + b)
    tl.debug_barrier()
    n = tl.where(segment < 0, 0, (position + 1) // RATIO)
    if n <= n_select:
        s = tl.arange(0, SELECT)
        tl.store(out + s, tl.where(s < n, s, -1), mask=s < tl.where(tile == 0, n_select, 0))
        return
    n_tiles = tl.cdiv(n, TILE)
    if tile >= n_tiles:
        return

    running = tl.cumsum(in_bins, 0)
    # bin 0 is not counted; all blocks lie in it or above
    the_bin = N_BINS - 1 - tl.min(tl.where(running >= n_select, b, N_BINS - 1), 0)
    floor = tl.where(the_bin > 0, (the_bin + FIRST_BIN) << LOW_BITS, 0)
    reaches = ((bits >= floor) & (i < n)).to(tl.int32)
    place = tl.cumsum(reaches, 0) - reaches
    tl.store(numbers + tile * TILE + place, i, mask=reaches > 0)
    tl.store(counts + tile, tl.sum(reaches, 0).to(tl.int16))
    if n_tiles > 1:
        if not arrived_last(arrived + row, n_tiles):
            return
    else:
        tl.debug_barrier()  # the list is read by other threads than wrote it
    tl.store(bins + b, tl.zeros([N_BINS], tl.int32))

    number, total = scattered(numbers, counts, 0, n_tiles, TILE, PART)
    bits = bits_of(scores, number, 0, total, PART)

    # n_low blocks have a score of `low` or more, at least n_select; fewer have one above `high`
    low = floor
    high = tl.where((the_bin < N_BINS - 1) & (not GROUPED), (the_bin + 1 + FIRST_BIN) << LOW_BITS, 0x7FFFFFFF) - 1
    n_low = total
    if (total >= PART) | GROUPED:  # the former is rare: then rounds are dear, and often all scores of the bin are equal
        k = tl.arange(0, PART)
        best = tl.max(tl.where(bits <= high, bits, floor), 0)
        for at in range(PART - 1, total, PART - 1):
            number_here, _ = scattered(numbers, counts, at, n_tiles, TILE, PART)
            tl.debug_barrier()  # now nothing is read any more from where these will lie without gaps
            tl.store(numbers + at + k, number_here, mask=(k < PART - 1) & (at + k < total))
            tl.debug_barrier()
            others = bits_of(scores, number_here, at, total, PART)
            best = tl.maximum(best, tl.max(tl.where(others <= high, others, floor), 0))
        high = best
    while (low < high) & (n_low > n_select):
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
        n_low = tl.where(passed == 0, n_low, tl.where(passed == 1, n1, tl.where(passed == 2, n2, n3)))
        low += passed * step
        high = tl.minimum(high, low + step - 1)

    threshold = low - 1
    n_equal = 0
    if n_low > n_select:  # more than there is room for have the last chosen one's score
        threshold = low
        n_equal = n_select - tl.sum((bits > threshold).to(tl.int32), 0)
        for at in range(PART - 1, total, PART - 1):
            _, others = more_bits(scores, numbers, at, total, PART)
            n_equal -= tl.sum((others > threshold).to(tl.int32), 0)
    n_larger = 0
    n_same = 0
    both = write_chosen(out, number, bits, threshold, n_equal, n_larger, n_same)
    for at in range(PART - 1, total, PART - 1):
        sums = tl.sum(both, 0)
        n_larger += sums & 0xFFFF
        n_same += sums >> 16
        number, bits = more_bits(scores, numbers, at, total, PART)
        both = write_chosen(out, number, bits, threshold, n_equal, n_larger, n_same)


class IndexScratch:
    """Scores, counts and lists of `n_rows` rows with at most `n_blocks` blocks; used by one launch at a time."""

    def __init__(self, device: torch.device, *, n_blocks: int, n_rows: int) -> None:
        n_tiles = triton.cdiv(n_blocks, SELECT_TILE)

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.scores = torch.empty((n_rows, n_tiles * SELECT_TILE), dtype=torch.float32, device=device)
        self.numbers = torch.empty((n_rows, n_tiles * SELECT_TILE), dtype=torch.int32, device=device)
        self.counts = torch.zeros((n_rows, triton.cdiv(n_tiles, 16) * 16), dtype=torch.int16, device=device)
        self.bins = zeros(n_rows, N_BINS)
        self.arrived = zeros(n_rows)

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.scores, self.numbers, self.counts, self.bins, self.arrived))


def choose(
    scratch: IndexScratch,
    rows: DeviceRows,
    *,
    out: Tensor,
    first: int,
    n: int,
    n_blocks: int,
    ratio: int,
    grouped: bool = False,
) -> None:
    """The best blocks of rows first .. first + n - 1, whose scores and bins are the scratch's first n: out int32
    [n, n_select], as `kernels/reference_attention.py:best_blocks` gives them; no row has more than n_blocks. `grouped`:
    bins count the best scores of groups of blocks."""
    n_select = out.shape[1]
    assert out.is_contiguous()
    assert n_blocks <= scratch.scores.shape[1]
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
        scratch.counts.stride(0),
        n_select,
        N_BINS=N_BINS,
        LOW_BITS=LOW_BITS,
        FIRST_BIN=FIRST_BIN,
        RATIO=ratio,
        TILE=SELECT_TILE,
        PART=LIST_PART,
        SELECT=triton.next_power_of_2(n_select),
        GROUPED=grouped,
        num_warps=SELECT_WARPS,
        **overlap(out.device),
    )
