"""Matrices times up to eight rows of activations, straight from the quantised bytes, on the tensor cores; mixers' ends.

Owns how a launch is cut, and the scratch of launches whose columns several blocks share. Never looks at the number of
rows when it decides in what order a row's sums are added: its bits are the same with 1, 2, 4 or 8 rows.
Hazard: the scratch serves one launch at a time, so all launches of one instance go to one stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.weight import Weight

SOURCE = Path(__file__).parent / "linear.cu"
FLOAT_KINDS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
BY_EIGHT = (GGMLType.Q4_K, GGMLType.Q5_K)  # whose words are read by eights of bytes
KINDS = (
    *FLOAT_KINDS,
    *(GGMLType[name] for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K")),
    *(GGMLType[name] for name in ("IQ4_NL", "IQ4_XS", "MXFP4", "Q4_K", "Q5_K")),
)
MAX_ROWS = 8
MAX_SHARED = 99 << 10  # bytes of a block on sm_86
MAX_SHARED_HOPPER = 227 << 10  # on sm_90
TOGETHER = 5  # matrices of a launch: queries, keys, values and an indexer's two
RESERVED = 1 << 10  # bytes of each block's, besides
WARPS = 16  # of a block
RESIDENT_WARPS = (30, 24)  # of a multiprocessor, for a light kernel (64 registers) and for others (80)
WAVES = 4  # of blocks with one tile each, above which they have several
PROCESSORS = 132  # of an H200
SUMS = 8 * 20 * 4  # bytes of a warp's sums of one set
TILE = 16  # rows of the matrix
PLAIN, SILU, SWIGLU = 0, 1, 2
PARAMETERS = "ppp" + "ii" + "f" + TOGETHER * "pp" + TOGETHER * "iii" + (TOGETHER - 1) * "i" + "pp"
MIX_PARAMETERS = "ppppppiiii"


def unit_columns(n_cols: int) -> int:
    """Columns that one warp multiplies; 0 where no kernel fits."""
    return next((unit for unit in (256, 320, 128, 96, 64, 32) if n_cols % unit == 0), 0)


def most_shared(device: torch.device) -> int:
    """Bytes of shared memory that a block may have; the least that any supported card has, where it is not known."""
    is_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return MAX_SHARED_HOPPER if is_hopper else MAX_SHARED


def copy_bytes(kind: GGMLType, unit: int) -> int:
    """Shared memory for a warp's copy of a unit, which floats need not (product.cuh: Copy)."""
    if kind in FLOAT_KINDS:
        return 0
    n_bytes = unit // BLOCK_SIZES[kind].elements * BLOCK_SIZES[kind].n_bytes
    pieces = (n_bytes + 30) // 16 if n_bytes % 16 else n_bytes // 16
    return TILE * ((pieces + 1) // 4 * 4 + 2 if kind in BY_EIGHT else pieces | 1) * 16


def activation_bytes(unit: int, n: int) -> int:
    """Shared memory for a warp's activations (product.cuh: Layout)."""
    stride = unit if unit // 32 % 2 else unit + 32
    return 96 + 3 * n * stride


def n_sets(n: int) -> int:
    """Products of eight columns that n activations of three columns each need."""
    return -(-3 * n // 8)


def resident_blocks(warps: int, shared_bytes: int, *, most_warps: int, max_shared: int) -> int:
    """Blocks of a multiprocessor: of so many warps and bytes each, where registers leave room for `most_warps`; none
    where a block may not have as many bytes."""
    return min(max(1, most_warps // warps), (max_shared + RESERVED) // (shared_bytes + RESERVED))


def has_kernel(kind: GGMLType, n_cols: int) -> bool:
    """Whether there is a kernel for this type and width."""
    unit = unit_columns(n_cols)
    return kind in KINDS and unit > 0 and unit % BLOCK_SIZES[kind].elements == 0


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: columns into units (a warp each), units into groups, `groups` of those in a block; tiles of
    16 rows among blocks, so many for each matrix, each of which has up to `turns` of them, one after the other; with
    several, sums have one or two `buffers`, and `copies` tiles are fetched at once. Registers leave room for `resident`
    blocks."""

    unit: int
    n_units: int
    group_units: int
    groups: int
    of_matrix: tuple[int, ...]
    turns: int
    buffers: int
    copies: int
    resident: int
    shared_bytes: int

    @property
    def blocks(self) -> int:
        """Of all matrices."""
        return sum(self.of_matrix)

    @property
    def warps(self) -> int:
        return self.groups * self.group_units

    @property
    def n_groups(self) -> int:
        return -(-self.n_units // self.group_units)

    @property
    def splits(self) -> int:
        """Blocks that share a tile."""
        return -(-self.n_groups // self.groups)


def cut(kinds: Sequence[GGMLType], n_cols: int, *, rows: Sequence[int], n: int, max_shared: int = MAX_SHARED) -> Cut:
    """For matrices of these types and numbers of rows, on a card that lets a block have `max_shared` bytes. Which sums
    are added in which order depends on the types and on n_cols alone: see `groups_of`."""
    _, group_units, n_groups = groups_of(kinds, n_cols)
    of = partial(cut_as, kinds, n_cols, rows=rows, n=n)
    tiles = sum(-(-r // TILE) for r in rows)
    # Even shares: all of a tile's groups, where that is not too many warps for a block nor too few blocks, or one.
    in_one = of(groups=n_groups)
    fits_one = in_one.warps <= WARPS and in_one.shared_bytes <= max_shared
    groups = n_groups if fits_one and tiles * n_groups > PROCESSORS else 1
    warps, n_blocks = groups * group_units, tiles * -(-n_groups // groups)

    is_mixed = _is_mixed(kinds)
    is_light = n_sets(n) == 1 and not is_mixed
    fit = partial(resident_blocks, warps, most_warps=RESIDENT_WARPS[not is_light], max_shared=max_shared)
    of = partial(of, groups=groups, buffers=2 if fit(of(groups=groups, turns=2, buffers=2).shared_bytes) else 1)
    resident = fit(of(turns=2).shared_bytes)
    # Light blocks come in waves, which hide each other's starts and ends; others do more before their first tile.
    turns = max(1, n_blocks // (WAVES * PROCESSORS * resident)) if is_light else _turns(n_blocks, resident=resident)
    one, two = of(turns=turns), of(turns=turns, copies=2)
    there = min(resident, -(-one.blocks * one.splits // PROCESSORS))
    # The second of two tiles would only delay the first.
    how = two if turns > 2 and fit(two.shared_bytes) >= there else one
    return replace(how, resident=there if is_mixed else resident)  # floats are on their way in registers


def groups_of(kinds: Sequence[GGMLType], n_cols: int) -> tuple[int, int, int]:
    """Columns of a unit, units of a group, groups: a group is as large as fits any card's block with eight rows."""
    unit = unit_columns(n_cols)
    if unit == 256 and all(kind in FLOAT_KINDS for kind in kinds):
        unit = 128  # their units are large: more warps for fewer loads each
    most = min(8, MAX_SHARED // _warp_bytes(unit, MAX_ROWS, copy=max(copy_bytes(kind, unit) for kind in kinds)))
    units = _group_units(n_cols // unit, most)
    return unit, units, -(-(n_cols // unit) // units)


def cut_as(
    kinds: Sequence[GGMLType],
    n_cols: int,
    *,
    rows: Sequence[int],
    n: int,
    groups: int = 1,
    turns: int = 1,
    buffers: int = 1,
    copies: int = 1,
    resident: int = 1,
) -> Cut:
    """The cut with these choices, whether it fits or not; buffers and copies count where a block has several turns."""
    unit, group_units, _ = groups_of(kinds, n_cols)
    if turns == 1:
        buffers, copies = 0, 1
    # A tile of floats takes several times as long as one of codes: beside codes each has a block of its own.
    is_mixed = _is_mixed(kinds)
    by_kind = [1 if is_mixed and kind in FLOAT_KINDS else turns for kind in kinds]
    of_matrix = tuple(-(-r // (TILE * t)) for r, t in zip(rows, by_kind, strict=True))
    of_warp = _warp_bytes(unit, n, copy=copies * max(copy_bytes(kind, unit) for kind in kinds))
    if buffers == 2:
        of_warp += n_sets(n) * SUMS
    shared_bytes = groups * group_units * of_warp
    return Cut(unit, n_cols // unit, group_units, groups, of_matrix, turns, buffers, copies, resident, shared_bytes)


def _is_mixed(kinds: Sequence[GGMLType]) -> bool:
    """Floats beside codes."""
    return {kind in FLOAT_KINDS for kind in kinds} == {True, False}


def _group_units(n_units: int, most: int) -> int:
    """Units of a group: such that the last group is no smaller, if any number above half of `most` does that."""
    whole = [size for size in range(most // 2 + 1, most + 1) if n_units % size == 0]
    return max(whole) if whole else -(-n_units // -(-n_units // most))


def _turns(n_blocks: int, *, resident: int) -> int:
    """Tiles of a block, such that all blocks run at once: so many on a multiprocessor, or fewer where some would have
    a quarter more tiles than they need to have."""
    tiles = -(-n_blocks // PROCESSORS)
    shares = [(-(-tiles // blocks), blocks) for blocks in range(resident, 0, -1)]
    return next(turns for turns, blocks in shares if turns * blocks <= 1.25 * tiles)


def _warp_bytes(unit: int, n: int, *, copy: int) -> int:
    """Shared memory of a warp: activations, sums, the copy."""
    return activation_bytes(unit, n) + n_sets(n) * SUMS + copy


def kernel_name(kinds: Sequence[GGMLType], how: Cut, *, prologue: int, n: int) -> str:
    """The instantiation in linear.cu."""
    mask = sum(1 << int(kind) for kind in set(kinds))
    what = f"{mask}ull, {len(kinds)}, {how.unit}, {prologue}, {n}, {how.buffers}, {how.copies}"
    return f"linears_kernel<{what}, {how.n_units}, {how.group_units}, {how.groups}, {how.resident}>"


def can_mix(kind: GGMLType, n_cols: int, *, n_streams: int) -> bool:
    """Whether one launch ends a mixer whose `up` has this type and width: where its columns are one warp's unit."""
    return has_kernel(kind, n_cols) and 1 < n_streams <= MAX_ROWS and groups_of([kind], n_cols)[0] == n_cols


def mix_kernel_name(kind: GGMLType, n_cols: int, *, n_streams: int, n: int) -> str:
    """The instantiation in linear.cu."""
    return f"mix_kernel<{int(kind)}, {n_cols}, {n}, {n_streams}>"


def mix_bytes(kind: GGMLType, n_cols: int, *, n_streams: int, n: int) -> int:
    """Shared memory of a block: activations, and for each stream sums, what is gated, the copy."""
    of_stream = n_sets(n) * SUMS + 4 * n * TILE + copy_bytes(kind, n_cols)
    return activation_bytes(n_cols, n) + n_streams * of_stream


class Linears:
    """All products of decode steps on one device."""

    def __init__(
        self, device: torch.device, programs: Programs, *, n_parts: int = 1 << 23, rule: Callable[..., Cut] = cut
    ) -> None:
        """`n_parts`: floats of the scratch; `rule`: what cuts, with the parameters of `cut`."""
        self._device, self._programs, self._rule = device, programs, rule
        self._parts = torch.empty(n_parts, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)
        self._max_shared = most_shared(device)

    def can_multiply(self, weight: Weight) -> bool:
        """Whether there is a kernel for it, and it lies as kernels want it."""
        is_known = has_kernel(weight.type, weight.n_cols) and weight.n_rows <= TILE * self._counters.numel()
        return is_known and weight.raw.data_ptr() % 16 == 0 and weight.raw.is_contiguous()

    @property
    def nbytes(self) -> int:
        return self._parts.nbytes + self._counters.nbytes

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        *,
        up: Tensor | None = None,
        gate: Tensor | None = None,
        silu_scale: float | None = None,
    ) -> list[Tensor]:
        """x f32 [n <= 8, n_cols] times each transposed weight: f32 [n, n_rows].

        With `silu_scale` silu(silu_scale * x) is multiplied instead of x; with `up` f32 [n, n_cols] silu(x) * up, times
        sigmoid(gate f32 [n, 1]) if there is one. Weights are on the device, their first bytes at multiples of 16.
        """
        outs: list[Tensor] = []
        for first in range(0, len(weights), TOGETHER):
            some = weights[first : first + TOGETHER]
            outs += self._launch(x, some, up=up, gate=gate, silu_scale=silu_scale)
        return outs

    def _launch(
        self, x: Tensor, weights: Sequence[Weight], *, up: Tensor | None, gate: Tensor | None, silu_scale: float | None
    ) -> list[Tensor]:
        n, n_cols = x.shape
        assert 0 < n <= MAX_ROWS
        for values in (x, up):
            assert values is None or (values.dtype == torch.float32 and values.stride(1) == 1)
            assert values is None or (values.stride(0) % 4 == 0 and values.data_ptr() % 16 == 0)
        for weight in weights:
            assert weight.n_cols == n_cols
            assert self.can_multiply(weight)
        kinds = [weight.type for weight in weights]
        rows = [weight.n_rows for weight in weights]
        how = self._rule(kinds, n_cols, rows=rows, n=n, max_shared=self._max_shared)
        prologue = SWIGLU if up is not None else SILU if silu_scale is not None else PLAIN
        outs = [torch.empty((n, r), dtype=torch.float32, device=x.device) for r in rows]
        tiles = sum(-(-r // TILE) for r in rows)
        if how.splits > 1:
            assert tiles * how.n_groups * TILE * MAX_ROWS <= self._parts.numel()
            assert tiles <= self._counters.numel()
        missing = TOGETHER - len(weights)
        ends = list(accumulate(how.of_matrix)) + [how.blocks] * missing
        kernel = self._programs.kernel(SOURCE, kernel_name(kinds, how, prologue=prologue, n=n), PARAMETERS)
        kernel.launch(
            (how.blocks, how.splits, 1),
            32 * how.warps,
            how.shared_bytes,
            (
                x,
                0 if up is None else up,
                0 if gate is None else gate,
                x.stride(0),
                0 if up is None else up.stride(0),
                1.0 if silu_scale is None else silu_scale,
                *(w.raw for w in weights),
                *(0,) * missing,
                *outs,
                *(0,) * missing,
                *rows,
                *(0,) * missing,
                *(int(kind) for kind in kinds),
                *(0,) * missing,
                *(w.raw.shape[1] for w in weights),
                *(0,) * missing,
                *ends[: TOGETHER - 1],
                self._parts,
                self._counters,
            ),
            overlaps_previous=True,
        )
        return outs

    def can_mix(self, up: Weight, n_streams: int) -> bool:
        """Whether `mix` has a kernel for it."""
        return self.can_multiply(up) and can_mix(up.type, up.n_cols, n_streams=n_streams)

    def mix(
        self, low: Tensor, up: Weight, *, normed: Tensor, raw_inject: Tensor | None, n_streams: int
    ) -> tuple[Tensor, Tensor | None]:
        """The end of `kernels/reference_blocks.py:hc_mix`, in one launch: low f32 [n <= 8, n_cols] as `down` gives it,
        normed f32 [n, n_streams * hidden], raw_inject f32 [n, n_streams] -> x f32 [n, hidden], inject factors f32 [n,
        n_streams]."""
        n, n_cols = low.shape
        hidden = up.n_rows // n_streams
        assert 0 < n <= MAX_ROWS
        assert up.n_cols == n_cols
        assert normed.shape == (n, n_streams * hidden) == (n, up.n_rows)
        assert self.can_mix(up, n_streams)
        for values in (low, normed, raw_inject):
            assert values is None or (values.dtype == torch.float32 and values.stride(1) == 1)
        assert low.stride(0) % 4 == 0
        assert low.data_ptr() % 16 == 0
        assert normed.is_contiguous()
        x = torch.empty((n, hidden), dtype=torch.float32, device=low.device)
        inject = None if raw_inject is None else torch.empty((n, n_streams), dtype=torch.float32, device=low.device)
        name = mix_kernel_name(up.type, n_cols, n_streams=n_streams, n=n)
        self._programs.kernel(SOURCE, name, MIX_PARAMETERS).launch(
            (-(-hidden // TILE), 1, 1),
            32 * n_streams,
            mix_bytes(up.type, n_cols, n_streams=n_streams, n=n),
            (
                low,
                up.raw,
                normed,
                0 if raw_inject is None else raw_inject,
                x,
                0 if inject is None else inject,
                low.stride(0),
                0 if raw_inject is None else raw_inject.stride(0),
                up.raw.shape[1],
                hidden,
            ),
            overlaps_previous=True,
        )
        return x, inject
