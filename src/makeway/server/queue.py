"""Who is served next: requests that wait for a place in the engine, fair between clients.

Owns the waiting requests. Never runs them. Hazard: not thread-safe; the engine loop guards it with its lock.
"""

from collections import deque
from collections.abc import Iterator

from makeway.server.ticket import Ticket


class FairQueue:
    """Clients take turns; each client's own requests keep their order. At most `limit` requests wait."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._of_client: dict[str, deque[Ticket]] = {}  # in the order of their turns
        self._n = 0

    def __len__(self) -> int:
        return self._n

    def has_room(self, n: int) -> bool:
        return self._n + n <= self.limit

    def push(self, ticket: Ticket) -> None:
        assert self._n < self.limit
        self._of_client.setdefault(ticket.client, deque()).append(ticket)
        self._n += 1

    def pop(self) -> Ticket | None:
        """The next request; its client goes to the end of the line."""
        client = next(iter(self._of_client), None)
        if client is None:
            return None
        waiting = self._of_client.pop(client)
        ticket = waiting.popleft()
        if waiting:
            self._of_client[client] = waiting
        self._n -= 1
        return ticket

    def remove(self, ticket: Ticket) -> bool:
        """Takes a request out; False when it does not wait here."""
        waiting = self._of_client.get(ticket.client)
        if waiting is None or ticket not in waiting:
            return False
        waiting.remove(ticket)
        if not waiting:
            del self._of_client[ticket.client]
        self._n -= 1
        return True

    def position(self, ticket: Ticket) -> int | None:
        """How many requests are served before this one, were no other to come; None when it does not wait here."""
        return next((i for i, other in enumerate(self._in_order()) if other is ticket), None)

    def drain(self) -> list[Ticket]:
        """Takes all out, in order."""
        tickets = list(self._in_order())
        self._of_client.clear()
        self._n = 0
        return tickets

    def _in_order(self) -> Iterator[Ticket]:
        turn = 0
        while any(len(waiting) > turn for waiting in self._of_client.values()):
            yield from (waiting[turn] for waiting in self._of_client.values() if len(waiting) > turn)
            turn += 1
