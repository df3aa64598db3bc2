"""The routed experts of a decode step: gate, up and SwiGLU of every entry, then down and the weighted sum.

Owns the hidden values between the two launches. Never plans and never fetches (`kernels/triton/step_plan.py`).
Hazard: the hidden values are overwritten by the next layer, on the same stream.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from makeway.gguf.types import row_bytes
from makeway.kernels.cuda.linear import (
    FLOAT_KINDS,
    MAX_ROWS,
    MAX_SHARED,
    MAX_SHARED_HOPPER,
    PROCESSORS,
    SUMS,
    TILE,
    activation_bytes,
    copy_bytes,
    has_kernel,
    most_shared,
    resident_blocks,
    unit_columns,
)
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton.experts import ExpertLayout
from makeway.kernels.triton.step_buffers import StepBuffers

SOURCE = Path(__file__).parent / "experts.cu"
MOST_PASS = 2  # rows of an entry that are multiplied together
RESIDENT_WARPS = (30, 24)  # of a multiprocessor, with gate and up of one row (64 registers) and of two (80)
MOST_TURNS = 4  # tiles of a block, where all run at once
DOWN_WARPS = (24, 10)  # of a block that has a multiprocessor for itself, and of one of two
MOST_DOWN_WARPS = 20  # with two rows of a pass
HALF_SHARED = (MAX_SHARED_HOPPER >> 1) - 1024  # for each of two blocks
MOST_WARPS = 16  # of a block
GATE_UP = "pi" + "pppp" + "iil" + "p" + "ii"
DOWN = "p" + "ppppp" + "il" + "p" + "ii"


@dataclass(frozen=True)
class Launches:
    """How the two launches of a layer are cut: rows of a pass, passes. Gate and up: columns of a unit (a warp each),
    units, bytes of shared memory, blocks of an entry, buffers of sums where a block has several tiles, blocks that
    registers leave room for. Down: columns of a unit, units, warps of an entry, entries at a time, units of a warp that
    are fetched at once, blocks that registers leave room for, bytes."""

    of_pass: int
    passes: int

    unit: int
    units: int
    shared_bytes: int
    blocks: int
    buffers: int
    resident: int
    down_unit: int
    down_units: int
    per_entry: int
    at_once: int
    down_copies: int
    down_resident: int
    down_shared_bytes: int

    @property
    def down_warps(self) -> int:
        return self.per_entry * self.at_once


def down_columns(layout: ExpertLayout) -> int:
    """Columns of a warp in the product with down: large units, for all of an entry are in flight at once."""
    if unit_columns(layout.width) == 256 or layout.down in FLOAT_KINDS:
        return unit_columns(layout.width)
    return max(size for size in range(32, 321, 32) if layout.width % size == 0)


def can_run(layout: ExpertLayout) -> bool:
    """Whether there are kernels for a layer's types and sizes."""
    kinds = ((layout.gate, layout.hidden), (layout.up, layout.hidden), (layout.down, layout.width))
    if not all(has_kernel(kind, n_cols) for kind, n_cols in kinds) or layout.width % TILE:
        return False
    how = launches(layout, n=MAX_ROWS, top_k=1)
    return how.units <= MOST_WARPS and how.shared_bytes <= MAX_SHARED


