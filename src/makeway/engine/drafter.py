"""Where drafts come from: the model's MTP block, or text that has occurred before.

Owns the index of each text, and keeps the MTP block's keys and values in step with what was accepted. Never decides how
many are drafted or which stand. Hazard: a draft is only a guess, so nothing here may be needed for a right answer.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from makeway.engine.decode import DecodeStep
from makeway.kv import SequenceState

GRAM = 3
"""Tokens that must agree before text is copied."""
LONG_MATCH = 6
"""Agreeing tokens from which a copy is trusted more than the MTP block."""
PLACES = 4
"""Occurrences of a gram that are looked at, the latest."""
LATE_TOKENS = 8
"""The MTP block reads after so many tokens at the latest."""


class TextIndex:
    """Where each gram of one text has occurred; the text only grows."""

    def __init__(self) -> None:
        self._ends: dict[tuple[int, ...], list[int]] = {}
        self._n_seen = 0

    def guess(self, tokens: Sequence[int], most: int, *, least_match: int = GRAM) -> list[int]:
        """At most `most` tokens that followed the longest earlier match of the text's end, the latest of equals;
        none when no match has `least_match` tokens. A copy that reaches the text's end goes on with itself."""
        for end in range(max(self._n_seen, GRAM), len(tokens)):  # the gram before `end`; the text's last is no match
            ends = self._ends.setdefault(tuple(tokens[end - GRAM : end]), [])
            ends.append(end)
            del ends[:-PLACES]
        self._n_seen = max(self._n_seen, len(tokens))
        best, best_length = 0, least_match - 1
        for end in reversed(self._ends.get(tuple(tokens[-GRAM:]), ()) if len(tokens) >= GRAM else ()):
            length = _match_length(tokens, end)
            if length > best_length:
                best, best_length = end, length
        if not best:
            return []
        period = len(tokens) - best
        return [tokens[best + i % period] for i in range(most)]


def _match_length(tokens: Sequence[int], end: int, most: int = 32) -> int:
    """How many tokens before `end` equal those at the text's end."""
    n = 0
    while n < min(most, end) and tokens[end - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


@dataclass
class _Late:
    """Tokens at the end of a sequence that the MTP block has not read, and the trunk's states f32 [n, ...] there."""

    tokens: list[int] = field(default_factory=list)
    states: list[Tensor] = field(default_factory=list)


class MtpDrafter:
    """Chains of greedy drafts from the MTP block.

    The block reads token t at place t beside the trunk's state of t - 1. It reads a sequence's tokens after the trunk,
    and later than that where nothing is drafted: a few together cost as much as one. The sequence keeps the state (its
    "draft" tail) of the last token before those that are late.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._late: WeakKeyDictionary[SequenceState, _Late] = WeakKeyDictionary()

    def draft(self, sequences: Sequence[SequenceState], last: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
        """`depths[i]` tokens to follow `last[i]`, the one chosen but not read yet; room for them must be reserved."""
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = [i for i, depth in enumerate(depths) if depth]
        if not rows:
            return drafts
        self.catch_up([sequences[i] for i in rows])
        states = torch.stack([self._step.tail(sequences[i]) for i in rows])
        for ahead in range(max(depths)):
            keep = [n for n, i in enumerate(rows) if depths[i] > ahead]
            if len(keep) < len(rows):
                states, rows = states[keep], [rows[n] for n in keep]
            parts = [(sequences[i], [drafts[i][-1] if ahead else last[i]]) for i in rows]
            found = self._step.draft(parts, states, ahead=ahead)
            states = found.states
            for i, token in zip(rows, found.best.tolist(), strict=True):
                drafts[i].append(token)
        return drafts

    def follow(self, sequence: SequenceState, tokens: list[int], residual: Tensor, *, is_drafted: bool) -> None:
        """The trunk has read `tokens` for good, with residual f32 [n, ...]; the block reads them when it is due.

        is_drafted: `draft` began with the first of them, which the block has therefore read.
        """
        states = self._step.trunk_state(residual)
        late = self._late.setdefault(sequence, _Late())
        if is_drafted:
            assert not late.tokens
            self._step.tail(sequence).copy_(states[0])
            tokens, states = tokens[1:], states[1:]
        if tokens:
            late.tokens += tokens
            late.states.append(states)

    def catch_up(self, sequences: Iterable[SequenceState], *, least: int = 1) -> None:
        """The block reads what is late of the sequences, of those where it is at least `least` tokens."""
        parts, states = [], []
        for sequence in sequences:
            late = self._late.get(sequence)
            if late is None or len(late.tokens) < least:
                continue
            tail = self._step.tail(sequence)
            states += [tail[None].clone(), *late.states]
            states[-1], last = states[-1][:-1], states[-1][-1]
            parts.append((sequence, late.tokens))
            tail.copy_(last)
            del self._late[sequence]
        if parts:
            self._step.remember(parts, torch.cat(states))
