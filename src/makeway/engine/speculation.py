"""One decode step of several answers, with drafts: how many, from where, which stand, and what was learnt.

Owns the drafters and what each answer's drafts were worth. Never samples and never ends an answer (the caller does).
Hazard: the caller must not change a sequence between a step and the next one but by closing it.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from makeway.engine.decode import DecodeStep
from makeway.engine.depth import HOPE, Acceptance, DepthChooser, Drafting, Source, StepCosts, Track, Wish
from makeway.engine.drafter import GRAM, LATE_TOKENS, LONG_MATCH, MtpDrafter, TextIndex
from makeway.engine.request import DraftCounts, Request
from makeway.engine.verify import verify
from makeway.kv import SequenceState

Choose = Callable[[Request, Tensor], None]
"""Appends the next token to the request, from logits [vocab], and marks it finished when that was its last."""


@dataclass(frozen=True)
class _Turn:
    """One answer's part in a step."""

    request: Request
    sequence: SequenceState
    source: Source | None
    drafts: list[int]
    was_due: bool


class Speculation:
    """`step` runs one step; `settle` a sequence whose state is copied; `forget` a request that is gone. What a step
    costs is measured by `clock`, seconds."""

    def __init__(self, drafting: Drafting, step: DecodeStep, *, n_rows: int, totals: DraftCounts) -> None:
        """`n_rows`: rows of a step at most. `totals` goes on counting."""
        self.drafting = drafting
        self.totals = totals
        self.clock: Callable[[], float] = time.perf_counter
        self._step, self._n_rows = step, n_rows
        self._mtp = MtpDrafter(step) if "mtp" in drafting.sources else None
        self._costs = StepCosts()
        self._chooser = DepthChooser(drafting, self._costs)
        self._texts: dict[int, TextIndex] = {}
        self._tracks: dict[int, Track] = {}
        self._hopes: dict[Source, Acceptance] = {
            source: Acceptance((HOPE[source],) * drafting.depth) for source in drafting.sources
        }

    def step(self, answers: Sequence[tuple[Request, SequenceState]], choose: Choose, *, block_tokens: int = 0) -> None:
        """The next tokens of all answers, at most `n_rows` of them; each sequence has room for one token.

        block_tokens: no step reads beyond a multiple of it, so that the end of each block is a point between two steps
        (0: no matter).
        """
        assert 0 < len(answers) <= self._n_rows
        began_s = self.clock()
        turns = self._turns(answers, block_tokens)
        drafted_s = self.clock()
        keep_rows = any(turn.drafts for turn in turns)
        parts = [(turn.sequence, [turn.request.tokens[-1], *turn.drafts]) for turn in turns]
        rows = self._step.run(parts, keep_rows=keep_rows, names=[turn.request.id for turn in turns])
        for turn, segment, (_, tokens) in zip(turns, rows.segments, parts, strict=True):
            n = self._verify(turn, rows.logits[segment.rows], choose)
            if keep_rows:
                turn.sequence.accept(n)
            turn.request.n_read += n
            is_drafted = bool(turn.drafts) and turn.source == "mtp"
            if self._mtp is not None:
                residual = rows.residual[segment.rows][:n]
                self._mtp.follow(turn.sequence, tokens[:n], residual, is_drafted=is_drafted)
        if self._mtp is not None:
            self._mtp.catch_up([turn.sequence for turn in turns], least=LATE_TOKENS)
        self._step.end()
        self._costs.observe(
            sum(len(tokens) for _, tokens in parts),
            step_s=self.clock() - drafted_s,
            n_passes=max((len(turn.drafts) for turn in turns if turn.source == "mtp"), default=0),
            draft_s=drafted_s - began_s,
        )

    def settle(self, sequence: SequenceState) -> None:
        """Nothing of what the sequence has read is late: its state is that of its length."""
        if self._mtp is not None:
            self._mtp.catch_up([sequence])
        self._step.settle(sequence)

    def forget(self, request: Request) -> None:
        """The request has ended."""
        self._texts.pop(request.id, None)
        self._tracks.pop(request.id, None)

    def _turns(self, answers: Sequence[tuple[Request, SequenceState]], block_tokens: int) -> list[_Turn]:
        """Chooses the depths, reserves the room and drafts."""
        if not self.drafting.sources:
            return [_Turn(r, sequence, None, [], False) for r, sequence in answers]
        copies, wishes = [], []
        for r, sequence in answers:
            most = min(self.drafting.depth, r.max_tokens - r.n_answer - 1)
            if block_tokens:
                most = min(most, block_tokens - 1 - sequence.length % block_tokens)
            while most > 0 and not sequence.fits(1 + most):
                most -= 1
            copies.append(self._copy(r, most))
            wishes.append(self._wish(r, most, copies[-1]))
        depths = self._chooser.choose(wishes, n_rows=self._n_rows)
        for i, (_, sequence) in enumerate(answers):
            while depths[i] and not sequence.fits(1 + depths[i]):  # the others have taken the room by now
                depths[i] -= 1
            sequence.reserve(1 + depths[i])
        from_block = [d if w is not None and w.source == "mtp" else 0 for d, w in zip(depths, wishes, strict=True)]
        chains: list[list[int]] = [[] for _ in answers]
        if any(from_block):
            assert self._mtp is not None
            chains = self._mtp.draft([s for _, s in answers], [r.tokens[-1] for r, _ in answers], from_block)
        turns = []
        for (r, sequence), wish, depth, copy, chain in zip(answers, wishes, depths, copies, chains, strict=True):
            source = None if wish is None else wish.source
            was_due = wish is not None and wish.track.is_due and depth == 1
            turns.append(_Turn(r, sequence, source, chain if source == "mtp" else copy[:depth], was_due))
        return turns

    def _copy(self, r: Request, most: int) -> list[int]:
        """Drafts from the text itself; with an MTP block beside them only those of a long match."""
        if "lookup" not in self.drafting.sources or most < 1:
            return []
        least = LONG_MATCH if self._mtp is not None else GRAM
        return self._texts.setdefault(r.id, TextIndex()).guess(r.tokens, most, least_match=least)

    def _wish(self, r: Request, most: int, copy: list[int]) -> Wish | None:
        if most < 1 or (self._mtp is None and not copy):
            return None
        if r.id not in self._tracks:
            self._tracks[r.id] = Track({s: Acceptance(tuple(hope.rates)) for s, hope in self._hopes.items()})
        return Wish("lookup", len(copy), self._tracks[r.id]) if copy else Wish("mtp", most, self._tracks[r.id])

    def _verify(self, turn: _Turn, rows: Tensor, choose: Choose) -> int:
        """Rows that stand; counts what was drafted and accepted."""
        r = turn.request

        def take(row: Tensor) -> int | None:
            choose(r, row)
            return None if r.finished else r.tokens[-1]

        n_before = len(r.tokens)
        n = verify(turn.drafts, rows, take)
        # One more than rows when the text ends with a draft that was right.
        n_right = sum(token == draft for token, draft in zip(r.tokens[n_before:], turn.drafts, strict=False))
        for counts in (r.drafts, self.totals):
            counts.add(len(turn.drafts), n_right)
        if r.id in self._tracks:
            self._tracks[r.id].observe(turn.source, len(turn.drafts), n_accepted=n_right, was_due=turn.was_due)
            if turn.drafts and turn.source is not None:
                self._hopes[turn.source].observe(len(turn.drafts), n_right)
        return n
