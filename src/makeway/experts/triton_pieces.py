"""Pieces of a sweep on a GPU: sorted tokens, decoded weights and grouped products in the prefill workspace.

Owns how the workspace is cut. Never allocates for a token, and never changes the sum's order.
Hazard: the workspace is written anew by every piece, so nothing in it outlives a call but the sort of the layer.
"""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.device import HostCopy
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.pieces import Uses
from makeway.experts.routed import RoutedInput
from makeway.kernels.triton.sort import SortedPairs, sort_pairs
from makeway.kernels.triton.sweep_experts import ExpertMatrices, SweepRows, SweepScratch, run_piece, run_used
from makeway.memory.facts import align_up

WORTH_WAITING = 1 << 14
"""Routed pairs from which on it pays to know how many an expert has before its launches: launches for the worst routing
cost more time then than the computation's pause until the host knows."""


class OffsetUses:
    """Uses, from the sort's offsets. `counts`: once somebody has asked for them."""

    def __init__(self, offsets: Tensor) -> None:
        self._copy = HostCopy(offsets)
        self.counts: NDArray[np.int64] | None = None

    def is_there(self) -> bool:
        return self.counts is not None or self._copy.is_there()

    def get(self) -> NDArray[np.int64]:
        if self.counts is None:
            self.counts = np.diff(self._copy.get().numpy()).astype(np.int64)
        return self.counts


class TritonPieces:
    """`moe.x` in bfloat16."""

    def __init__(self, cache: ExpertCache, *, arena: Tensor, workspace: Tensor, piece_experts: int) -> None:
        """`arena` u8: all of it; `workspace` u8: scratch inside it."""
        self._cache, self._arena, self._workspace, self._piece = cache, arena, workspace, piece_experts
        self._cut: tuple[int, int, int, ExpertMatrices] | None = None
        self._pairs: SortedPairs | None = None
        self._scratch: SweepScratch | None = None
        self._moe: RoutedInput | None = None
        self._uses: OffsetUses | None = None
        self._used: NDArray[np.int64] | None = None  # experts that have rows, where that is known before any runs
        # where each expert lies, in the arena and, decoded, in the scratch; where the used ones lie
        self._tables: Sequence[Tensor] = ()

    def start(self, layer: int, moe: RoutedInput) -> Uses:
        n, top_k = moe.ids.shape
        stored = self._cache.store.layers[layer]
        gate, up, down = stored.shapes
        matrices = ExpertMatrices(gate.n_cols, gate.n_rows, gate.type, up.type, down.type)
        cut = n, top_k, stored.n_experts, matrices
        if self._cut != cut:
            self._cut, self._pairs, self._scratch = cut, *self._carve(*cut)
        assert self._pairs is not None
        sort_pairs(moe.ids, self._pairs)
        self._moe, self._uses = moe, OffsetUses(self._pairs.offsets)
        return self._uses

    def place(self, where: NDArray[np.int64]) -> None:
        assert self._uses is not None
        assert self._cut is not None
        counts, n_values = self._uses.counts, self._cut[3].n_values
        self._used = None
        tables = [where]
        if counts is not None:
            self._used = np.flatnonzero(counts)
            starts = np.zeros_like(where)
            starts[self._used] = np.arange(self._used.size) % self._piece * 2 * n_values
            tables += [starts, where[self._used]]
        on_host = torch.from_numpy(np.concatenate(tables))
        if self._arena.is_cuda:
            on_host = on_host.pin_memory()  # else the copy would wait for everything before it
        there = on_host.to(self._arena.device, non_blocking=True)
        self._tables = torch.split(there, [table.size for table in tables])

    def add(self, experts: range) -> None:
        assert self._moe is not None
        assert self._cut is not None
        assert self._pairs is not None
        assert self._scratch is not None
        assert self._uses is not None
        uses, (n, top_k, _, matrices) = self._uses, self._cut
        rows = SweepRows(x=self._moe.x, weights=self._moe.weights, acc=self._moe.acc, pairs=self._pairs)
        these = slice(experts.start, experts.stop)
        if self._used is not None:
            first, last = np.searchsorted(self._used, (experts.start, experts.stop)).tolist()
            assert first % self._piece == 0
            assert last - first <= self._piece
            if first < last:
                run_used(
                    rows,
                    self._arena,
                    experts=experts,
                    n_pairs=int(uses.get()[these].sum()),
                    used=self._tables[2][first:last],
                    where=self._tables[0][these],
                    starts=self._tables[1][these],
                    matrices=matrices,
                    scratch=self._scratch,
                )
            return
        fits = n * min(top_k, len(experts)) <= self._scratch.hidden.shape[0]
        run_piece(
            rows,
            self._arena,
            where=self._tables[0][these],
            first=experts.start,
            matrices=matrices,
            scratch=self._scratch,
            counts=None if fits and n * top_k < WORTH_WAITING else lambda: uses.get()[these],
        )

    def ask_for_kernels(self, layer: int, moe: RoutedInput) -> None:
        n_experts = self._cache.store.layers[layer].n_experts
        self.start(layer, moe)
        assert self._uses is not None
        for counts in (None, np.ones(n_experts, dtype=np.int64)):  # what the host may know of who has rows
            self._uses.counts = counts
            self.place(np.zeros(n_experts, dtype=np.int64))
            self.add(range(min(self._piece, n_experts)))

    def _carve(self, n: int, top_k: int, n_experts: int, matrices: ExpertMatrices) -> tuple[SortedPairs, SweepScratch]:
        """The sort, and behind it scratch for as many rows as there is room for. Raises EngineFailed."""
        pairs = SortedPairs.of(self._workspace, n, top_k, n_experts=n_experts)
        room = self._workspace[align_up(SortedPairs.nbytes(n, top_k, n_experts)) :]
        fixed = SweepScratch.nbytes(matrices, n_experts=self._piece, n_rows=0)
        per_row = 2 * matrices.d_ff + 2 * matrices.d
        n_rows = min((room.numel() - fixed - 1024) // per_row, n * top_k)
        if n_rows < 1:
            raise EngineFailed(
                f"the workspace of {self._workspace.numel()} bytes holds no piece of {self._piece} experts"
            )
        return pairs, SweepScratch.of(room, matrices, n_experts=self._piece, n_rows=n_rows)
