"""The rows of one forward pass and the sequences they belong to.

Owns nothing. Never mixes sequences: a segment is a run of consecutive tokens of one sequence.
Hazard: positions are absolute and count from the sequence's first token.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from makeway.kernels import KVLayer, Rows, Span, Weight
from makeway.kv.cache import KVCache
from makeway.kv.sequence import SequenceState
from makeway.kv.state import StatePool


@dataclass(frozen=True)
class Segment:
    """Rows first..first+n-1 of the batch: tokens of `sequence` from position `position` on."""

    sequence: SequenceState
    first: int
    n: int
    position: int

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.n)


@dataclass(frozen=True)
class Batch:
    """tokens int64 [n] on the device, host_tokens the same as integers; `rows` tells kernels whose rows they are.

    All sequences live in one `cache` and one pool of `states`. `gathered`: rows of tables that were fetched ahead
    and lie on the device, as a model's `gather` names them (a captured graph needs them there); others are read when
    needed.
    """

    tokens: Tensor
    host_tokens: tuple[int, ...]
    segments: tuple[Segment, ...]
    rows: Rows
    cache: KVCache
    states: StatePool
    gathered: Mapping[int, Weight] = field(default_factory=dict)

    @property
    def positions(self) -> Tensor:
        """int64 [n] on the device."""
        return self.rows.positions

    @classmethod
    def of(
        cls,
        parts: list[tuple[SequenceState, list[int]]],
        *,
        device: torch.device,
        offset: int | Sequence[int] = 0,
        keep_rows: bool = False,
    ) -> "Batch":
        """A batch of tokens of several sequences; KV room must be reserved already. `keep_rows`: a verify step, see
        `SequenceState`. `offset`, one for all or one each: they begin so many tokens after the sequence's length (a
        later chunk of a sweep), or before it (the MTP block reads after the trunk)."""
        segments: list[Segment] = []
        spans: list[Span] = []
        tokens: list[int] = []
        positions: list[int] = []
        offsets = [offset] * len(parts) if isinstance(offset, int) else offset
        for (sequence, new), ahead in zip(parts, offsets, strict=True):
            assert new
            assert not sequence.n_held, "rows of a verify step wait for accept()"
            first, n, start = len(tokens), len(new), sequence.length + ahead
            segments.append(Segment(sequence, first, n, start))
            # What a later chunk loads is behind the first one already.
            n_replay = sequence.n_replay if ahead == 0 else 0
            spans.append(Span(first, n, start, sequence.table.blocks, sequence.place, n_replay))
            positions += range(start, start + n)
            tokens += new
        one = parts[0][0]
        assert all(s.cache is one.cache and s.states is one.states for s, _ in parts)
        rows = Rows(
            torch.tensor(positions, device=device),
            tuple(spans),
            max_keys=max(s.position + s.n for s in spans),
            keep=keep_rows,
        )
        return cls(torch.tensor(tokens, device=device), tuple(tokens), tuple(segments), rows, one.cache, one.states)

    def kv(self, layer: int) -> KVLayer:
        """What an attention layer reads and writes."""
        return self.cache.layer(layer, self.states.ring(layer))

    def complete(self) -> None:
        """All trunk layers ran: the sequences advance, or hold the rows of a verify step."""
        for s in self.segments:
            if self.rows.keep:
                s.sequence.hold(s.n)
            else:
                s.sequence.advance(s.n)
