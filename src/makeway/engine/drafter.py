"""Where drafts come from: the model's MTP block, or text that has occurred before.

Owns the index of each text, and keeps the MTP block's keys and values in step with what was accepted. Never decides how
many are drafted or which stand. Hazard: a draft is only a guess, so nothing here may be needed for a right answer.
"""

from collections.abc import Sequence

import torch

from makeway.engine.decode import DecodeStep, Standing
from makeway.kv import SequenceState

GRAM = 3
"""Tokens that must agree before text is copied."""
LONG_MATCH = 6
"""Agreeing tokens from which a copy is trusted more than the MTP block."""
PLACES = 4
"""Occurrences of a gram that are looked at, the latest."""


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


class MtpDrafter:
    """Chains of greedy drafts from the MTP block.

    The block reads token t at position t with the trunk's state of t - 1. Between steps it has the keys and values of
    every position the sequence has read, made from the trunk's states, and the sequence keeps the state of its last.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step

    def draft(self, sequences: Sequence[SequenceState], last: Sequence[int], depths: Sequence[int]) -> list[list[int]]:
        """`depths[i]` tokens to follow `last[i]`, the one chosen but not read yet; room for them must be reserved."""
        drafts: list[list[int]] = [[] for _ in sequences]
        rows = [i for i, depth in enumerate(depths) if depth]
        if not rows:
            return drafts
        states = torch.stack([self._step.tail(sequences[i]) for i in rows])
        for ahead in range(max(depths)):
            keep = [n for n, i in enumerate(rows) if depths[i] > ahead]
            if len(keep) < len(rows):
                states, rows = states[keep], [rows[n] for n in keep]
            parts = [(sequences[i], [drafts[i][-1] if ahead else last[i]]) for i in rows]
            logits, states = self._step.draft(parts, states, ahead=ahead)
            for i, token in zip(rows, logits.argmax(dim=-1).tolist(), strict=True):
                drafts[i].append(token)
        return drafts

    def follow(self, standing: Sequence[Standing]) -> None:
        """The rows that stand were read: their keys and values are made again, from the trunk's states."""
        self._step.follow(standing)
