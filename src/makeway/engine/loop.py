"""The loop of an engine: whose turn it is, which phase that needs, and what happens when something breaks.

Owns the requests, their sequences and answers, and the totals. Never changes memory's layout itself (`handover` does).
Hazard: after a fault nothing may go on as if nothing had happened: `_fail` ends every request, in phase `failed`.
"""

import logging
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from makeway.config import EngineConfig
from makeway.engine import sampler
from makeway.engine.answer import Answer
from makeway.engine.decode import DecodeStep
from makeway.engine.depth import Drafting
from makeway.engine.keeping import Keeper
from makeway.engine.memory import EngineMemory
from makeway.engine.phases import Phase
from makeway.engine.reading import Reading, lent_sweep
from makeway.engine.request import DraftCounts, Event, Request
from makeway.engine.scheduler import Scheduler
from makeway.engine.speculation import Speculation
from makeway.errors import EngineFailed, UserError
from makeway.experts.policies import PromptCounts
from makeway.experts.recorder import Recorder
from makeway.experts.trace import TraceHeader, TraceWriter
from makeway.kv import BLOCK_TOKENS, SequenceState, blocks_for

logger = logging.getLogger("makeway.engine")


@dataclass
class Totals:
    """Counted since the engine was opened; a rebuild does not reset them."""

    n_prompt_tokens: int = 0
    n_answer_tokens: int = 0
    n_steps: int = 0
    n_preempted: int = 0
    n_faults: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)


