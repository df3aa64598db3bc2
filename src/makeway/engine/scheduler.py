"""Whose turn it is: integers and requests only, no torch.

Owns the queue of waiting requests and the list of running ones. Never computes. Waiting prompts are read first, in
order of arrival, while running answers pause. Hazard: a request is in exactly one of the two places.
"""

from collections import deque

from makeway.engine.request import Request


class Scheduler:
    """At most `parallel` requests hold a sequence at once; the others wait."""

    def __init__(self, parallel: int) -> None:
        assert parallel >= 1
        self.parallel = parallel
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []

    def add(self, request: Request) -> None:
        self.waiting.append(request)

    def admit(self) -> list[Request]:
        """Moves waiting requests to free places; returns the ones that got one."""
        admitted = []
        while self.waiting and len(self.running) < self.parallel:
            request = self.waiting.popleft()
            self.running.append(request)
            admitted.append(request)
        return admitted

    def next_prompt(self) -> Request | None:
        """The first running request whose prompt is not read to its end."""
        return next((r for r in self.running if r.n_read < r.n_prompt), None)

    def decoding(self) -> list[Request]:
        return [r for r in self.running if r.n_read >= r.n_prompt]

    def remove(self, request: Request) -> None:
        """Takes a request out of the queue or gives its place free."""
        if request in self.running:
            self.running.remove(request)
        else:
            self.waiting.remove(request)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)
