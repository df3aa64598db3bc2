"""Everything a model remembers of one sequence: its length, KV blocks and recurrent state.

Owns one `BlockTable` and one `RecurrentState`. Never computes. Hazard: `length` counts tokens whose KV is written
in every layer; inside a forward pass it still is the length before the pass.
"""

from dataclasses import dataclass

from makeway.kv.blocks import BlockTable
from makeway.kv.cache import RAW_RING, KVCache
from makeway.kv.state import RecurrentState


@dataclass(frozen=True)
class SequenceSnapshot:
    """A point to come back to: the length and a deep copy of the recurrent state (KV stays where it is)."""

    length: int
    state: RecurrentState

    @property
    def nbytes(self) -> int:
        return self.state.nbytes


class SequenceState:
    """Open one per sequence; `close()` gives its blocks back."""

    def __init__(self, cache: KVCache, state: RecurrentState) -> None:
        self.cache = cache
        self.table = BlockTable(cache.pool)
        self.state = state
        self.length = 0
        self._farthest = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the recurrent state (KV bytes belong to the cache)."""
        return self.state.nbytes

    def reserve(self, n_more: int) -> None:
        """KV room for `n_more` tokens; raises UserError when the cache is full."""
        self.table.reserve(self.length + n_more)

    def advance(self, n_tokens: int) -> None:
        """The pass over the next `n_tokens` tokens is complete."""
        self.length += n_tokens
        self._farthest = max(self._farthest, self.length)

    def truncate(self, length: int) -> None:
        """Forgets every token from `length` on. Only where no recurrent state would have to run backwards, and,
        with an indexer, only as far as its ring of raw keys reaches (or to a multiple of 64)."""
        assert 0 <= length <= self.length
        assert self.state.can_truncate, "recurrent state cannot be truncated: restore a snapshot"
        self._assert_ring_reaches(length)
        self._set_length(length)

    def snapshot(self) -> SequenceSnapshot:
        return SequenceSnapshot(self.length, self.state.snapshot())

    def restore(self, snapshot: SequenceSnapshot) -> None:
        """Back to `snapshot`, an earlier point of this same sequence."""
        assert snapshot.length <= self.length
        self.state.restore(snapshot.state)
        self._set_length(snapshot.length)

    def _assert_ring_reaches(self, length: int) -> None:
        reachable = self._farthest - length <= RAW_RING - 4 or length % 64 == 0
        assert not self.state.raw or reachable, "the ring of raw indexer keys does not reach back that far"

    def _set_length(self, length: int) -> None:
        self.length = length
        self.table.shrink(length)
        if length % 64 == 0:
            self._farthest = length

    def close(self) -> None:
        self.table.shrink(0)
        self.length = 0
