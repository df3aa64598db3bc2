"""Quantised linear for chunks of many rows: decoded to bf16 scratch, then multiplied on tensor cores.

Owns how a matrix is cut into runs of rows that fit the scratch, and what lies decoded there: a layer's chunks come one
after the other, so with room for a layer's matrices each is decoded once a layer. Never allocates. A row's bits do not
depend on the rows beside it, on how many there are, or on the cut.
Hazard: weights are rounded to bf16, except F16 and F32, which are multiplied as sums of bf16 terms and lose nothing.
"""

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from makeway.gguf.types import GGMLType
from makeway.kernels.triton.ahead import is_ahead
from makeway.kernels.triton.decode import QuantMatrix, decode_matrices, decode_stack
from makeway.kernels.triton.gemm import Tile, described, multiply, multiply_described, tiles_of
from makeway.kernels.triton.quick import quick
from makeway.kernels.triton.unpack import PLANES
from makeway.kernels.weight import Weight

ALIGNED_VALUES = 128  # what is decoded begins at multiples of so many
LEAST_ROWS = 128  # of a run: any matrix's run of so many starts at a multiple of 16 bytes
NARROW = 1024  # outputs at most, of matrices that take the narrow tile
FEW = 512  # rows at most, that take it too
SWATH = 8  # row tiles that go through the columns together, so that both sides stay in the L2 cache


