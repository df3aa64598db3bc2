"""Pieces of a sweep on a GPU: sorted tokens, decoded weights and grouped products in the prefill workspace.

Owns how the workspace is cut. Never allocates for a token, and never changes the sum's order.
Hazard: the workspace is written anew by every piece, so nothing in it outlives a call but the sort of the layer.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.routed import RoutedInput
from makeway.kernels.triton.sort import SortedPairs, sort_pairs
from makeway.kernels.triton.sweep_experts import ExpertMatrices, SweepRows, SweepScratch, run_piece
from makeway.memory.facts import align_up


class TritonPieces:
    """`moe.x` in bfloat16."""

    def __init__(self, cache: ExpertCache, *, arena: Tensor, workspace: Tensor, piece_experts: int) -> None:
        """`arena` u8: all of it; `workspace` u8: scratch inside it."""
        self._cache, self._arena, self._workspace, self._piece = cache, arena, workspace, piece_experts
        self._rows: SweepRows | None = None
        self._scratch: SweepScratch | None = None
        self._matrices: ExpertMatrices | None = None
        self._counts: Sequence[int] = ()

    def start(self, layer: int, moe: RoutedInput, counts: Sequence[int]) -> None:
        n, top_k = moe.ids.shape
        gate, up, down = self._cache.store.layers[layer].shapes
        matrices = ExpertMatrices(gate.n_cols, gate.n_rows, gate.type, up.type, down.type)
        n_experts = self._cache.store.layers[layer].n_experts
        at = align_up(SortedPairs.nbytes(n, top_k, n_experts))
        pairs = SortedPairs.of(self._workspace[:at], n, top_k, n_experts=n_experts)
        sort_pairs(moe.ids, pairs)
        room = self._workspace[at:]
        fixed = SweepScratch.nbytes(matrices, n_experts=self._piece, n_rows=0)
        per_row = 2 * matrices.d_ff + 4 * matrices.d
        n_rows = min((room.numel() - fixed - 1024) // per_row, n * top_k)
        if n_rows < 1:
            raise EngineFailed(
                f"the workspace of {self._workspace.numel()} bytes holds no piece of {self._piece} experts"
            )
        self._scratch = SweepScratch.of(room, matrices, n_experts=self._piece, n_rows=n_rows)
        self._rows = SweepRows(x=moe.x, weights=moe.weights, acc=moe.acc, pairs=pairs)
        self._matrices, self._counts = matrices, counts

    def add(self, experts: Sequence[int], rooms: Sequence[Tensor]) -> None:
        assert self._rows is not None
        assert self._scratch is not None
        assert self._matrices is not None
        first, last = experts[0], experts[-1]
        where = [0] * (last - first + 1)
        base = self._arena.data_ptr()
        for expert, room in zip(experts, rooms, strict=True):
            where[expert - first] = room.data_ptr() - base
        run_piece(
            self._rows,
            self._arena,
            where=torch.tensor(where, device=self._arena.device),
            first=first,
            matrices=self._matrices,
            scratch=self._scratch,
            counts=self._counts[first : last + 1],
        )
