"""Answers of /v1/messages: one document, or Anthropic's stream of events.

Owns their form. Never talks to the engine. Hazard: blocks are numbered and must be closed before the next one opens.
"""

import json
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from makeway.engine import Event
from makeway.server.errors import ApiError
from makeway.server.generation import Generation
from makeway.server.openai_requests import ChatRequest
from makeway.server.output import ChatOutput, Piece
from makeway.server.respond import sse
from makeway.server.usage import Usage

PING = sse({"type": "ping"}, "ping")


class AnthropicAnswer:
    """Formats the one answer of a request."""

    def __init__(self, request: ChatRequest, *, model: str, n_prompt: int, output: ChatOutput) -> None:
        self._request = request
        self._usage = Usage([n_prompt])
        self._output = output
        self._message: dict[str, Any] = {
            "id": f"msg_{uuid.uuid4().hex}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
        }

    async def whole(self, generation: Generation) -> dict[str, Any]:
        """Waits for the answer; raises ApiError when the engine fails."""
        blocks: list[dict[str, Any]] = []
        end: dict[str, Any] = {}
        async for got in generation.events():
            if got is None:
                continue
            for piece in self._pieces(got[1]):
                if piece.kind == "broken":
                    blocks.pop()
                elif piece.kind != "end":
                    if not blocks or not _belongs(piece, blocks[-1]):
                        blocks.append(_block(piece))
                    blocks[-1][_FIELD[blocks[-1]["type"]]] += piece.text
            if got[1].kind == "finish":
                end = self._end(got[1])
        for block in blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block["input"] or "{}")
        return {**self._message, "content": blocks, **end, "usage": self._usage.anthropic()}

    async def stream(self, generation: Generation) -> AsyncGenerator[bytes, None]:
        """Server-sent events, b"" when there is nothing to say."""
        usage = {**self._usage.anthropic(), "output_tokens": 0}
        yield _event("message_start", message={**self._message, "usage": usage})
        block: dict[str, Any] | None = None
        n_blocks = 0
        try:
            async for got in generation.events():
                if got is None or got[1].kind == "progress":
                    yield self._progress(generation, got)
                    continue
                event, data = got[1], b""
                for piece in self._pieces(event):
                    if piece.kind in ("end", "broken"):  # what was sent of a call cannot be taken back
                        continue
                    if block is None or not _belongs(piece, block):
                        if block is not None:
                            data += _close(n_blocks - 1, block)
                        block = _block(piece)
                        shown = {**block, "input": {}} if block["type"] == "tool_use" else block
                        data += _event("content_block_start", index=n_blocks, content_block=shown)
                        n_blocks += 1
                    if piece.text:
                        kind, field = _DELTA[block["type"]]
                        delta = {"type": kind, field: piece.text}
                        data += _event("content_block_delta", index=n_blocks - 1, delta=delta)
                if event.kind == "finish":
                    if block is not None:
                        data += _close(n_blocks - 1, block)
                    data += _event("message_delta", delta=self._end(event), usage=self._usage.anthropic())
                    data += _event("message_stop")
                yield data
        except ApiError as error:
            yield sse(error.anthropic(), "error")

    def _pieces(self, event: Event) -> list[Piece]:
        if event.timings is not None:
            self._usage.add(event.timings)
        pieces = self._output.push(event.text) if event.text else []
        return pieces + self._output.finish() if event.kind == "finish" else pieces

    def _end(self, event: Event) -> dict[str, Any]:
        reason = "max_tokens" if event.reason == "length" else "end_turn"
        if event.stop_string is not None:
            reason = "stop_sequence"
        if self._output.n_calls and event.reason == "stop":
            reason = "tool_use"
        return {"stop_reason": reason, "stop_sequence": event.stop_string}

    def _progress(self, generation: Generation, got: tuple[int, Event] | None) -> bytes:
        """An unknown field of a ping is ignored by clients that did not ask for it."""
        if not self._request.delivery.progress:
            return b""
        return b"".join(sse({"type": "ping", "prompt_progress": p}, "ping") for _, p in generation.news(got))


_FIELD = {"text": "text", "thinking": "thinking", "tool_use": "input"}
_DELTA = {
    "text": ("text_delta", "text"),
    "thinking": ("thinking_delta", "thinking"),
    "tool_use": ("input_json_delta", "partial_json"),
}


def _block(piece: Piece) -> dict[str, Any]:
    if piece.kind == "content":
        return {"type": "text", "text": ""}
    if piece.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    return {"type": "tool_use", "id": piece.id, "name": piece.name, "input": ""}


def _belongs(piece: Piece, block: dict[str, Any]) -> bool:
    kinds = {"content": "text", "reasoning": "thinking", "arguments": "tool_use"}
    return bool(block["type"] == kinds.get(piece.kind))


def _close(index: int, block: dict[str, Any]) -> bytes:
    data = b""
    if block["type"] == "thinking":
        data = _event("content_block_delta", index=index, delta={"type": "signature_delta", "signature": ""})
    return data + _event("content_block_stop", index=index)


def _event(kind: str, **fields: Any) -> bytes:
    return sse({"type": kind, **fields}, kind)
