"""Answers that notice when their client leaves: one JSON document, or a stream of server-sent events.

Owns the watch on the connection. Never knows what is sent. Hazard: a generator must be closed when the client leaves,
because its `finally` is what frees the engine.
"""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

T = TypeVar("T")

COMMENT = b": keep-alive\n\n"
KEEP_ALIVE_S = 3.0  # with ticks of at most 1 s a client hears something at least every 5 s
MAX_SEND_S = 60.0  # a client that takes nothing for so long has left


class ClientLeft(Exception):
    """The client has closed its connection; nobody reads what is sent."""


def to_json(value: Any) -> bytes:
    """JSON in UTF-8; half a surrogate pair, which is no Unicode, becomes '?'."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode("utf-8", errors="replace")


def sse(value: Any, event: str | None = None) -> bytes:
    """One server-sent event."""
    head = b"" if event is None else b"event: " + event.encode() + b"\n"
    return head + b"data: " + to_json(value) + b"\n\n"


class Json(Response):
    """A JSON document."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)


async def unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves (ClientLeft is raised then).

    The request's body must have been read.
    """
    return await _race(request.receive, work)


async def _race(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_left(receive))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientLeft
        return task.result()
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends what `source` yields as it comes, and `keep_alive` when nothing was sent for KEEP_ALIVE_S.

    `source` yields b"" when it has nothing to send, at least once a second. `close` runs at the end, whatever happens.
    """

    def __init__(
        self,
        source: AsyncGenerator[bytes, None],
        close: Callable[[], None],
        *,
        keep_alive: bytes = COMMENT,
    ) -> None:
        super().__init__(
            media_type="text/event-stream", headers={"cache-control": "no-cache", "x-accel-buffering": "no"}
        )
        del self.headers["content-length"]
        self._source = source
        self._close = close
        self._keep_alive = keep_alive

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            await _race(receive, self._send_all(send))
        except (ClientLeft, TimeoutError):
            pass
        finally:
            self._close()
            await self._source.aclose()

    async def _send_all(self, send: Send) -> None:
        sent_s = time.monotonic()
        async for data in self._source:
            now = time.monotonic()
            if not data and now - sent_s > KEEP_ALIVE_S:
                data = self._keep_alive
            if data:
                async with asyncio.timeout(MAX_SEND_S):
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                sent_s = now
        await send({"type": "http.response.body", "body": b"", "more_body": False})
