"""What a generation says to its client, waiting until the client's task fetches it.

Owns the events between engine and client, at most `limit` of them. Never blocks the engine: a client that stops reading
is cut off instead. Hazard: all methods belong to the asyncio thread.
"""

import asyncio
from collections import deque

from makeway.engine import Event
from makeway.server.errors import Failure

Item = Event | Failure
MAX_ITEMS = 8192


class Mailbox:
    """The events of the answers of one HTTP request, each with the answer's index."""

    def __init__(self, limit: int = MAX_ITEMS) -> None:
        self._limit = limit
        self._items: deque[tuple[int, Item]] = deque()
        self._ready = asyncio.Event()
        self._full = False

    def __len__(self) -> int:
        return len(self._items)

    def put(self, index: int, item: Item) -> bool:
        """Adds an event; False when the mailbox is full, which ends it. Of progress only the newest is kept."""
        if self._full:
            return False
        if isinstance(item, Event) and item.kind == "progress":
            self._drop_old_progress(index)
        if len(self._items) >= self._limit:
            self._full = True
            self._items.clear()
            item = Failure("the client did not read its answer fast enough", code="client_too_slow", status=408)
        self._items.append((index, item))
        self._ready.set()
        return not self._full

    async def get(self, timeout_s: float | None = None) -> tuple[int, Item] | None:
        """The next event, or None when none came in time."""
        if not self._items:
            self._ready.clear()
            try:
                await asyncio.wait_for(self._ready.wait(), timeout_s)
            except TimeoutError:
                return None
        return self._items.popleft()

    def _drop_old_progress(self, index: int) -> None:
        if self._items:
            last_index, last = self._items[-1]
            if last_index == index and isinstance(last, Event) and last.kind == "progress":
                self._items.pop()
