"""What requests have read, on its way to later prompts: points of live requests that wait to be copied to host RAM.

Owns the queue of points; the copies belong to the prefix cache. Never copies while a prompt is being read: a point
waits until its first token has left. Hazard: a point needs its request's blocks, so it is copied before they are freed.
"""

from dataclasses import dataclass

import torch

from makeway.engine.request import Request
from makeway.kv import BLOCK_TOKENS, RecurrentState, SequenceState
from makeway.kv.prefix import PrefixCache


@dataclass(frozen=True)
class Point:
    """The first `n_tokens` of a request are read, and `state` is a copy of its recurrent state behind them."""

    request: Request
    n_tokens: int
    state: RecurrentState


class Keeper:
    """Hands points to the prefix cache, one between two units of work, or all of a request's when it ends."""

    def __init__(self, prefixes: PrefixCache, sequences: dict[int, SequenceState]) -> None:
        """`sequences`: those of the live requests, by request id."""
        self._prefixes, self._sequences = prefixes, sequences
        self._points: list[Point] = []

    def add(self, points: list[Point]) -> None:
        """Points of requests; those that are gone have been handed over by `hand_over` already."""
        self._points += [point for point in points if point.request.id in self._sequences]

    def hand_over_one(self) -> None:
        """The oldest point, if there is one."""
        if self._points:
            self._put(self._points.pop(0))

    def hand_over(self, request: Request, more: list[Point]) -> None:
        """All points of a request that is about to lose its blocks, and those of `more` that are its own."""
        for point in [*self._points, *more]:
            if point.request is request:
                self._put(point)
        self._points = [point for point in self._points if point.request is not request]

    def is_due(self, request: Request) -> bool:
        """Whether an answer stands at the end of a block; its state must be settled before `add_answer`."""
        return bool(self._prefixes.budget_bytes) and request.n_read % BLOCK_TOKENS == 0

    def add_answer(self, request: Request) -> None:
        """The end of a block of an answer, instead of the one before it."""
        state = self._sequences[request.id].state.snapshot(torch.device("cpu"))
        self._points = [p for p in self._points if p.request is not request or p.n_tokens <= request.n_prompt]
        self._points.append(Point(request, request.n_read, state))

    def forget(self) -> None:
        """After a fault nobody knows what the blocks hold."""
        self._points = []

    def _put(self, point: Point) -> None:
        blocks = self._sequences[point.request.id].table.blocks
        self._prefixes.put(point.request.tokens[: point.n_tokens], blocks, point.state)
