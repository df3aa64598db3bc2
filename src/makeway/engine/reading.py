"""One stay in the prefill phase: waiting prompts are read, sweep by sweep, until none waits or the time is up.

Owns the sweep that is running and the events that must not leave before decode is back. Never restores (the loop
does, whatever the reason for leaving). Hazard: the first tokens are chosen here, but the cache is still lent: they are
held back in `held`.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.device import HostCopy
from makeway.engine.keeping import Point
from makeway.engine.memory import EngineMemory
from makeway.engine.prefill import OnMixed, OnRouted, Sweep, SweepBuffers, SweepPart
from makeway.engine.request import Event, Request
from makeway.engine.scheduler import Scheduler
from makeway.experts.policies import PromptCounts
from makeway.experts.recorder import Recorder
from makeway.experts.streamed import StreamedExperts
from makeway.kv import BLOCK_TOKENS, RecurrentState, SequenceState

KEEP_EVERY = 8192  # tokens of a long prompt between two points from which it can be resumed
Sample = Callable[[Request, Tensor], list[Event]]


def lent_sweep(
    memory: EngineMemory,
    parts: Sequence[tuple[SequenceState, Sequence[int]]],
    *,
    on_routed: OnRouted,
    on_mixed: OnMixed | None = None,
    cuts: Sequence[Collection[int]] = (),
    with_mtp: bool = False,
) -> tuple[Sweep, StreamedExperts]:
    """A sweep in the room that is lent now, and its executor, to be closed after it; arguments as of `Sweep`."""
    swing, n_tokens = memory.swing, sum(len(tokens) for _, tokens in parts)
    assert swing.layout is not None
    experts = swing.sweep_experts(n_tokens)
    sweep = Sweep(
        memory.model,
        experts,
        parts=parts,
        chunk=swing.layout.chunk,
        buffers=SweepBuffers.in_views(memory.model, n_tokens, swing.buffers, input_type=memory.input_type),
        on_routed=on_routed,
        on_mixed=on_mixed,
        cuts=cuts,
        with_mtp=with_mtp,
        prefetch=experts.prefetch,
    )
    return sweep, experts


class Reading:
    """`unit()` runs one unit of work; `is_over` when the caller must restore."""

    def __init__(
        self,
        memory: EngineMemory,
        scheduler: Scheduler,
        *,
        sequences: dict[int, SequenceState],
        sample: Sample,
        recorder: Recorder | None,
        max_s: float,
    ) -> None:
        """`sample(request, logits row)` chooses a first token; `max_s`: no second sweep begins after so many seconds
        while answers wait."""
        self.held: list[Event] = []
        self.is_over = False
        self.timed_out = False
        self.n_sweeps = 0
        self.n_tokens = 0
        self._memory, self._scheduler, self._sequences = memory, scheduler, sequences
        self._sample, self._recorder, self._max_s = sample, recorder, max_s
        self._began_s = time.perf_counter()
        self._sweep: Sweep | None = None
        self._experts: StreamedExperts | None = None
        self._steps: Iterator[None] = iter(())
        self._readers: dict[int, Request] = {}  # by the first row of their part
        self._counts: dict[int, PromptCounts] = {}
        self.kept: list[Point] = []
        self._captured: dict[
            tuple[int, int], dict[tuple[str, int], HostCopy]
        ] = {}  # by first row of a part, and tokens

    def unit(self) -> list[Event]:
        """One unit of work, and the progress it made."""
        if self._sweep is None:
            self._begin_sweep()
        sweep = self._sweep
        if sweep is None:
            self.is_over = True
            return []
        next(self._steps, None)
        bytes_left = self._bytes_left(sweep)
        events = [
            Event(
                r.id,
                "progress",
                n_done=r.n_read + sweep.part_done(part),
                n_prompt=r.n_prompt,
                bytes_left=bytes_left,
                eta_s=_eta_s(r, r.n_read + sweep.part_done(part)),
            )
            for part, r in self._live(sweep)
            if r.n_answer == 0
        ]
        if sweep.is_done:
            self._end_sweep(sweep)
        return events

    def drop(self, request: Request) -> None:
        """A cancelled request leaves: its rows are not computed any more and none of its events gets out."""
        self.held = [e for e in self.held if e.request_id != request.id]
        if self._sweep is None or not any(r is request for r in self._readers.values()):
            return
        self._sweep.drop(self._sequences[request.id])
        first = next(first for first, r in self._readers.items() if r is request)
        del self._readers[first]
        if self._recorder is not None:
            self._recorder.drop(first)
        if not self._readers:
            self._close_sweep()

    def close(self) -> None:
        """Nothing is read any more: lets go of the room that was lent, also after a fault. The sweep calls back, so it
        would stay alive with this object."""
        self._sweep = self._experts = None
        self._steps = iter(())

    def prompt_counts(self) -> NDArray[np.float32]:
        """[layers, experts]: what was routed, the tail of each prompt weighted most."""
        plan = self._memory.plan
        total = np.zeros((len(plan.layers), plan.sizes.n_experts), dtype=np.float32)
        for counts in self._counts.values():
            total += counts.counts
        return total

    def _begin_sweep(self) -> None:
        """The next tokens of the prompts that wait, as many as the lent room holds."""
        readers = self._scheduler.reading()
        late = time.perf_counter() - self._began_s > self._max_s
        self.timed_out = bool(readers) and self.n_sweeps > 0 and late and self._scheduler.n_decoding > 0
        if not readers or self.timed_out:
            return
        memory, swing = self._memory, self._memory.swing
        wish = memory.plan.lend_for(sum(r.n_to_read - r.n_read for r in readers))
        lent = swing.lending
        if lent is None or (wish.sweep_tokens > lent.sweep_tokens and wish.n_kept <= lent.n_kept):
            swing.release(wish)
        assert swing.lending is not None
        room = swing.lending.sweep_tokens
        parts: list[tuple[SequenceState, list[int]]] = []
        cuts: list[set[int]] = []
        self._readers = {}
        self._captured = {}
        n_tokens = 0
        for r in readers:
            tokens = r.tokens[r.n_read : min(r.n_to_read, r.n_read + room - n_tokens)]
            if tokens:
                cuts.append(self._cuts(r, len(tokens)))
                self._captured |= {(n_tokens, n): {} for n in cuts[-1]}
                self._readers[n_tokens] = r
                parts.append((self._sequences[r.id], tokens))
                n_tokens += len(tokens)
                r.started_s = r.started_s or time.perf_counter()
        self._sweep, self._experts = lent_sweep(
            memory,
            parts,
            on_routed=self._count,
            on_mixed=self._capture,
            cuts=cuts,
            with_mtp=memory.plan.sizes.with_mtp,
        )
        self._steps = self._sweep.steps()

    def _end_sweep(self, sweep: Sweep) -> None:
        """Requests move on; those read to the end choose their first token."""
        for part, r in self._live(sweep):
            self._keep(part, r)
            r.n_read += len(part.tokens)
            self.n_tokens += len(part.tokens)
            if self._recorder is not None:
                self._recorder.write(part.first, "prefill", sequence=r.id)
            if not r.is_reading and r.n_answer == 0:
                logits = self._memory.model.head(sweep.residual(part)[-1:])[0]
                self.held += self._sample(r, logits)
        self.n_sweeps += 1
        self._close_sweep()

    def _bytes_left(self, sweep: Sweep) -> int:
        """What the plan expects to cross the link for the tokens that still wait."""
        lending = self._memory.swing.lending
        assert lending is not None
        waiting = sum(r.n_to_read - r.n_read for r in self._scheduler.reading()) - sweep.tokens_done
        return lending.copied_bytes * max(0, waiting) // lending.n_tokens

    def _cuts(self, r: Request, n_tokens: int) -> set[int]:
        """Where the next `n_tokens` of a request are kept for others: the last block's end, ends of messages, and every
        `KEEP_EVERY` tokens; counted from where this sweep begins."""
        last = r.n_read + n_tokens
        messages = {end // BLOCK_TOKENS * BLOCK_TOKENS for end in r.message_ends if end <= last}
        ends = {last // BLOCK_TOKENS * BLOCK_TOKENS, *messages, *range(KEEP_EVERY, last, KEEP_EVERY)}
        return {end - r.n_read for end in ends if end > r.n_read} if self._memory.prefixes.budget_bytes else set()

    def _capture(self, layer: int, part: SweepPart, n: int) -> None:
        """The mixer of a layer stands at a cut: copy its state, which the next chunk changes."""
        captured = self._captured.get((part.first, n))
        if captured is not None:
            tensors = part.sequence.state.tensors
            captured.update({key: HostCopy(t) for key, t in tensors.items() if key[1] == layer})

    def _keep(self, part: SweepPart, r: Request) -> None:
        """The cuts of a part that is read are complete."""
        for (first, n), copies in self._captured.items():
            if first == part.first:
                end, state = r.n_read + n, RecurrentState({key: copy.take() for key, copy in copies.items()})
                windows = part.sequence.state.windows.items()
                state.windows.update({layer: tuple(r.tokens[end - len(w) : end]) for layer, w in windows})
                self.kept.append(Point(r, end, state))

    def _close_sweep(self) -> None:
        """Over or given up: nothing is computed before the copies under way are complete."""
        if self._experts is not None:
            self._experts.close()
        self.close()

    def _live(self, sweep: Sweep) -> list[tuple[SweepPart, Request]]:
        return [(part, self._readers[part.first]) for part in sweep.parts if part.first in self._readers]

    def _count(self, layer: int, part: SweepPart, ids: torch.Tensor) -> None:
        """What a layer routed for a part: for the restore's order and for the trace."""
        r = self._readers[part.first]
        plan = self._memory.plan
        if r.id not in self._counts:
            self._counts[r.id] = PromptCounts(len(plan.layers), plan.sizes.n_experts, n_tokens=r.n_to_read)
        self._counts[r.id].add(layer, ids.cpu().numpy(), first_token=r.n_read)
        if self._recorder is not None:
            self._recorder.add(part.first, layer, ids)


def _eta_s(r: Request, n_done: int) -> float | None:
    """Seconds until a prompt is read, at its pace since it began; None before anything is."""
    n_new = n_done - r.n_cached
    if n_new <= 0:
        return None
    return (r.n_prompt - n_done) * (time.perf_counter() - r.started_s) / n_new
