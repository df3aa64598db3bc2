"""What all endpoints share: the engine loop, the tokenizer and template of its model, worker threads, limits.

Owns the reading of bodies and the step from a request to tokens. Never knows the form of an answer. Hazard: rendering
and tokenising run in worker threads, because a long prompt would stop every stream for as long.
"""

import asyncio
import logging
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from makeway.errors import UserError
from makeway.server.conversation import Conversations
from makeway.server.errors import ApiError, bad_request, context_exceeded, from_user_error
from makeway.server.fields import Fields, parse_json, shorten
from makeway.server.generation import Asked, Generation
from makeway.server.loop import EngineLoop
from makeway.server.metrics import Metrics
from makeway.server.openai_requests import ChatRequest, CompletionRequest
from makeway.server.output import ChatOutput
from makeway.server.respond import COMMENT, ClientLeft, EventStream, Json, unless_left
from makeway.server.served import Ready
from makeway.server.settings import ServerConfig

logger = logging.getLogger("makeway.server")
T = TypeVar("T")

MAX_BODY_S = 120.0
LONG_BODY_BYTES = 1 << 20  # from here on reading the JSON is work for a worker thread
MAX_DRAINED_BYTES = 64 << 20
N_WORKERS = 4
LONGEST_TOKEN = 1024  # characters; a text with more than this per token of context cannot fit


@dataclass(frozen=True)
class ChatPrompt:
    """A conversation ready to be queued, and a reader for each of its answers."""

    asked: Asked
    outputs: list[ChatOutput]


class Form(Protocol):
    """How answers look: one document, or a stream of server-sent events."""

    async def whole(self, generation: Generation) -> dict[str, Any]: ...
    def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]: ...


class Service:
    """One server's shared parts; `close` ends its worker threads."""

    def __init__(self, config: ServerConfig, loop: EngineLoop, metrics: Metrics) -> None:
        self.config = config
        self.loop = loop
        self.metrics = metrics
        self._lock = threading.Lock()
        self._talk: tuple[Ready, Conversations] | None = None
        self._workers = ThreadPoolExecutor(N_WORKERS, thread_name_prefix="makeway-text")

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)

    async def body(self, request: Request) -> Fields:
        """The JSON object of a request; raises ApiError (400, 408, 413)."""
        most = self.config.max_body_mib << 20
        parts, n_bytes = [], 0
        try:
            async with asyncio.timeout(MAX_BODY_S):
                async for part in request.stream():
                    n_bytes += len(part)
                    if n_bytes <= most:
                        parts.append(part)
                    # A connection that is closed on unread data takes the answer with it, so some more is read.
                    elif n_bytes > most + MAX_DRAINED_BYTES:
                        break
        except TimeoutError as error:
            raise ApiError(408, f"the body did not arrive within {MAX_BODY_S:g} s") from error
        except ClientDisconnect as error:
            raise ClientLeft from error
        if n_bytes > most:
            message = f"the body is larger than {self.config.max_body_mib} MiB; see --max-body-mib"
            raise ApiError(413, message, code="request_too_large")
        data = b"".join(parts)
        if n_bytes < LONG_BODY_BYTES:
            return Fields(parse_json(data))
        return Fields(await self.in_worker(request, lambda: parse_json(data)))

    def model(self, name: str | None) -> str:
        """The name to answer under; raises ApiError (404) for one that is not served."""
        names = self.config.names
        if name is None:
            return names[0]
        if name not in names:
            known = ", ".join(f"'{n}'" for n in names)
            raise ApiError(
                404, f"the model '{shorten(name)}' does not exist; this server has {known}", "model_not_found", "model"
            )
        return name

    async def in_worker(self, request: Request, work: Callable[[], T]) -> T:
        """Runs `work` in a worker thread; raises ApiError (400) for what it refuses, ClientLeft when nobody waits."""
        future = asyncio.get_running_loop().run_in_executor(self._workers, work)

        async def wait() -> T:
            return await future

        try:
            return await unless_left(request, wait())
        except UserError as error:
            raise from_user_error(error) from error

    def encode(self, ready: Ready, prompt: str | list[int], *, add_special: bool = True) -> list[int]:
        """Token ids of a prompt that fits the context with at least one token of answer; raises ApiError (400)."""
        if isinstance(prompt, str):
            if len(prompt) > LONGEST_TOKEN * ready.context:
                raise context_exceeded(len(prompt) // LONGEST_TOKEN, ready.context)
            prompt = ready.tokenizer.encode(prompt, add_special=add_special)
        if len(prompt) >= ready.context:
            raise context_exceeded(len(prompt), ready.context)
        tokens = ready.encode(prompt)
        if self.config.log_prompts:
            logger.info("prompt: %r", ready.tokenizer.decode(tokens))
        return tokens

    def completion_prompts(self, ready: Ready, asked: CompletionRequest) -> list[Asked]:
        """Prompts as tokens, with their grammar compiled; runs in a worker thread. Raises UserError, ApiError."""
        grammar = None if asked.grammar is None else self.conversations(ready).compile(asked.grammar)
        return [Asked(self.encode(ready, p), asked.sampling, asked.n, grammar) for p in asked.prompts]

    def chat_prompt(self, ready: Ready, asked: ChatRequest) -> ChatPrompt:
        """A conversation as tokens, with its grammar compiled; runs in a worker thread. Raises UserError, ApiError."""
        talk = self.conversations(ready)
        rendered = talk.render(asked)
        tokens = self.encode(ready, rendered.text, add_special=not talk.starts_with_bos(rendered.text))
        grammar = None if rendered.grammar is None else talk.compile(rendered.grammar)
        outputs = [rendered.output() for _ in range(asked.n)]
        return ChatPrompt(Asked(tokens, asked.sampling, asked.n, grammar), outputs)

    def conversations(self, ready: Ready) -> Conversations:
        """The template and the grammars of the model that is loaded now."""
        with self._lock:
            if self._talk is None or self._talk[0] is not ready:
                template = self.config.chat_template
                self._talk = (ready, Conversations(ready.tokenizer, n_vocab=ready.n_vocab, template=template))
            return self._talk[1]

    async def answer(
        self,
        request: Request,
        prompts: Sequence[Asked],
        *,
        form: Form,
        stream: bool,
        keep_alive: bytes = COMMENT,
    ) -> Response:
        """Queues the answers and gives them in their form, whole or streamed; raises ApiError (429, 503, ...)."""
        generation = Generation(self.loop, self.metrics, client=request.state.client, prompts=prompts)
        if stream:
            return EventStream(form.stream(generation), generation.close, keep_alive=keep_alive)
        with generation:
            return Json(await unless_left(request, form.whole(generation)))

    def document(self) -> dict[str, Any]:
        """The status document: the server's part and the engine's."""
        health = self.loop.health
        return {
            "state": health.state,
            "reason": health.reason,
            "n_restarts": health.n_restarts,
            "n_waiting": self.loop.n_waiting,
            "n_running": self.loop.n_running,
            "max_waiting": self.loop.max_waiting,
            "models": list(self.config.names),
            "engine": dict(self.loop.status),
        }


def need_token_ids(fields: Fields, field: str) -> list[int]:
    """An array of integers; raises ApiError (400)."""
    values = fields.array(field)
    if values is None:
        raise fields.wrong(field, "an array of token ids")
    if not all(isinstance(v, int) and not isinstance(v, bool) for v in values):
        raise bad_request(f"'{field}' must hold integers only", field)
    return values
