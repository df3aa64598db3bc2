"""The routed experts of a sweep, one piece at a time: decode, gate and up, down, and the sum into the residual's input.

Owns how a piece is cut into parts and rounds that fit the scratch; never allocates, and never waits for the device.
Hazard: the sum is in ascending expert id, one float32 addition each, so pieces must come in ascending order; then
neither piece, part, round, nor where an expert's bytes lie changes a bit.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
import triton
from numpy.typing import NDArray
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.kernels.triton.decode import QuantMatrix, decode_matrices
from makeway.kernels.triton.gemm import PlainMatrices, Round, down, gate_up
from makeway.kernels.triton.sort import SortedPairs, combine
from makeway.kernels.triton.unpack import PLANES

SCRATCH_ALIGNMENT = 256

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class ExpertMatrices:
    """An expert's gate [d_ff, d], up [d_ff, d] and down [d, d_ff], one behind the other, and their types."""

    d: int
    d_ff: int
    gate: GGMLType
    up: GGMLType
    down: GGMLType

    @property
    def parts(self) -> tuple[QuantMatrix, QuantMatrix, QuantMatrix]:
        """gate, up and down, where they lie in an expert's bytes."""
        gate = QuantMatrix(self.gate, self.d_ff, self.d)
        up = QuantMatrix(self.up, self.d_ff, self.d, inside=gate.nbytes)
        return gate, up, QuantMatrix(self.down, self.d, self.d_ff, inside=gate.nbytes + up.nbytes)

    @property
    def n_values(self) -> int:
        return 3 * self.d * self.d_ff


@dataclass(frozen=True)
class SweepScratch:
    """weights bf16 [experts at a time, 3 d d_ff]; hidden bf16 [rows at a time, d_ff]; out bf16 [rows at a time, d];
    starts int64 [experts at a time]: the first byte of each expert in `weights`; each int32 [experts at a time + 1]: 0,
    1, ..., the offsets of experts that all have rows."""

    weights: Tensor
    hidden: Tensor
    out: Tensor
    starts: Tensor
    each: Tensor

    @staticmethod
    def nbytes(matrices: ExpertMatrices, *, n_experts: int, n_rows: int) -> int:
        """Bytes of a room for `n_experts` at a time and `n_rows` pairs at a time."""
        return sum(n_bytes for _, _, n_bytes in _layout(matrices, n_experts, n_rows))

    @staticmethod
    def of(room: Tensor, matrices: ExpertMatrices, *, n_experts: int, n_rows: int) -> "SweepScratch":
        """Carve it out of `room`, u8 [>= nbytes], aligned to 256 bytes; `starts` and `each` are written here."""
        at, parts = 0, []
        for shape, dtype, n_bytes in _layout(matrices, n_experts, n_rows):
            used = torch.Size(shape).numel() * dtype.itemsize
            parts.append(room[at : at + used].view(dtype).view(shape))
            at += n_bytes
        assert at <= room.numel()
        torch.arange(0, n_experts * 2 * matrices.n_values, 2 * matrices.n_values, out=parts[3])
        torch.arange(0, n_experts + 1, out=parts[4])
        return SweepScratch(*parts)


