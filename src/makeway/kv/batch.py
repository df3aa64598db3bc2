"""The rows of one forward pass and the sequences they belong to.

Owns nothing. Never mixes sequences: a segment is a run of consecutive tokens of one sequence.
Hazard: positions are absolute and start at the sequence's length before the pass.
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
    def of(cls, parts: list[tuple[SequenceState, list[int]]], *, device: torch.device) -> "Batch":
        """A batch of the next tokens of several sequences; KV room must be reserved already."""
        segments: list[Segment] = []
        tokens: list[int] = []
        positions: list[int] = []
        for sequence, new in parts:
            assert new
            segments.append(Segment(sequence, len(tokens), len(new), sequence.length))
            positions += range(sequence.length, sequence.length + len(new))
            tokens += new
        return cls(
            torch.tensor(tokens, device=device),
            torch.tensor(positions, device=device),
            tuple(tokens),
            tuple(segments),
        )
