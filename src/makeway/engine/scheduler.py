"""Whose turn it is: integers and requests only, no torch.

Owns the queue of waiting requests and the list of running ones. Never computes. Waiting prompts are read first, in
order of arrival, while running answers pause. Hazard: a request is in exactly one of the two places.
"""

from collections import deque
from collections.abc import Callable

from makeway.engine.request import Request


class Scheduler:
    """At most `parallel` requests hold a sequence at once; the others wait."""

    def __init__(self, parallel: int) -> None:
        assert parallel >= 1
        self.parallel = parallel
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []  # oldest first
        self._turn = 0

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self, fits: Callable[[Request], bool]) -> Request | None:
        """Moves the first waiting request to a free place if it `fits`; no later one passes it. None: nobody moved."""
        if not self.waiting or len(self.running) >= self.parallel or not fits(self.waiting[0]):
            return None
        request = self.waiting.popleft()
        self.running.append(request)
        self.running.sort(key=lambda r: r.id)
        return request

    def reading(self) -> list[Request]:
        """Running requests whose tokens are not all read, oldest first."""
        return [r for r in self.running if r.is_reading]

    def decoding(self, most: int) -> list[Request]:
        """At most `most` of the running requests that decode; when there are more they take turns."""
        ready = [r for r in self.running if not r.is_reading]
        if len(ready) <= most:
            return ready
        first = self._turn % len(ready)
        self._turn += most
        return [ready[(first + i) % len(ready)] for i in range(most)]

    @property
    def n_decoding(self) -> int:
        return sum(not r.is_reading for r in self.running)

    def preempt(self) -> Request:
        """The youngest running request goes back to the head of the queue, to be read again when there is room."""
        request = self.running.pop()
        request.n_read = 0
        request.n_lost += 1
        self.waiting.appendleft(request)
        return request

    def remove(self, request: Request) -> None:
        """Takes a request out of the queue or gives its place free."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    @property
    def requests(self) -> list[Request]:
        return [*self.running, *self.waiting]

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)
