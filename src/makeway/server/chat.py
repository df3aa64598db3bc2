"""Answers of /v1/chat/completions: one document, or a stream of chunks.

Owns their form. Never talks to the engine and never looks into the text: `ChatOutput` says what is reasoning, what a
tool call. Hazard: log-probabilities belong to tokens, which do not end where pieces of text do.
"""

import time
import uuid
from collections.abc import AsyncGenerator, Sequence
from typing import Any

from makeway import __version__
from makeway.engine import Event
from makeway.server.errors import ApiError
from makeway.server.generation import Generation
from makeway.server.logprobs import chat_entry, ends_of
from makeway.server.openai_requests import ChatRequest
from makeway.server.output import ChatOutput, Piece
from makeway.server.respond import sse
from makeway.server.usage import Usage
from makeway.text import Tokenizer


class ChatAnswer:
    """Formats the answers of one request; `outputs` has one parser for each."""

    def __init__(
        self,
        request: ChatRequest,
        tokenizer: Tokenizer,
        *,
        model: str,
        n_prompt: int,
        outputs: Sequence[ChatOutput],
    ) -> None:
        self._request = request
        self._tokenizer = tokenizer
        self._ends = ends_of(request.sampling, tokenizer)
        self._usage = Usage([n_prompt])
        self._outputs = outputs
        self._entries: list[list[dict[str, Any]]] = [[] for _ in outputs]
        self._document = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"makeway-{__version__}",
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Waits for all answers; raises ApiError when the engine fails."""
        messages = [_Message() for _ in self._outputs]
        reasons = ["stop"] * len(messages)
        async for got in generation.events():
            if got is None:
                continue
            index, event = got
            messages[index].add(self._pieces(index, event))
            if event.kind == "finish":
                reasons[index] = self._reason(index, event)
        choices = [
            {"index": i, "message": m.document(), "logprobs": self._logprobs(i), "finish_reason": reasons[i]}
            for i, m in enumerate(messages)
        ]
        more = {"usage": self._usage.openai(), "timings": self._usage.speed()}
        return {**self._document, "object": "chat.completion", "choices": choices, **more}

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, b"" when there is nothing to say; ends with [DONE]."""
        asked = self._request.delivery
        begun: set[int] = set()
        try:
            async for got in generation.events():
                if got is None or got[1].kind == "progress":
                    yield self._progress(generation, got) if asked.progress else b""
                    continue
                index, event = got
                data = b""
                if index not in begun:
                    begun.add(index)
                    data = self._chunk([self._delta(index, {"role": "assistant", "content": ""})])
                for piece in self._pieces(index, event):
                    if piece.kind not in ("end", "broken"):  # what was sent of a call cannot be taken back
                        data += self._chunk([self._delta(index, _delta(piece))])
                if event.kind == "finish":
                    last = self._delta(index, {}, self._reason(index, event))
                    data += self._chunk([last], timings=self._usage.speed())
                yield data
            if asked.usage:
                yield self._chunk([], usage=self._usage.openai())
        except ApiError as error:
            yield sse(error.openai())
        yield b"data: [DONE]\n\n"

    def _pieces(self, index: int, event: Event) -> list[Piece]:
        output = self._outputs[index]
        if event.kind == "token":
            self._usage.n_reasoning += output.is_reasoning
            entry = chat_entry(event, self._tokenizer, self._ends)
            if entry is not None:
                self._entries[index].append(entry)
        if event.timings is not None:
            self._usage.add(event.timings)
        pieces = output.push(event.text) if event.text else []
        return pieces + output.finish() if event.kind == "finish" else pieces

    def _reason(self, index: int, event: Event) -> str:
        if event.reason == "stop" and self._outputs[index].n_calls:
            return "tool_calls"
        return event.reason or "stop"

    def _logprobs(self, index: int) -> dict[str, Any] | None:
        """What has not been sent yet."""
        if self._request.sampling.logprobs is None:
            return None
        entries, self._entries[index] = self._entries[index], []
        return {"content": entries, "refusal": None}

    def _delta(self, index: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": self._logprobs(index), "finish_reason": reason}

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        usage = {"usage": None} if self._request.delivery.usage else {}
        return sse({**self._document, "object": "chat.completion.chunk", "choices": choices, **usage, **more})

    def _progress(self, generation: Generation, got: tuple[int, Event] | None) -> bytes:
        return b"".join(
            self._chunk([], prompt_progress={"index": index, **state}) for index, state in generation.news(got)
        )


def _delta(piece: Piece) -> dict[str, Any]:
    if piece.kind == "content":
        return {"content": piece.text}
    if piece.kind == "reasoning":
        return {"reasoning_content": piece.text}
    call: dict[str, Any] = {"index": piece.index, "function": {"arguments": piece.text}}
    if piece.kind == "call":
        call |= {"id": piece.id, "type": "function", "function": {"name": piece.name, "arguments": piece.text}}
    return {"tool_calls": [call]}


class _Message:
    """The pieces of one answer, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, pieces: Sequence[Piece]) -> None:
        for piece in pieces:
            if piece.kind == "content":
                self._content.append(piece.text)
            elif piece.kind == "reasoning":
                self._reasoning.append(piece.text)
            elif piece.kind == "call":
                function = {"name": piece.name, "arguments": piece.text}
                self._calls[piece.index] = {"id": piece.id, "type": "function", "function": function}
            elif piece.kind == "arguments":
                self._calls[piece.index]["function"]["arguments"] += piece.text
            elif piece.kind == "broken":
                del self._calls[piece.index]

    def document(self) -> dict[str, Any]:
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if self._reasoning:
            message["reasoning_content"] = "".join(self._reasoning)
        if self._calls:
            message["tool_calls"] = list(self._calls.values())
            message["content"] = content or None
        return message