@dataclass(frozen=True)
class LinearScratch:
    """weights bf16 [values at a time]; origin int64 [1], 0, and one int32 [2], (0, 1): one matrix, to be decoded.
    stacks: tables of matrices that were decoded together, by their addresses, which stay as long as the model does, and
    numbers of rows. decoded: what lies in `weights`, in order, by address."""

    weights: Tensor
    origin: Tensor
    one: Tensor
    stacks: dict[tuple[tuple[int, int], ...], tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False)
    decoded: "dict[tuple[int, ...], _Decoded]" = field(default_factory=dict, compare=False)

    @staticmethod
    def of(room: Tensor) -> "LinearScratch":
        """Over all of `room`, u8 and aligned to 256 bytes; the two small tensors are written here."""
        small = room[:16]
        small.copy_(torch.tensor([0] * 12 + [1] + [0] * 3, dtype=torch.uint8))
        return LinearScratch(room[256:].view(torch.bfloat16), small[:8].view(torch.int64), small[8:].view(torch.int32))

    def find(self, weights: Sequence[Weight]) -> Tensor | None:
        """The values of these matrices, if they were decoded together and nothing took their room since."""
        found = self.decoded.get(_addresses(weights))
        if found is None or any(raw() is not w.raw for raw, w in zip(found.raws, weights, strict=True)):
            return None
        return self.weights[found.first : found.end]

    def take(self, n_values: int, weights: Sequence[Weight] = ()) -> Tensor:
        """Room for `n_values` behind what lies there, or at the beginning, where all of that is forgotten. With
        `weights` they will be found there."""
        last = next(reversed(self.decoded.values()), None)
        first = 0 if last is None else -(-last.end // ALIGNED_VALUES) * ALIGNED_VALUES
        if not weights or first + n_values > self.weights.numel():
            self.decoded.clear()
            first = 0
        assert first + n_values <= self.weights.numel()
        if weights and not is_ahead():  # where nothing is decoded nothing is to be found
            self.decoded.pop(_addresses(weights), None)
            raws = tuple(weakref.ref(w.raw) for w in weights)
            self.decoded[_addresses(weights)] = _Decoded(first, first + n_values, raws)
        return self.weights[first : first + n_values]


@dataclass(frozen=True)
class _Decoded:
    """Matrices at first .. end - 1 of the scratch; `raws`: their bytes, as long as they live."""

    first: int
    end: int
    raws: "tuple[weakref.ref[Tensor], ...]"


def _addresses(weights: Sequence[Weight]) -> tuple[int, ...]:
    return tuple(w.raw.data_ptr() for w in weights)


def least_scratch(weight: Weight) -> int:
    """The fewest bytes of scratch with which `chunk_linear` takes this matrix."""
    return 256 + 2 * PLANES[weight.type].parts * LEAST_ROWS * weight.n_cols


def can_multiply(weight: Weight) -> bool:
    """Whether `chunk_linear` has this type and shape."""
    return weight.type in PLANES and weight.n_cols % max(8, PLANES[weight.type].step) == 0


def chunk_linear(x: Tensor, weight: Weight, *, out: Tensor, scratch: LinearScratch) -> None:
    """out f32 or bf16 [n, n_rows] = x times the transposed weight; x bf16 [n, n_cols]; rows of both may be strided.

    The weight is on the device, its first byte at a multiple of 16.
    """
    n, n_cols = x.shape
    assert n_cols == weight.n_cols
    assert out.shape == (n, weight.n_rows)
    assert x.stride(1) == out.stride(1) == 1
    if n == 0:
        return
    raw, tile = _raw(weight), _tile(x, weight.n_rows)
    if weight.type == GGMLType.BF16:
        dense(x, raw.view(torch.bfloat16), out, tile=tile, n_terms=1, term_rows=0)
        return
    n_terms = PLANES[weight.type].parts
    if n_terms * weight.n_rows * n_cols <= scratch.weights.numel():
        chunk_linears(x, [weight], out=out, scratch=scratch)
        return
    run = scratch.weights.numel() // (n_terms * n_cols) // LEAST_ROWS * LEAST_ROWS
    assert run > 0
    room = scratch.take(n_terms * run * n_cols)
    for first in range(0, weight.n_rows, run):
        n_rows = min(run, weight.n_rows - first)
        matrix = QuantMatrix(weight.type, n_rows, n_cols, inside=first * weight.raw.shape[1])
        _decode(raw, matrix, room, scratch=scratch, n_terms=n_terms, term_stride=run * n_cols)
        some = out[:, first : first + n_rows]
        dense(x, room, some, tile=tile, n_terms=n_terms, term_rows=run)


def together(weights: Sequence[Weight], scratch: LinearScratch) -> list[list[int]]:
    """Which of them, by number, `chunk_linears` takes at once: neighbours that are decoded alike and fit the room."""
    groups: list[list[int]] = []
    n_values = 0
    for i, weight in enumerate(weights):
        n_terms = PLANES[weight.type].parts
        n_values += n_terms * weight.n_rows * weight.n_cols
        is_alike = i > 0 and weight.type != GGMLType.BF16 and n_terms == PLANES[weights[i - 1].type].parts
        if is_alike and weights[i - 1].type != GGMLType.BF16 and n_values <= scratch.weights.numel():
            groups[-1].append(i)
        else:
            groups.append([i])
            n_values = n_terms * weight.n_rows * weight.n_cols
    return groups


def chunk_linears(x: Tensor, weights: Sequence[Weight], *, out: Tensor, scratch: LinearScratch) -> None:
    """As `chunk_linear`, for several matrices whose outputs stand side by side in `out`: one product. They must be
    `together`."""
    n, n_cols = x.shape
    n_rows, n_terms = sum(weight.n_rows for weight in weights), PLANES[weights[0].type].parts
    n_values = n_terms * n_rows * n_cols
    if weights[0].type == GGMLType.BF16 or n_values > scratch.weights.numel():
        (weight,) = weights
        chunk_linear(x, weight, out=out, scratch=scratch)
        return
    assert out.shape == (n, n_rows)
    assert x.stride(1) == out.stride(1) == 1
    assert all(weight.n_cols == n_cols for weight in weights)
    if n == 0:
        return
    decoded = scratch.find(weights)
    if decoded is None:
        decoded = scratch.take(n_values, weights)
        _decode_all(weights, decoded, scratch=scratch, n_rows=n_rows, n_terms=n_terms)
    dense(x, decoded, out, tile=_tile(x, n_rows), n_terms=n_terms, term_rows=n_rows)


def _decode_all(weights: Sequence[Weight], out: Tensor, *, scratch: LinearScratch, n_rows: int, n_terms: int) -> None:
    """All terms of several matrices of `n_rows` together, one below the other."""
    n_cols = weights[0].n_cols
    first = 0
    for kind, stack in itertools.groupby(weights, key=lambda weight: weight.type):
        some = list(stack)
        part = out[first * n_cols :]
        if len(some) == 1:
            matrix = QuantMatrix(kind, some[0].n_rows, n_cols)
            _decode(_raw(some[0]), matrix, part, scratch=scratch, n_terms=n_terms, term_stride=n_rows * n_cols)
        else:
            where, rows = _tables(some, scratch)
            highest = QuantMatrix(kind, max(weight.n_rows for weight in some), n_cols)
            decode_stack(_raw(some[0]), where, highest, out=part, rows=rows, terms=n_terms, term_stride=n_rows * n_cols)
        first += sum(weight.n_rows for weight in some)


def _tables(weights: Sequence[Weight], scratch: LinearScratch) -> tuple[Tensor, Tensor]:
    """For `decode_stack`: where each begins, counted from the first; and its first row behind those before it."""
    key = tuple((_raw(weight).data_ptr(), weight.n_rows) for weight in weights)
    if key not in scratch.stacks:
        device = scratch.weights.device
        where = torch.tensor([address - key[0][0] for address, _ in key], device=device)
        rows = [0, *itertools.accumulate(n_rows for _, n_rows in key)]
        scratch.stacks[key] = where, torch.tensor(rows, dtype=torch.int32, device=device)
    return scratch.stacks[key]


def _decode(
    raw: Tensor, matrix: QuantMatrix, out: Tensor, *, scratch: LinearScratch, n_terms: int, term_stride: int
) -> None:
    """All terms of one matrix."""
    target = out.view(1, -1)
    decode_matrices(
        raw, scratch.origin, matrix, out=target, counted=scratch.one, terms=n_terms, term_stride=term_stride
    )


def _raw(weight: Weight) -> Tensor:
    """The matrix's bytes, u8 [n]."""
    assert can_multiply(weight)
    assert weight.raw.is_contiguous()
    assert weight.raw.data_ptr() % 16 == 0
    return weight.raw.view(-1)


def _tile(x: Tensor, n_rows: int) -> Tile:
    tiles = tiles_of(x.device)
    return tiles.narrow if n_rows <= NARROW or x.shape[0] <= FEW else tiles.linear


def dense(x: Tensor, weights: Tensor, out: Tensor, *, tile: Tile, n_terms: int, term_rows: int) -> None:
    """out = x times the sum of the terms, each bf16 [outputs, x's columns] and `term_rows` rows apart, transposed."""
    n, n_cols = x.shape
    n_rows = out.shape[1]
    left: Tensor | TensorDescriptor = x
    right: Tensor | TensorDescriptor = weights
    if tile.described:
        n_all = term_rows * (n_terms - 1) + n_rows
        left = described(x, tile.rows, tile.depth)
        right = described(weights[: n_all * n_cols].view(n_all, n_cols), tile.columns, tile.depth)
    dense_kernel[(-(-n // tile.rows) * -(-n_rows // tile.columns),)](
        left,
        right,
        out,
        n,
        n_rows,
        n_cols,
        x.stride(0),
        out.stride(0),
        term_rows,
        TERMS=n_terms,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        EVEN=n_cols % tile.depth == 0,
        SWATH=SWATH,
        DESCRIBED=tile.described,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


@quick
@triton.jit(do_not_specialize=["n", "n_rows"])
def dense_kernel(
    x,
    weights,
    out,
    n,
    n_rows,
    n_cols,
    x_stride,
    out_stride,
    term_rows,
    TERMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    EVEN: tl.constexpr,
    SWATH: tl.constexpr,
    DESCRIBED: tl.constexpr,
):
    """One tile of x (sum of the terms)^T; tiles go swath by swath."""
    n_across = tl.cdiv(n_rows, COLUMNS)
    n_down = tl.cdiv(n, ROWS)
    swath = tl.program_id(0) // (SWATH * n_across)
    height = tl.minimum(n_down - swath * SWATH, SWATH)
    inside = tl.program_id(0) % (SWATH * n_across)
    row = (swath * SWATH + inside % height) * ROWS
    column = inside // height * COLUMNS
    rows = row + tl.arange(0, ROWS)
    columns = column + tl.arange(0, COLUMNS)
    if DESCRIBED:
        total = multiply_described(x, weights, row, column, n_cols, ROWS, COLUMNS, DEPTH)
        for _ in tl.static_range(TERMS - 1):
            column += term_rows
            total += multiply_described(x, weights, row, column, n_cols, ROWS, COLUMNS, DEPTH)
    else:
        depth = tl.arange(0, DEPTH)
        left = x + tl.minimum(rows, n - 1).to(tl.int64)[:, None] * x_stride + depth[None, :]
        right = weights + tl.minimum(columns, n_rows - 1).to(tl.int64)[None, :] * n_cols + depth[:, None]
        total = multiply(left, right, n_cols, ROWS, COLUMNS, DEPTH, EVEN)
        for _ in tl.static_range(TERMS - 1):
            right += term_rows.to(tl.int64) * n_cols
            total += multiply(left, right, n_cols, ROWS, COLUMNS, DEPTH, EVEN)
    target = out + rows.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(rows < n)[:, None] & (columns < n_rows)[None, :])
