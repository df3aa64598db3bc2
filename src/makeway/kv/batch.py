"""The rows of one forward pass and the sequences they belong to.

Owns nothing. Never mixes sequences: a segment is a run of consecutive tokens of one sequence.
Hazard: positions are absolute and count from the sequence's first token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kv.sequence import SequenceState


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
    """tokens int64 [n], positions int64 [n], both on the device; host_tokens the same as integers."""

    tokens: Tensor
    positions: Tensor
    host_tokens: tuple[int, ...]
    segments: tuple[Segment, ...]

    @classmethod
    def of(cls, parts: list[tuple[SequenceState, list[int]]], *, device: torch.device, offset: int = 0) -> "Batch":
        """A batch of tokens of several sequences, `offset` tokens after each one's length (a later chunk of a sweep);
        KV room must be reserved already."""
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, new in parts:
            assert new
            start = sequence.length + offset
            segments.append(Segment(sequence, len(tokens), len(new), start))
            positions += range(start, start + len(new))
            tokens += new
        return cls(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            tuple(tokens),
            tuple(segments),
        )