def launches(layout: ExpertLayout, *, n: int, top_k: int, max_shared: int = MAX_SHARED) -> Launches:
    """For n rows, on a card that lets a block have `max_shared` bytes; the order of sums is the same for all."""
    of_pass = min(n, MOST_PASS)
    tiles, units = layout.width // TILE, layout.hidden // unit_columns(layout.hidden)
    down_units = layout.width // down_columns(layout)
    in_two = -(-layout.hidden // TILE) > PROCESSORS  # blocks of a multiprocessor
    warps, room = DOWN_WARPS[in_two], min(max_shared, HALF_SHARED) if in_two else max_shared
    per_entry = max(1, min(down_units, warps // top_k))
    down_copies = 1 if per_entry == down_units and per_entry * n * top_k <= warps else 2  # 1: all of a warp's
    if of_pass > 1:
        warps = min(warps, MOST_DOWN_WARPS)
    of = partial(launches_as, layout, n=n, per_entry=per_entry, down_copies=down_copies)

    # One row: a tile each, for nothing can be fetched before the plan is there, so all is on its way at once then.
    # Several: all blocks at once, one for each multiprocessor, where that gives none more than a few tiles; else two
    # tiles each: activations are made half as often, and blocks of few tiles fill in, for entries differ in rows.
    share = -(-tiles // max(1, PROCESSORS // (n * top_k)))
    turns = 1 if n == 1 else share if share <= MOST_TURNS else 2
    blocks = -(-tiles // turns)
    fit = partial(resident_blocks, units, most_warps=RESIDENT_WARPS[of_pass > 1], max_shared=max_shared)
    one, two = (fit(of(blocks=blocks, at_once=1, buffers=buffers).shared_bytes) for buffers in (1, 2))
    entries = min(n * top_k, warps // per_entry, room // of(blocks=blocks, at_once=1).down_shared_bytes)
    entries = max(1, entries, -(-n * TILE // (32 * per_entry)))  # a thread for each output
    return of(
        blocks=blocks,
        at_once=entries,
        buffers=2 if two == one else 1,  # where they cost no block
        resident=max(1, one),
        down_resident=max(1, 20 // (per_entry * entries)),
    )


def launches_as(
    layout: ExpertLayout,
    *,
    n: int,
    blocks: int,
    per_entry: int,
    at_once: int,
    buffers: int = 1,
    resident: int = 1,
    down_copies: int = 1,
    down_resident: int = 1,
) -> Launches:
    """With these choices, whether they fit or not; buffers count where a block has several tiles."""
    of_pass = min(n, MOST_PASS)
    passes = -(-n // of_pass)
    unit, down_unit = unit_columns(layout.hidden), down_columns(layout)
    buffers = 0 if blocks == layout.width // TILE else buffers
    copy = copy_bytes(layout.gate, unit) + copy_bytes(layout.up, unit)
    of_warp = activation_bytes(unit, of_pass) + (4 if buffers == 2 else 2) * SUMS + copy
    of_down_warp = (
        activation_bytes(down_unit, of_pass) + passes * SUMS + down_copies * copy_bytes(layout.down, down_unit)
    )
    of_entry = per_entry * of_down_warp + of_pass * passes * TILE * 4
    return Launches(
        of_pass=of_pass,
        passes=passes,
        unit=unit,
        units=layout.hidden // unit,
        shared_bytes=layout.hidden // unit * of_warp,
        blocks=blocks,
        buffers=buffers,
        resident=resident,
        down_unit=down_unit,
        down_units=layout.width // down_unit,
        per_entry=per_entry,
        at_once=at_once,
        down_copies=down_copies,
        down_resident=down_resident,
        down_shared_bytes=at_once * of_entry,
    )


def kernel_names(layout: ExpertLayout, how: Launches) -> tuple[str, str]:
    """The two instantiations in experts.cu."""
    gate_up = f"{int(layout.gate)}, {int(layout.up)}, {how.unit}, {how.buffers}, {how.units}"
    down = f"{int(layout.down)}, {how.down_unit}, {how.down_units}, {how.per_entry}, {how.at_once}, {how.down_copies}"
    return (
        f"gate_up_kernel<{gate_up}, {how.of_pass}, {how.resident}>",
        f"down_kernel<{down}, {how.of_pass}, {how.passes}, {how.down_resident}>",
    )


class StepExpertKernels:
    """All routed experts of decode steps on one device."""

    def __init__(self, device: torch.device, programs: Programs, *, rule: Callable[..., Launches] = launches) -> None:
        """`rule`: what cuts, with the parameters of `launches`."""
        self._device, self._programs, self._rule = device, programs, rule
        self._max_shared = most_shared(device)
        self._hidden: dict[tuple[int, int, int], Tensor] = {}

    def run(self, buffers: StepBuffers, x: Tensor, arena: Tensor, *, layout: ExpertLayout, acc: Tensor) -> None:
        """Add the weighted outputs of the plan's experts to acc f32 [n, hidden], in place; x f32 [n, hidden].

        Every entry's bytes are in the arena (u8) at its offset.
        """
        n, hidden, width = buffers.n, layout.hidden, layout.width
        assert x.shape == (n, hidden)
        assert x.dtype == torch.float32
        assert x.stride(1) == 1
        assert x.stride(0) % 4 == 0
        assert acc.shape == (n, hidden)
        assert acc.is_contiguous()
        assert layout.up_at % 16 == 0
        assert layout.down_at % 16 == 0
        how = self._rule(layout, n=n, top_k=buffers.top_k, max_shared=self._max_shared)
        values = self._room(buffers.n_entries, n, width=width)
        gate_up, down = kernel_names(layout, how)
        self._programs.kernel(SOURCE, gate_up, GATE_UP).launch(
            (how.blocks, buffers.n_entries, 1),
            32 * how.units,
            how.shared_bytes,
            (
                x,
                x.stride(0),
                arena,
                buffers.experts,
                buffers.offsets,
                buffers.chosen_by,
                row_bytes(layout.gate, hidden),
                row_bytes(layout.up, hidden),
                layout.up_at,
                values,
                n,
                width,
            ),
            overlaps_previous=True,
        )
        self._programs.kernel(SOURCE, down, DOWN).launch(
            (-(-hidden // TILE), 1, 1),
            32 * how.down_warps,
            how.down_shared_bytes,
            (
                values,
                arena,
                buffers.offsets,
                buffers.chosen_by,
                buffers.weights,
                buffers.count,
                row_bytes(layout.down, width),
                layout.down_at,
                acc,
                n,
                hidden,
            ),
            overlaps_previous=True,
        )

    def _room(self, entries: int, n: int, *, width: int) -> Tensor:
        """Hidden values f32 [entries, n, width]."""
        key = (entries, n, width)
        if key not in self._hidden:
            self._hidden[key] = torch.empty(key, dtype=torch.float32, device=self._device)
        return self._hidden[key]
