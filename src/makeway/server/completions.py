"""Answers of /v1/completions: one document, or a stream of chunks.

Owns their form. Never talks to the engine. Hazard: in a stream the usage comes last and only when asked for.
"""

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from makeway.engine import Event
from makeway.server.errors import ApiError
from makeway.server.generation import Generation
from makeway.server.logprobs import CompletionLogprobs, ends_of
from makeway.server.openai_requests import CompletionRequest
from makeway.server.respond import sse
from makeway.server.usage import Usage
from makeway.text import Tokenizer


class CompletionAnswer:
    """Formats the answers of one request."""

    def __init__(
        self, request: CompletionRequest, tokenizer: Tokenizer, *, model: str, prompts: list[list[int]]
    ) -> None:
        """`prompts`: the token ids of each prompt."""
        self._request = request
        self._usage = Usage([len(p) for p in prompts])
        self._echo = [tokenizer.decode(p) if request.echo else "" for p in prompts for _ in range(request.n)]
        ends = ends_of(request.sampling, tokenizer)
        self._logprobs = [CompletionLogprobs(tokenizer, ends) for _ in self._echo]
        self._document = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model,
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Waits for all answers; raises ApiError when the engine fails."""
        texts, reasons = list(self._echo), ["stop"] * len(self._echo)
        async for got in generation.events():
            if got is None:
                continue
            index, event = got
            texts[index] += event.text
            self._see(index, event)
            reasons[index] = event.reason or "stop"
        choices = [self._choice(i, texts[i], reasons[i]) for i in range(len(texts))]
        return {**self._document, "choices": choices, "usage": self._usage.openai(), "timings": self._usage.speed()}

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, b"" when there is nothing to say; ends with [DONE]."""
        asked = self._request.delivery
        try:
            for index, text in enumerate(self._echo):
                if text:
                    yield self._chunk([self._choice(index, text, None)])
            async for got in generation.events():
                if got is None or got[1].kind == "progress":
                    yield self._progress(generation, got) if asked.progress else b""
                    continue
                index, event = got
                self._see(index, event)
                if event.text or event.reason:
                    more = {"timings": self._usage.speed()} if event.reason else {}
                    yield self._chunk([self._choice(index, event.text, event.reason)], **more)
                else:
                    yield b""
            if asked.usage:
                yield self._chunk([], usage=self._usage.openai())
        except ApiError as error:
            yield sse(error.openai())
        yield b"data: [DONE]\n\n"

    def _see(self, index: int, event: Event) -> None:
        self._logprobs[index].push(event)
        if event.timings is not None:
            self._usage.add(event.timings, index // self._request.n)

    def _choice(self, index: int, text: str, reason: str | None) -> dict[str, Any]:
        has = self._request.sampling.logprobs is not None
        logprobs = self._logprobs[index].take() if has else None
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._request.delivery.usage else {}
        return sse({**self._document, "choices": choices, **usage, **more})

    def _progress(self, generation: Generation, got: tuple[int, Event] | None) -> bytes:
        return b"".join(
            self._chunk([], prompt_progress={"index": index, **state}) for index, state in generation.news(got)
        )