def _layout(
    matrices: ExpertMatrices, n_experts: int, n_rows: int
) -> tuple[tuple[tuple[int, ...], torch.dtype, int], ...]:
    """Shape, type and padded bytes of each part of the scratch."""
    shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (
        ((n_experts, matrices.n_values), torch.bfloat16),
        ((n_rows, matrices.d_ff), torch.bfloat16),
        ((n_rows, matrices.d), torch.bfloat16),
        ((n_experts,), torch.int64),
        ((n_experts + 1,), torch.int32),
    )
    return tuple(
        (shape, dtype, -(-torch.Size(shape).numel() * dtype.itemsize // SCRATCH_ALIGNMENT) * SCRATCH_ALIGNMENT)
        for shape, dtype in shapes
    )


@dataclass(frozen=True)
class SweepRows:
    """What the routed experts of a layer work on, for all n tokens of a sweep.

    x bf16 [n, d]; weights f32 [n, k]; acc f32 [n, d], to which the experts' weighted outputs are added; pairs: the sort
    of the routed ids.
    """

    x: Tensor
    weights: Tensor
    acc: Tensor
    pairs: SortedPairs


def can_run(matrices: ExpertMatrices) -> bool:
    """Whether the kernels have these types and shapes."""
    return all(
        part.type in PLANES
        and part.n_cols % PLANES[part.type].step == 0
        and part.inside % max(16, PLANES[part.type].align) == 0
        for part in matrices.parts
    )


def run_piece(
    rows: SweepRows,
    room: Tensor,
    *,
    where: Tensor,
    first: int,
    matrices: ExpertMatrices,
    scratch: SweepScratch,
    counts: Callable[[], Ints] | None = None,
) -> None:
    """Add the outputs of experts first .. first + len(where) - 1 to `rows.acc`.

    room u8: the arena, in which expert first + i starts at byte where[i] (int64, multiples of 16; any value where
    nobody chose the expert). counts: how many pairs each of these experts has, asked for as late as possible, where the
    host can know it; else there are as many launches as the worst routing needs, and those without rows end at once.
    """
    n, top_k = rows.pairs.places.shape
    n_at_a_time = scratch.weights.shape[0]
    for at in range(0, where.shape[0], n_at_a_time):
        some = where[at : at + n_at_a_time]
        n_experts = some.shape[0]
        begin = first + at
        counted = rows.pairs.offsets[begin : begin + n_experts + 1]
        weights = _plain_weights(room, some, matrices, scratch, counted=counted)
        n_pairs = n * min(top_k, n_experts) if counts is None else int(counts()[at : at + n_experts].sum())
        part = Round(rows.pairs, begin, begin + n_experts, 0, n_pairs, triton.next_power_of_2(n_at_a_time))
        _run_rounds(rows, weights, part, matrices=matrices, scratch=scratch)


def run_used(
    rows: SweepRows,
    room: Tensor,
    *,
    experts: range,
    n_pairs: int,
    used: Tensor,
    where: Tensor,
    starts: Tensor,
    matrices: ExpertMatrices,
    scratch: SweepScratch,
) -> None:
    """`run_piece` where the host knows who has rows: `n_pairs` of them in all, and only these experts are decoded.

    used int64: where the first byte of each that has rows lies in the room, at most as many as the scratch takes at a
    time. By expert of the range: where int64, the same; starts int64: the first byte in the scratch of those that have
    rows.
    """
    weights = _plain_weights(room, used, matrices, scratch, counted=scratch.each, by_expert=(where, starts))
    bins = triton.next_power_of_2(rows.pairs.n_experts)  # a few used ones may be far apart
    part = Round(rows.pairs, experts.start, experts.stop, 0, n_pairs, bins, n_used=used.shape[0])
    _run_rounds(rows, weights, part, matrices=matrices, scratch=scratch)


def _run_rounds(
    rows: SweepRows,
    weights: tuple[PlainMatrices, PlainMatrices],
    whole: Round,
    *,
    matrices: ExpertMatrices,
    scratch: SweepScratch,
) -> None:
    """The rows of `whole`, as many at a time as the scratch holds."""
    gates, downs = weights
    for skip in range(0, whole.capacity, scratch.hidden.shape[0]):
        n_rows = min(scratch.hidden.shape[0], whole.capacity - skip)
        part = replace(whole, skip=skip, capacity=n_rows)
        gate_up(rows.x, gates, d_ff=matrices.d_ff, part=part, out=scratch.hidden[:n_rows])
        down(scratch.hidden[:n_rows], downs, part=part, pair_weights=rows.weights, out=scratch.out[:n_rows])
        combine(rows.acc, scratch.out[:n_rows], pairs=rows.pairs, first=part.first, last=part.last, skip=skip)


def _plain_weights(
    room: Tensor,
    where: Tensor,
    matrices: ExpertMatrices,
    scratch: SweepScratch,
    *,
    counted: Tensor,
    by_expert: tuple[Tensor, Tensor] | None = None,
) -> tuple[PlainMatrices, PlainMatrices]:
    """gate with up, and down, as bf16: in place where they are bf16, else decoded into scratch. `by_expert`: where each
    expert of the range lies in the room and in the scratch, unless as `where` and one after the other."""
    in_room, in_scratch = by_expert or (where, scratch.starts)
    gate, up, down_part = matrices.parts
    decoded = scratch.weights
    if gate.type == up.type == GGMLType.BF16:
        gates = PlainMatrices(room.view(torch.bfloat16), in_room, gate.inside, gate.n_values)
    else:
        gates = PlainMatrices(decoded.view(-1), in_scratch, 0, gate.n_values, in_rows=True)
        if gate.type == up.type:  # one behind the other: one matrix
            both = QuantMatrix(gate.type, 2 * gate.n_rows, gate.n_cols, inside=gate.inside)
            decode_matrices(room, where, both, out=decoded, counted=counted)
        else:
            decode_matrices(room, where, gate, out=decoded, counted=counted)
            decode_matrices(room, where, up, out=decoded[:, gate.n_values :], counted=counted)
    if down_part.type == GGMLType.BF16:
        return gates, PlainMatrices(room.view(torch.bfloat16), in_room, down_part.inside)
    behind = gate.n_values + up.n_values
    decode_matrices(room, where, down_part, out=decoded[:, behind:], counted=counted)
    return gates, PlainMatrices(decoded.view(-1), in_scratch, 2 * behind, in_rows=True)
