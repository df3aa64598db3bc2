"""Matrices times up to eight rows of activations, straight from the quantised bytes, on the tensor cores.

Owns how a launch is cut, and the scratch of launches whose columns several blocks share. Never looks at the number of
rows when it decides in what order a row's sums are added: its bits are the same with 1, 2, 4 or 8 rows.
Hazard: the scratch serves one launch at a time, so all launches of one instance go to one stream.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.weight import Weight

SOURCE = Path(__file__).parent / "linear.cu"
FLOAT_KINDS = (GGMLType.F32, GGMLType.F16, GGMLType.BF16)
SHARED_KINDS = tuple(
    GGMLType[name]
    for name in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q6_K", "IQ4_NL", "IQ4_XS", "MXFP4")
)
"""Copied to shared memory before they are unpacked."""
KINDS = (*FLOAT_KINDS, *SHARED_KINDS, GGMLType.Q4_K, GGMLType.Q5_K)
MAX_ROWS = 8
MAX_SHARED = 99 << 10  # bytes of a block on sm_86
TOGETHER = 4  # matrices of a launch
WARPS = 16  # of a block
PROCESSORS = 132  # of an H200
SUMS = 8 * 20 * 4  # bytes of a warp's sums of one set
TILE = 16  # rows of the matrix
PLAIN, SILU, SWIGLU = 0, 1, 2
AT_ONCE = PROCESSORS * 32  # warps of a grid; with more units than these, blocks take turns
PARAMETERS = "ppp" + "ii" + "f" + 4 * "p" + 4 * "p" + 4 * "i" + 4 * "i" + 4 * "i" + "iii" + "iiiii" + "pp"


def unit_columns(n_cols: int) -> int:
    """Columns that one warp multiplies; 0 where no kernel fits."""
    return next((unit for unit in (256, 320, 128, 96, 64, 32) if n_cols % unit == 0), 0)


def copy_bytes(kind: GGMLType, unit: int) -> int:
    """Shared memory for a warp's copy of a unit; 0 for types that need none (product.cuh: Copy)."""
    if kind not in SHARED_KINDS:
        return 0
    pieces = (unit // BLOCK_SIZES[kind].elements * BLOCK_SIZES[kind].n_bytes + 30) // 16
    return TILE * (pieces | 1) * 16


def activation_bytes(unit: int, n: int) -> int:
    """Shared memory for a warp's activations (product.cuh: Layout)."""
    stride = unit if unit // 32 % 2 else unit + 32
    return (unit // 32 + 1) * 96 + (n + 1) * 96 + 3 * n * stride


def n_sets(n: int) -> int:
    """Products of eight columns that n activations of three columns each need."""
    return -(-3 * n // 8)


def blocks_of(warps: int, *, sets: int) -> int:
    """Blocks of a multiprocessor that a kernel's registers leave room for: 32 warps, 16 with several sets."""
    return max(1, (32 if sets == 1 else 16) // warps)


def has_kernel(kind: GGMLType, n_cols: int) -> bool:
    """Whether there is a kernel for this type and width."""
    unit = unit_columns(n_cols)
    return kind in KINDS and unit > 0 and unit % BLOCK_SIZES[kind].elements == 0


@dataclass(frozen=True)
class Cut:
    """How a launch is cut: columns into units (a warp each), units into groups, groups among `splits` blocks; tiles of
    16 rows among `blocks`, each of which has up to `turns` of them."""

    unit: int
    n_units: int
    group_units: int
    groups: int
    splits: int
    blocks: int
    turns: int
    shared_bytes: int

    @property
    def warps(self) -> int:
        return self.groups * self.group_units

    @property
    def n_groups(self) -> int:
        return -(-self.n_units // self.group_units)


def cut(kinds: Sequence[GGMLType], n_cols: int, *, rows: Sequence[int], n: int) -> Cut:
    """For matrices of these types and numbers of rows. Which sums are added in which order depends on the types and on
    n_cols alone: groups are as large as fits a block with eight activations."""
    unit = unit_columns(n_cols)
    if unit == 256 and all(kind in FLOAT_KINDS for kind in kinds):
        unit = 128  # their units are large: more warps for fewer loads each
    n_units = n_cols // unit
    copy = max(copy_bytes(kind, unit) for kind in kinds)
    n_groups = -(-n_units // min(8, MAX_SHARED // _warp_bytes(unit, MAX_ROWS, copy=copy, loops=True)))
    group_units = -(-n_units // n_groups)
    tiles = sum(-(-r // TILE) for r in rows)
    turns = max(1, round(tiles * n_units / AT_ONCE))
    of_warp = _warp_bytes(unit, n, copy=copy, loops=turns > 1)
    groups = max(1, min(WARPS, MAX_SHARED // of_warp) // group_units)
    if groups < n_groups:  # several blocks to a tile: then no fewer than there are multiprocessors
        groups = max(1, min(groups, round(tiles * n_groups / PROCESSORS)))
    groups = min(groups, n_groups)
    splits = -(-n_groups // groups)
    warps = groups * group_units
    blocks = sum(-(-r // (TILE * turns)) for r in rows)
    return Cut(unit, n_units, group_units, groups, splits, blocks, turns, warps * of_warp)


def _warp_bytes(unit: int, n: int, *, copy: int, loops: bool) -> int:
    """Shared memory of a warp: activations, sums (two of each where others may still read the last), the copy."""
    return activation_bytes(unit, n) + (1 + loops) * n_sets(n) * SUMS + copy


def kernel_name(kinds: Sequence[GGMLType], how: Cut, *, prologue: int, n: int) -> str:
    """The instantiation in linear.cu."""
    mask = sum(1 << int(kind) for kind in set(kinds))
    sets, loops = n_sets(n), how.turns > 1
    blocks = blocks_of(how.warps, sets=sets)
    return f"linears_kernel<{mask}ull, {how.unit}, {prologue}, {sets}, {str(loops).lower()}, {how.warps}, {blocks}>"


class Linears:
    """All products of decode steps on one device."""

    def __init__(self, device: torch.device, programs: Programs, *, n_parts: int = 1 << 23) -> None:
        """`n_parts`: floats of the scratch."""
        self._device, self._programs = device, programs
        self._parts = torch.empty(n_parts, dtype=torch.float32, device=device)
        self._counters = torch.zeros(1 << 14, dtype=torch.int32, device=device)

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
        how = cut(kinds, n_cols, rows=rows, n=n)
        prologue = SWIGLU if up is not None else SILU if silu_scale is not None else PLAIN
        outs = [torch.empty((n, r), dtype=torch.float32, device=x.device) for r in rows]
        tiles = sum(-(-r // TILE) for r in rows)
        if how.splits > 1:
            assert tiles * how.n_groups * TILE * MAX_ROWS <= self._parts.numel()
            assert tiles <= self._counters.numel()
        missing = TOGETHER - len(weights)
        ends = list(accumulate(-(-r // (TILE * how.turns)) for r in rows)) + [how.blocks] * missing
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
                *ends[:3],
                n,
                how.n_units,
                how.group_units,
                how.groups,
                how.n_groups,
                self._parts,
                self._counters,
            ),
            overlaps_previous=True,
        )
        return outs
