"""Everything a model remembers of one sequence: its length, KV blocks and recurrent state.

Owns one `BlockTable` and one place of the `StatePool`. Never computes. Hazard: `length` counts tokens whose KV is
written in every layer; inside a forward pass it still is the length before the pass.
"""

from dataclasses import dataclass

import torch

from makeway.kernels import Ops, Rows, Span
from makeway.kv.blocks import BLOCK_TOKENS, BlockTable
from makeway.kv.cache import KVCache
from makeway.kv.state import RecurrentState, StatePool


@dataclass(frozen=True)
class SequenceSnapshot:
    """A point to come back to: the length and a deep copy of the recurrent state (KV stays where it is)."""

    length: int
    state: RecurrentState

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class SequenceState:
    """Open one per sequence; `close()` gives its blocks and its place back.

    A verify step ends in `hold`, then `accept` says how many of its `n_held` rows stand; their `n_replay` kept inputs
    move the recurrent state on when the next pass loads it, or at once by `settle`. Raises UserError when all places
    of `states` are taken.
    """

    def __init__(self, cache: KVCache, states: StatePool) -> None:
        self.cache = cache
        self.states = states
        self.table = BlockTable(cache.pool)
        self.place, self.state = states.open()
        self.length = 0
        self.n_held = 0
        self.n_replay = 0
        self._farthest = 0
        self._closed = False

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent state (KV bytes belong to the cache)."""
        return self.state.nbytes

    def fits(self, n_more: int) -> bool:
        """Whether `reserve(n_more)` would succeed."""
        return self.table.fits(self.length + n_more)

    def reserve(self, n_more: int) -> None:
        """KV room for `n_more` tokens; raises UserError when the cache is full."""
        self.table.reserve(self.length + n_more)

    def advance(self, n_tokens: int) -> None:
        """The pass of all trunk layers over the next `n_tokens` tokens is complete."""
        assert not self.n_held, "rows of a verify step wait for accept()"
        self.length += n_tokens
        self.n_replay = 0
        self._farthest = max(self._farthest, self.length)

    def hold(self, n_rows: int) -> None:
        """The verify step of all trunk layers over the next `n_rows` tokens is complete; which stand is open."""
        assert not self.n_held, "rows of a verify step wait for accept()"
        self.n_held = n_rows
        self.n_replay = 0
        self._farthest = max(self._farthest, self.length + n_rows)

    def accept(self, n_rows: int) -> None:
        """The first `n_rows` (0 to all) rows of the verify step stand; the others, and their KV, never were."""
        assert 0 <= n_rows <= self.n_held, f"{n_rows} rows of {self.n_held}"
        self.n_held = 0
        self.n_replay = n_rows if self.states.shapes.is_recurrent else 0
        self.length += n_rows
        self.table.shrink(self.length)
        self.state.accept(n_rows)

    def settle(self, ops: Ops) -> None:
        """Replays the rows that stand now, so that the recurrent state is that of `length`."""
        if self.n_replay:
            here = torch.tensor([], dtype=torch.int64, device=next(iter(self.states.tensors.values())).device)
            span = Span(0, 0, self.length, self.table.blocks, self.place, self.n_replay)
            self.states.replay(ops, Rows(here, (span,), max_keys=self.length))
            self.n_replay = 0

    def truncate(self, length: int) -> None:
        """Forgets every token from `length` on. Only where no recurrent state would have to run backwards, and,
        with an indexer, only as far as its ring of raw keys reaches (or to a whole number of KV blocks)."""
        assert 0 <= length <= self.length
        assert not self.n_held, "rows of a verify step wait for accept()"
        assert not self.states.shapes.is_recurrent, "recurrent state cannot be truncated: restore a snapshot"
        back = self._farthest - length
        assert length % BLOCK_TOKENS == 0 or all(
            back <= s.ring_rows - s.ratio for s in self.cache.shapes.values() if s.index_dim
        ), "the ring of raw indexer keys does not reach back that far"
        self._set_length(length)

    def snapshot(self, device: torch.device | None = None) -> SequenceSnapshot:
        """The state as it is now, copied to `device` (its own when None); kept rows must be settled."""
        assert not self.n_held, "rows of a verify step wait for accept()"
        assert not self.n_replay, "call settle() first"
        return SequenceSnapshot(self.length, self.state.snapshot(device))

    def restore(self, snapshot: SequenceSnapshot) -> None:
        """Back to `snapshot`, an earlier point of this same sequence."""
        assert snapshot.length <= self.length
        self.state.restore(snapshot.state)
        self.n_held = self.n_replay = 0
        self._set_length(snapshot.length)

    def _set_length(self, length: int) -> None:
        self.length = length
        self.table.shrink(length)
        if length % BLOCK_TOKENS == 0:
            self._farthest = length

    def close(self) -> None:
        """May be called twice."""
        if not self._closed:
            self._closed = True
            self.table.shrink(0)
            self.states.places.give_back(self.place)
            self.length = 0
