"""Engines that say what a test wants, as slowly as it wants, and break when it wants."""

import threading
import time
from dataclasses import replace
from types import SimpleNamespace

from makeway import EngineConfig, Event, TokenLogprobs
from makeway.engine.answer import Answer
from makeway.engine.phases import Phase
from makeway.engine.request import Request
from makeway.errors import EngineFailed, UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from makeway.text.vocabulary import read_vocabulary
from tests.conftest import golden_path

VOCABULARY = "qwen3moe-k256-Q4_K_M.gguf"


def small_tokenizer():
    """The tiny vocabulary, with the tags of tool calls and reasoning as text, which they are in real files."""
    with open_gguf(golden_path(VOCABULARY)) as file:
        vocabulary = read_vocabulary(file.metadata, source=VOCABULARY)
    tags = {i for i in vocabulary.special if not vocabulary.tokens[i].startswith("<|")}
    return Tokenizer(
        replace(vocabulary, special=vocabulary.special - tags, user_defined=vocabulary.user_defined | tags)
    )


class ScriptedEngine:
    """Answers each prompt with `answer(prompt text)`, a token a step, after reading it `chunk` tokens a step.

    `gate`: while cleared, steps wait. `fail_at`: the number of the step that fails. `requests` holds what is inside.
    """

    def __init__(self, answer, *, parallel=3, context=4096, step_s=0.0, chunk=64, fail_at=None, crash=False):
        self.config = EngineConfig(parallel=parallel)
        self.context = context
        self.tokenizer = small_tokenizer()
        self.model = SimpleNamespace(facts=SimpleNamespace(n_vocab=self.tokenizer.n_tokens))
        self.phase = Phase.IDLE
        self.gate = threading.Event()
        self.gate.set()
        self.requests = {}
        self.prompts = []
        self.cancelled = []
        self.n_steps = self.n_rebuilt = 0
        self.fail_at, self.crash = fail_at, crash
        self.closed = False
        self._answer, self._step_s, self._chunk = answer, step_s, chunk
        self._pending = []
        self._next_id = 0

    def encode(self, prompt):
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not tokens:
            raise UserError("the prompt is empty; give at least one token of text")
        for token in tokens:
            self.tokenizer.token_bytes(token)
        return tokens

    def add(self, prompt, sampling=None, *, grammar=None):
        tokens = self.encode(prompt)
        room = self.context - len(tokens)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        request = Request(self._next_id, tokens, len(tokens), sampling=sampling, seed=0, max_tokens=limit)
        text = self.tokenizer.decode(tokens)
        self.prompts.append(text)
        script = self.tokenizer.encode(self._answer(text), add_special=False) + [self.tokenizer.eos_id]
        self.requests[request.id] = (request, Answer(request, self.tokenizer), script)
        self._next_id += 1
        return request.id

    @property
    def busy(self):
        return bool(self.requests or self._pending)

    def step(self):
        self.gate.wait(60)
        time.sleep(self._step_s)
        self.n_steps += 1
        events, self._pending = self._pending, []
        if self.n_steps == self.fail_at:
            if self.crash:
                raise RuntimeError("it crashed")
            self.phase = Phase.FAILED
            events += [Event(i, "error", text="a slot is torn") for i in self.requests]
            self.requests.clear()
            return events
        reading = next((r for r, _, _ in self.requests.values() if r.n_read < r.n_prompt), None)
        if reading is not None:
            reading.n_read = min(reading.n_prompt, reading.n_read + self._chunk)
            reading.started_s = reading.started_s or time.perf_counter()
            return [*events, Event(reading.id, "progress", n_done=reading.n_read, n_prompt=reading.n_prompt)]
        for request, answer, script in list(self.requests.values()):
            token = script[request.n_answer]
            request.first_token_s = request.first_token_s or time.perf_counter()
            request.last_token_s = time.perf_counter()
            request.tokens.append(token)
            logprobs = None
            if request.sampling.logprobs is not None:
                logprobs = TokenLogprobs(-0.5, tuple((token, -0.5) for _ in range(request.sampling.logprobs)))
            events += answer.push(token, logprobs)
            if request.finished:
                del self.requests[request.id]
        return events

    def cancel(self, request_id):
        self.cancelled.append(request_id)
        _, answer, _ = self.requests.pop(request_id)
        self._pending.append(answer.finish("cancelled"))

    def rebuild(self):
        if self.phase is not Phase.FAILED:
            raise UserError("nothing to rebuild")
        self.phase = Phase.IDLE
        self.n_rebuilt += 1

    def status(self):
        if self.closed:
            raise EngineFailed("closed")
        failure = "a slot is torn" if self.phase is Phase.FAILED else None
        return {"phase": str(self.phase), "failure": failure, "n_steps": self.n_steps, "experts": {"hit_rate": 0.5}}

    def close(self):
        self.closed = True