class Loop:
    """`step` is called again and again; `add` and `cancel` between two steps."""

    def __init__(self, memory: EngineMemory, config: EngineConfig, *, after: "Loop | None" = None) -> None:
        """`after`: the loop that failed; totals and trace go on. Raises UserError when the trace cannot be written."""
        self.scheduler = Scheduler(config.parallel)
        self.totals: Totals = after.totals if after is not None else Totals()
        self.failure: str | None = None
        self._memory, self._config = memory, config
        self._sequences: dict[int, SequenceState] = {}
        self._answers: dict[int, Answer] = {}
        self._pending: list[Event] = [] if after is None else after._pending
        self._untold: set[int] = set()  # requests whose last event, a finish or an error, nobody has got yet
        self._reading: Reading | None = None
        self._keeper = Keeper(memory.prefixes, self._sequences)
        self._answers_first_until_s = 0.0
        self._answers_first_steps = 0  # and until so many steps were made
        self._recorder: Recorder | None = after._recorder if after is not None else self._open_trace()
        self.speculation = Speculation(
            Drafting.of(config, has_mtp=memory.model.facts.n_draft_layers > 0),
            DecodeStep(memory, self._recorder),
            n_rows=memory.plan.rows,
            totals=self.totals.drafts,
        )

    @property
    def phase(self) -> Phase:
        return self._memory.swing.phases.now

    @property
    def busy(self) -> bool:
        waits = bool(self._pending) or self._reading is not None  # a reading may hold the events of requests that ended
        return self.scheduler.busy or waits or self._memory.swing.is_refilling

    def add(self, request: Request, answer: Answer) -> None:
        self._answers[request.id] = answer
        self._untold.add(request.id)
        self.scheduler.add(request)

    def cancel(self, request_id: int) -> None:
        """Ends a request at once; its finish event comes with the next step. Unknown ids are ignored."""
        request = next((r for r in self.scheduler.requests if r.id == request_id), None)
        if request is None:
            return
        self._untold.discard(request_id)
        self._pending.append(self._answers[request_id].finish("cancelled"))
        try:
            if self._reading is not None:
                self._reading.drop(request)
            self._release(request)
        except BaseException as fault:
            self._pending += self._fail(fault)
            if not isinstance(fault, Exception):
                raise

    def forget(self, request_id: int) -> None:
        """Nobody waits for this request's events any more."""
        self._pending = [e for e in self._pending if e.request_id != request_id]

    def step(self) -> list[Event]:
        """One unit of work and the events until its end."""
        events, self._pending = self._pending, []
        if self.phase is Phase.FAILED:
            return events
        try:
            events += self._work()
            self._untold -= {e.request_id for e in events if e.kind == "finish"}
            return events
        except Exception as fault:  # noqa: BLE001 - whatever broke, memory is in doubt and every request must be told
            return events + self._fail(fault)
        except BaseException as stop:
            self._pending = events + self._fail(stop)
            raise

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        """Logits f32 [n, vocab] after each token of a fresh sequence, read by the same hand-over as a prompt."""
        if self.scheduler.busy or self._reading is not None:
            raise UserError("logits() needs an engine without requests; wait for them to finish")
        if self.phase is Phase.FAILED:
            raise EngineFailed(f"the engine failed ({self.failure}); rebuild() brings it back")
        sequence = self._memory.open_sequence()
        try:
            return self._read_alone(sequence, list(tokens))
        except BaseException as fault:
            self._pending += self._fail(fault)
            raise
        finally:
            sequence.close()

    def close(self) -> None:
        for sequence in self._sequences.values():
            sequence.close()
        self._sequences.clear()
        self._drop_reading()
        self._keeper.forget()
        if self._recorder is not None:
            self._recorder.close()

    # -- one unit of work ------------------------------------------------------------------------

    def _work(self) -> list[Event]:
        swing = self._memory.swing
        self._admit()
        swing.poll()
        if self._reading is None:
            self._keeper.hand_over_one()
        if self._reading is None and self._should_read():
            self._reading = Reading(
                self._memory,
                self.scheduler,
                sequences=self._sequences,
                sample=self._sample,
                recorder=self._recorder,
                max_s=self._config.max_prefill_s,
            )
        if self._reading is not None:
            events = self._reading.unit()
            return events + self._end_reading() if self._reading.is_over else events
        return self._decode()

    def _should_read(self) -> bool:
        """Prompts go first, unless they have just kept the answers waiting as long as they may."""
        if not self.scheduler.reading():
            return False
        if self.scheduler.n_decoding == 0:
            return True
        return self.totals.n_steps >= self._answers_first_steps and time.perf_counter() >= self._answers_first_until_s

    def _end_reading(self) -> list[Event]:
        """Decode is back before the first tokens leave."""
        reading, swing = self._reading, self._memory.swing
        assert reading is not None
        self.totals.n_prompt_tokens += reading.n_tokens
        self._keeper.add(reading.kept)
        if self.phase is Phase.PREFILL:
            swing.restore(reading.prompt_counts())
            swing.phases.to(Phase.DECODE if self.scheduler.n_decoding else Phase.IDLE)
        if reading.timed_out:
            self._answers_first_until_s = time.perf_counter() + self._config.max_prefill_s / 4
            self._answers_first_steps = self.totals.n_steps + 1
        self._reading = None
        return reading.held

    def _admit(self) -> None:
        """Waiting requests whose tokens fit the KV cache get a sequence and the blocks for all of them."""

        def fits(request: Request) -> bool:
            return self._memory.kv.pool.n_free >= blocks_for(len(request.tokens) + 1)

        while (request := self.scheduler.admit(fits)) is not None:
            sequence = self._memory.open_sequence()
            self._sequences[request.id] = sequence
            sequence.reserve(len(request.tokens) + 1)
            found = self._memory.prefixes.find(request.tokens)
            if found is not None:
                self._memory.prefixes.load(found, sequence)
                request.n_read = len(found.tokens)
                request.n_cached = min(request.n_read, request.n_prompt)

    def _decode(self) -> list[Event]:
        """The next tokens of every answer whose turn it is."""
        requests = self._with_room(self.scheduler.decoding(self._memory.plan.rows))
        if not requests:
            self._rest()
            return []
        events: list[Event] = []
        self.speculation.step(
            [(r, self._sequences[r.id]) for r in requests],
            lambda r, row: events.extend(self._choose(r, row)),
            block_tokens=BLOCK_TOKENS if self._memory.prefixes.budget_bytes else 0,
        )
        self.totals.n_steps += 1
        for r in requests:
            if self._keeper.is_due(r):
                self.speculation.settle(self._sequences[r.id])
                self._keeper.add_answer(r)
            if r.finished:
                self._release(r)
        self._rest()
        return events

    def _rest(self) -> None:
        """The last answer has ended: decoding is over, and there is time to look at its last step."""
        if self.phase is Phase.DECODE and not self.scheduler.n_decoding:
            swing = self._memory.swing
            assert swing.decode is not None
            swing.decode.settle()
            swing.phases.to(Phase.IDLE)

    def _with_room(self, requests: list[Request]) -> list[Request]:
        """Each gets a block for its next token; when there is none, the youngest request gives its memory up."""
        for r in requests:
            sequence = self._sequences.get(r.id)
            if sequence is None:
                continue
            while not sequence.fits(1):
                victim = self.scheduler.preempt()
                self._close_sequence(victim)
                self.totals.n_preempted += 1
                if victim is r:
                    break
            else:
                sequence.reserve(1)
        return [r for r in requests if r.id in self._sequences]

    def _sample(self, request: Request, row: torch.Tensor) -> list[Event]:
        """Chooses the next token and releases the request when it is its last."""
        events = self._choose(request, row)
        if request.finished:
            self._release(request)
        return events

    def _choose(self, request: Request, row: torch.Tensor) -> list[Event]:
        """Chooses the next token of a request from logits [vocab]; the request is finished when it is its last, and
        with an "error" event when its own grammar and bias leave no token."""
        logits = row.cpu().numpy()
        params, grammar = request.sampling, request.grammar
        try:
            token = sampler.choose(
                logits,
                params,
                seed=request.seed,
                position=len(request.tokens),
                seen=request.tokens,
                counts=request.counts,
                allowed=None if grammar is None else grammar.mask(),
            )
        except UserError as error:
            request.finished = True
            return [Event(request.id, "error", text=str(error))]
        if request.n_answer < len(request.given):
            token = request.given[request.n_answer]
        if grammar is not None:
            grammar.accept(token)
        best = None if params.logprobs is None else sampler.logprobs(logits, token, n_best=params.logprobs)
        request.last_token_s = time.perf_counter()
        if request.n_answer == 0:
            request.first_token_s = request.last_token_s
        request.tokens.append(token)
        request.counts[token] = request.counts.get(token, 0) + 1
        self.totals.n_answer_tokens += 1
        events = self._answers[request.id].push(token, best)
        if grammar is not None and grammar.is_done and not request.finished:
            events.append(self._answers[request.id].finish("stop"))
        return events

    def _release(self, request: Request) -> None:
        self.scheduler.remove(request)
        self.speculation.forget(request)
        del self._answers[request.id]
        self._close_sequence(request)

    def _close_sequence(self, request: Request) -> None:
        """Its blocks and place are free again; what it has read is kept for later prompts."""
        sequence = self._sequences.get(request.id)
        if sequence is None:
            return
        self._keeper.hand_over(request, [] if self._reading is None else self._reading.kept)
        del self._sequences[request.id]
        sequence.close()

    def _fail(self, fault: BaseException) -> list[Event]:
        """Phase failed: nothing is published, every request is told and gone."""
        self.failure = f"{type(fault).__name__}: {fault}"
        if isinstance(fault, Exception):  # as text: a record of the fault would hold the arena
            logger.error("the engine failed\n%s", "".join(traceback.format_exception(fault)))
        self.totals.n_faults += 1
        self._drop_reading()
        self._keeper.forget()
        self._memory.swing.abandon()
        events = [
            Event(i, "error", text=self.failure) for i in sorted(self._untold)
        ]  # some end in events that are lost
        self._untold.clear()
        for request in self.scheduler.requests:
            self._release(request)
        if self._recorder is not None:
            self._recorder.drop()
        return events

    def _drop_reading(self) -> None:
        if self._reading is not None:
            self._reading.close()
        self._reading = None

    def _read_alone(self, sequence: SequenceState, tokens: list[int]) -> torch.Tensor:
        memory, swing = self._memory, self._memory.swing
        plan = memory.plan
        counts = PromptCounts(len(plan.layers), plan.sizes.n_experts, n_tokens=len(tokens))
        swing.release(plan.lend_for(len(tokens)))
        assert swing.lending is not None
        sequence.reserve(len(tokens))
        step, rows = swing.lending.sweep_tokens, []
        for i in range(0, len(tokens), step):
            piece = tokens[i : i + step]
            sweep, experts = lent_sweep(
                memory,
                [(sequence, piece)],
                on_routed=lambda layer, _, ids, i=i: counts.add(layer, ids.cpu().numpy(), first_token=i),  # type: ignore[misc]
            )
            sweep.run()
            experts.close()
            rows.append(memory.model.head(sweep.residual(sweep.parts[0])))
        swing.restore(counts.counts)
        swing.phases.to(Phase.IDLE)
        return torch.cat(rows)

    def _open_trace(self) -> Recorder | None:
        path, plan, facts = self._config.trace, self._memory.plan, self._memory.model.facts
        if path is None:
            return None
        header = TraceHeader(
            n_layers=len(plan.layers),
            n_experts=plan.sizes.n_experts,
            top_k=facts.top_k,
            model=facts.name or facts.architecture,
            expert_bytes=tuple(layer.expert_bytes for layer in plan.layers),
        )
        return Recorder(TraceWriter(path, header))
