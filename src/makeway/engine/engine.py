"""The engine: opens a model, makes way for prompts, decodes step by step, tells what it did.

Owns the file, the memory and the requests (the composition root). Never touches HTTP or a terminal.
Hazard: one thread at a time may use an engine.
"""

import secrets
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from makeway.config import EngineConfig, SamplingParams
from makeway.device import Device, open_device
from makeway.engine.answer import Answer
from makeway.engine.backend import Backend, open_backend
from makeway.engine.loop import Loop
from makeway.engine.memory import EngineMemory, Progress
from makeway.engine.phases import Phase
from makeway.engine.request import Event, Request, message_ends
from makeway.engine.status import status_document
from makeway.errors import EngineFailed, UserError
from makeway.gguf import GGUFFile, open_gguf
from makeway.memory.rates import Rates
from makeway.text import Tokenizer
from makeway.text.grammar import CompiledGrammar


class Engine:
    """`Engine.load(path)`, then `generate`, or `add` and `step` for several requests at once; `close` at the end."""

    def __init__(
        self,
        source: Path | GGUFFile,
        config: EngineConfig,
        *,
        device: Device | None = None,
        backend: Backend | None = None,
        rates: Rates | None = None,
        progress: Progress | None = None,
        warming: Progress | None = None,
    ) -> None:
        """`source`: a path, or an open file, which the engine then closes. `device` and `backend` override what the
        configuration says; `rates` of this machine for the plan; `progress(bytes done, bytes in all)` while loading,
        `warming(done, in all)` while kernels are compiled."""
        self.config = config
        self._closed = False
        with ExitStack() as undo:
            self._file = source if isinstance(source, GGUFFile) else open_gguf(source)
            undo.callback(self._file.close)
            self.tokenizer = Tokenizer.from_metadata(self._file.metadata, source=str(self._file.paths[0]))
            self.device = device or open_device(config.device, config.vram)
            backend = backend or open_backend(config.kernels, self.device)
            self.memory = EngineMemory(
                self._file,
                backend,
                config,
                device=self.device,
                rates=rates,
                progress=progress,
                warming=warming,
            )
            undo.callback(self.memory.close)
            self._loop = Loop(self.memory, config)
            undo.pop_all()
        self.model = self.memory.model
        self.plan = self.memory.plan
        self.kernels = backend.ops.name
        self.context = self.plan.request.context
        self._next_id = 0

    @classmethod
    def load(
        cls,
        path: str | Path,
        config: EngineConfig | None = None,
        *,
        progress: Progress | None = None,
        warming: Progress | None = None,
    ) -> Self:
        """Opens a GGUF model; raises UserError when the file or the configuration cannot be used, OutOfPlan when it
        does not fit."""
        return cls(Path(path), config or EngineConfig(), progress=progress, warming=warming)

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Checked token ids of a prompt; raises UserError for an empty one, a bad id, or one that is too long."""
        self._check_open()
        n_vocab = self.model.facts.n_vocab
        tokens = self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(t) for t in prompt]
        if not tokens:
            raise UserError("the prompt is empty; give at least one token of text")
        bad = next((t for t in tokens if not 0 <= t < n_vocab), None)
        if bad is not None:
            raise UserError(f"token id {bad} is out of range; the model's ids are 0 to {n_vocab - 1}")
        return tokens

    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        grammar: CompiledGrammar | None = None,
        given: Sequence[int] = (),
    ) -> int:
        """Queues a request and returns its id; its answer follows `grammar` and ends where that ends.

        `given`: the answer's first tokens, whatever the model would choose (to measure, or to score a text). Raises
        UserError when it can never run, EngineFailed after a fault.
        """
        self._check_open()
        if self.phase is Phase.FAILED:
            raise EngineFailed(f"the engine failed ({self._loop.failure}); rebuild() brings it back")
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
            message_ends=message_ends(tokens, self.tokenizer.eos_ids),
            sampling=sampling,
            seed=secrets.randbits(64) if sampling.seed is None else sampling.seed,
            max_tokens=room if sampling.max_tokens is None else min(room, sampling.max_tokens),
            grammar=None if grammar is None else grammar.start(),
            given=tuple(self.encode(given)) if given else (),
        )
        self._next_id += 1
        self._loop.add(request, Answer(request, self.tokenizer))
        return request.id

    def step(self) -> list[Event]:
        """One unit of work: a chunk, or the experts of a layer, of waiting prompts; else a token of every answer.

        A fault does not raise: every request gets an "error" event and the phase is `failed` until `rebuild`.
        """
        self._check_open()
        return self._loop.step()

    @property
    def busy(self) -> bool:
        """True while a request waits or runs, an event has not been fetched, or experts are on their way back."""
        return self._loop.busy

    @property
    def phase(self) -> Phase:
        return self._loop.phase

    def cancel(self, request_id: int) -> None:
        """Ends a request before its next token; the finish event comes with the next step. Unknown ids are ignored."""
        self._loop.cancel(request_id)

    def rebuild(self) -> None:
        """Back from phase `failed`: empty slots, no requests. Raises UserError in any other phase."""
        self._check_open()
        if self.phase is not Phase.FAILED:
            raise UserError(f"the engine is in phase {self.phase}; rebuild() is for one that failed")
        self.memory.rebuild()
        self._loop = Loop(self.memory, self.config, after=self._loop)

    def generate(self, prompt: str | Sequence[int], sampling: SamplingParams | None = None) -> Iterator[Event]:
        """Events of one request as they happen; leaving the iterator early cancels the request.

        Raises EngineFailed when the engine fails on the way.
        """
        request_id = self.add(prompt, sampling)
        done = False
        try:
            while not done:
                for event in self.step():
                    if event.request_id != request_id:
                        continue
                    if event.kind == "error":
                        done = True
                        raise EngineFailed(event.text)
                    done = event.kind == "finish"
                    yield event
        finally:
            if not done and not self._closed:
                self.cancel(request_id)
                self._loop.forget(request_id)

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Logits float32 [n, vocab] after each of the tokens, read as a fresh sequence; no request may be running."""
        self._check_open()
        tokens = self.encode(token_ids)
        if len(tokens) > self.context:
            raise UserError(f"{len(tokens)} tokens do not fit the context of {self.context}; use a larger --context")
        return self._loop.logits(tokens)

    def status(self) -> dict[str, Any]:
        """One document: what runs, on what, how many bytes."""
        self._check_open()
        return status_document(self.memory, self._loop, kernels=self.kernels, file=self._file)

    def close(self) -> None:
        """Frees everything; may be called twice."""
        if self._closed:
            return
        self._closed = True
        del self.model
        self._loop.close()
        self.memory.close()
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
