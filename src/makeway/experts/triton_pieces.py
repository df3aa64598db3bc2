"""Pieces of a sweep on a GPU: sorted tokens, decoded weights and grouped products in the prefill workspace.

Owns how the workspace is cut. Never allocates for a token, and never changes the sum's order.
Hazard: the workspace is written anew by every piece, so nothing in it outlives a call but the sort of the layer.
"""

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
from makeway.kernels.triton.sweep_experts import ExpertMatrices, SweepRows, SweepScratch, run_piece
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
        self._where: Tensor | None = None

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
        on_host = torch.from_numpy(where)
        if self._arena.is_cuda:
            on_host = on_host.pin_memory()  # else the copy would wait for everything before it
        self._where = on_host.to(self._arena.device, non_blocking=True)

    def add(self, experts: range) -> None:
        assert self._moe is not None
        assert self._cut is not None
        assert self._pairs is not None
        assert self._scratch is not None
        assert self._uses is not None
        assert self._where is not None
        uses, (n, top_k, _, matrices) = self._uses, self._cut
        if uses.counts is not None and not uses.counts[experts.start : experts.stop].any():
            return
        fits = n * min(top_k, len(experts)) <= self._scratch.hidden.shape[0]
        knows = uses.counts is not None or n * top_k >= WORTH_WAITING or not fits
        run_piece(
            SweepRows(x=self._moe.x, weights=self._moe.weights, acc=self._moe.acc, pairs=self._pairs),
            self._arena,
            where=self._where[experts.start : experts.stop],
            first=experts.start,
            matrices=matrices,
            scratch=self._scratch,
            counts=(lambda: uses.get()[experts.start : experts.stop]) if knows else None,
        )

    def _carve(self, n: int, top_k: int, n_experts: int, matrices: ExpertMatrices) -> tuple[SortedPairs, SweepScratch]:
        """The sort, and behind it scratch for as many rows as there is room for. Raises EngineFailed."""
        pairs = SortedPairs.of(self._workspace, n, top_k, n_experts=n_experts)
        room = self._workspace[align_up(SortedPairs.nbytes(n, top_k, n_experts)) :]
        fixed = SweepScratch.nbytes(matrices, n_experts=self._piece, n_rows=0)
        per_row = 2 * matrices.d_ff + 4 * matrices.d
        n_rows = min((room.numel() - fixed - 1024) // per_row, n * top_k)
        if n_rows < 1:
            raise EngineFailed(
                f"the workspace of {self._workspace.numel()} bytes holds no piece of {self._piece} experts"
            )
        return pairs, SweepScratch.of(room, matrices, n_experts=self._piece, n_rows=n_rows)
