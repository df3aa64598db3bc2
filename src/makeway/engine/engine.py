"""The engine: opens a model, reads prompts in sweeps, decodes step by step, tells what it did.

Owns the file, the model, the KV cache and the sequences (the composition root). Never touches HTTP or a terminal.
Hazard: one thread at a time may use an engine.
"""

import secrets
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from makeway.config import EngineConfig, SamplingParams
from makeway.device import pick_device
from makeway.engine import sampler
from makeway.engine.answer import Answer
from makeway.engine.prefill import Sweep
from makeway.engine.request import Event, Request
from makeway.engine.scheduler import Scheduler
from makeway.errors import UserError
from makeway.experts.executors import DirectExperts
from makeway.gguf import open_gguf
from makeway.kernels import select
from makeway.kv import BLOCK_TOKENS, Batch, KVCache, SequenceState, StatePool, StateShapes
from makeway.models import load_model
from makeway.models.base import run_trunk
from makeway.text import Tokenizer

DEFAULT_CONTEXT = 8192


class Engine:
    """`Engine.load(path)`, then `generate`, or `add` and `step` for several requests at once; `close` at the end."""

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.config = config
        self.device = pick_device(config.device)
        self._ops = select(self.device)
        self._file = open_gguf(path)
        try:
            self.model = load_model(self._file, self._ops, device=self.device)
            self.tokenizer = Tokenizer.from_metadata(self._file.metadata, source=str(path))
            self.context = self._choose_context(config.context)
        except BaseException:
            self._file.close()
            raise
        facts = self.model.facts
        n_blocks = config.parallel * -(-self.context // BLOCK_TOKENS)
        self._cache = KVCache(facts.kv_shapes, n_blocks, device=self.device)
        shapes = StateShapes.of(facts.state_shapes, kv=facts.kv_shapes, ple=facts.ple_tails)
        self._states = StatePool(shapes, config.parallel + 1, device=self.device)  # one for `logits`
        self._experts = DirectExperts(self.model.store, self._ops)
        self._scheduler = Scheduler(config.parallel)
        self._sequences: dict[int, SequenceState] = {}
        self._answers: dict[int, Answer] = {}
        self._sweeps: dict[int, tuple[Sweep, Iterator[None]]] = {}
        self._pending: list[Event] = []
        self._next_id = 0
        self._n_prompt_tokens = self._n_answer_tokens = self._n_steps = 0
        self._closed = False

    @classmethod
    def load(cls, path: str | Path, config: EngineConfig | None = None) -> Self:
        """Opens a GGUF model; raises UserError when the file or the configuration cannot be used."""
        return cls(Path(path), config or EngineConfig())

    def _choose_context(self, wanted: int | None) -> int:
        longest = self.model.facts.context_length
        if wanted is None:
            return min(longest, DEFAULT_CONTEXT)
        if wanted > longest:
            raise UserError(f"--context {wanted}: the model's longest context is {longest}; use at most that")
        return wanted

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Checked token ids of a prompt; raises UserError for an empty one, a bad id, or one that is too long."""
        n_vocab = self.model.facts.n_vocab
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise UserError("the prompt is empty; give at least one token of text")
        bad = next((t for t in tokens if not 0 <= t < n_vocab), None)
        if bad is not None:
            raise UserError(f"token id {bad} is out of range; the model's ids are 0 to {n_vocab - 1}")
        return tokens

    def add(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> int:
        """Queues a request and returns its id; raises UserError when it can never run."""
        self._check_open()
        sampling = sampling or SamplingParams()
        tokens = self.encode(prompt)
        room = self.context - len(tokens)
        if room < 1:
            raise UserError(
                f"the prompt has {len(tokens)} tokens and the context {self.context}, which must also hold the answer; "
                f"shorten the prompt or use a larger --context (the model allows {self.model.facts.context_length})"
            )
        bad = next((t for t in sampling.logit_bias if not 0 <= t < self.model.facts.n_vocab), None)
        if bad is not None:
            raise UserError(f"logit_bias: token id {bad} is out of range (0 to {self.model.facts.n_vocab - 1})")
        request = Request(
            id=self._next_id,
            tokens=list(tokens),
            n_prompt=len(tokens),
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
        )
        self._next_id += 1
        self._answers[request.id] = Answer(request, self.tokenizer)
        self._scheduler.add(request)
        return request.id

    def step(self) -> list[Event]:
        """One unit of work: a chunk, or the experts of a layer, of a waiting prompt; else a token of every answer."""
        self._check_open()
        events, self._pending = self._pending, []
        for request in self._scheduler.admit():
            self._sequences[request.id] = self._new_sequence()
        prompt = self._scheduler.next_prompt()
        if prompt is not None:
            return events + self._read_prompt(prompt)
        return events + self._decode(self._scheduler.decoding())

    @property
    def busy(self) -> bool:
        """True while a request waits or runs, or an event has not been fetched."""
        return self._scheduler.busy or bool(self._pending)

    def cancel(self, request_id: int) -> None:
        """Ends a request before its next token; the finish event comes with the next step. Unknown ids are ignored."""
        for request in [*self._scheduler.waiting, *self._scheduler.running]:
            if request.id == request_id:
                self._pending.append(self._answers[request_id].finish("cancelled"))
                self._release(request)
                return

    def generate(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they happen; leaving the iterator early cancels the request."""
        request_id = self.add(prompt, sampling)
        done = False
        try:
            while not done:
                for event in self.step():
                    if event.request_id == request_id:
                        done = event.kind == "finish"
                        yield event
        finally:
            if not done and not self._closed:
                self.cancel(request_id)
                self._pending = [e for e in self._pending if e.request_id != request_id]

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [n, vocab] after each of the tokens, read as a fresh sequence."""
        self._check_open()
        tokens = self.encode(token_ids)
        if len(tokens) > self.context:
            raise UserError(f"{len(tokens)} tokens do not fit the context of {self.context}; use a larger --context")
        sequence = self._new_sequence()
        try:
            step = self.config.sweep_tokens
            pieces = [tokens[i : i + step] for i in range(0, len(tokens), step)]
            return torch.cat([self.model.head(self._sweep(sequence, piece).run()) for piece in pieces])
        finally:
            sequence.close()

    def status(self) -> dict[str, Any]:
        """One document: what runs, on what, how many bytes."""
        facts = self.model.facts
        waiting, running = len(self._scheduler.waiting), len(self._scheduler.running)
        phase = "idle" if not running else "prefill" if self._scheduler.next_prompt() else "decode"
        return {
            "phase": phase,
            "model": {"architecture": facts.architecture, "name": facts.name, "n_layers": facts.n_layers},
            "device": str(self.device),
            "kernels": self._ops.name,
            "context": self.context,
            "parallel": self.config.parallel,
            "chunk": self.config.chunk,
            "sweep_tokens": self.config.sweep_tokens,
            "file_bytes": self._file.n_bytes,
            "expert_bytes": self.model.store.nbytes,
            "kv_bytes": self._cache.nbytes,
            "state_bytes": sum(s.nbytes for s in self._sequences.values()),
            "n_waiting": waiting,
            "n_running": running,
            "n_prompt_tokens": self._n_prompt_tokens,
            "n_answer_tokens": self._n_answer_tokens,
            "n_steps": self._n_steps,
        }

    def close(self) -> None:
        """Frees everything; may be called twice."""
        if self._closed:
            return
        self._closed = True
        for sequence in self._sequences.values():
            sequence.close()
        self._sequences.clear()
        self._cache.close()
        self._states.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._closed:
            raise UserError("this engine is closed; load the model again")

    def _new_sequence(self) -> SequenceState:
        return SequenceState(self._cache, self._states)

    def _forward(self, parts: list[tuple[SequenceState, list[int]]]) -> torch.Tensor:
        for sequence, tokens in parts:
            sequence.reserve(len(tokens))
        return run_trunk(self.model, self._experts, Batch.of(parts, device=self.device))

    def _read_prompt(self, request: Request) -> list[Event]:
        """One unit of the prompt's current sweep; after the last sweep, the first token."""
        running = self._sweeps.get(request.id)
        if running is None:
            if request.n_read == 0:
                request.started_s = time.perf_counter()
            last = min(request.n_read + self.config.sweep_tokens, request.n_prompt)
            sweep = self._sweep(self._sequences[request.id], request.tokens[request.n_read : last])
            running = self._sweeps[request.id] = (sweep, sweep.steps())
        sweep, steps = running
        next(steps, None)
        done = request.n_read + sweep.tokens_done
        events = [Event(request.id, "progress", n_done=done, n_prompt=request.n_prompt)]
        if sweep.residual is None:
            return events
        del self._sweeps[request.id]
        request.n_read += sweep.n_tokens
        self._n_prompt_tokens += sweep.n_tokens
        if request.n_read < request.n_prompt:
            return events
        return [*events, *self._sample(request, self.model.head(sweep.residual[-1:])[0])]

    def _sweep(self, sequence: SequenceState, tokens: list[int]) -> Sweep:
        sequence.reserve(len(tokens))
        return Sweep(self.model, self._experts, sequence=sequence, tokens=tokens, chunk=self.config.chunk)

    def _decode(self, requests: list[Request]) -> list[Event]:
        if not requests:
            return []
        h = self._forward([(self._sequences[r.id], r.tokens[-1:]) for r in requests])
        self._n_steps += 1
        logits = self.model.head(h)
        return [event for r, row in zip(requests, logits, strict=True) for event in self._sample(r, row)]

    def _sample(self, request: Request, row: torch.Tensor) -> list[Event]:
        """Chooses the next token of a request from logits [vocab]; ends the request when it is its last."""
        logits = row.cpu().numpy()
        params = request.sampling
        token = sampler.choose(
            logits,
            params,
            seed=request.seed,
            position=len(request.tokens),
            seen=request.tokens,
            counts=request.counts,
        )
        best = None if params.logprobs is None else sampler.logprobs(logits, token, n_best=params.logprobs)
        request.last_token_s = time.perf_counter()
        if request.n_answer == 0:
            request.first_token_s = request.last_token_s
        request.tokens.append(token)
        request.counts[token] = request.counts.get(token, 0) + 1
        self._n_answer_tokens += 1
        events = self._answers[request.id].push(token, best)
        if request.finished:
            self._release(request)
        return events

    def _release(self, request: Request) -> None:
        self._scheduler.remove(request)
        del self._answers[request.id]
        self._sweeps.pop(request.id, None)
        sequence = self._sequences.pop(request.id, None)
        if sequence is not None:
            sequence.close()
