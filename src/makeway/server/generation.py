"""The answers of one HTTP request: submitted together, read as one stream of events, freed together.

Owns the tickets of a request until it is closed. Never formats events. Hazard: `close` must run whatever happens, or
a client that has left goes on using the engine.
"""

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from makeway.config import SamplingParams
from makeway.engine import Event
from makeway.server.errors import Failure
from makeway.server.loop import EngineLoop
from makeway.server.mailbox import Mailbox
from makeway.server.metrics import Metrics
from makeway.server.sampling import choice_of
from makeway.server.ticket import Ticket
from makeway.text.grammar import CompiledGrammar

IDLE_S = 1.0
TELL_EVERY_S = 0.5


@dataclass(frozen=True)
class Asked:
    """One prompt of a request; it gets `n` answers."""

    tokens: list[int]
    sampling: SamplingParams
    n: int = 1
    grammar: CompiledGrammar | None = None


class Generation:
    """An async context manager around the answers; `events` yields them until all have ended."""

    def __init__(self, loop: EngineLoop, metrics: Metrics, *, client: str, prompts: Sequence[Asked]) -> None:
        """Queues everything at once; raises ApiError when there is no room or no engine."""
        self._loop = loop
        self._metrics = metrics
        self._mailbox = Mailbox()
        self._tickets: list[Ticket] = []
        for prompt in prompts:
            for i in range(prompt.n):
                sampling = choice_of(prompt.sampling, i)
                index = len(self._tickets)
                self._tickets.append(Ticket(client, prompt.tokens, sampling, self._mailbox, index, prompt.grammar))
        self._states = [_State() for _ in self._tickets]
        self._open = {ticket.index: ticket for ticket in self._tickets}
        loop.submit(self._tickets)

    async def events(self) -> AsyncIterator[tuple[int, Event] | None]:
        """(answer, event) as they come, None after each IDLE_S without one; raises ApiError when the engine fails."""
        while self._open:
            got = await self._mailbox.get(IDLE_S)
            if got is None:
                yield None
                continue
            index, item = got
            if isinstance(item, Failure):
                self._metrics.ended("error")
                raise item.error()
            self._observe(index, item)
            if item.kind == "finish":
                del self._open[index]
            yield index, item

    def news(self, got: tuple[int, Event] | None) -> list[tuple[int, dict[str, Any]]]:
        """(answer, progress) worth telling a client: of a progress event at most twice a second, its end always; of
        all that have no token yet when nothing has come for a while."""
        if got is None:
            return [(i, self.progress(i)) for i in self._open if not self._states[i].n_tokens]
        index, event = got
        state, now = self._states[index], time.monotonic()
        if event.n_done < event.n_prompt and now - state.told_s < TELL_EVERY_S:
            return []
        state.told_s = now
        return [(index, self.progress(index))]

    def progress(self, index: int) -> dict[str, Any]:
        """Where an answer stands: waiting in the queue, its prompt being read, paused for another's, or answering."""
        state, ticket = self._states[index], self._tickets[index]
        n_prompt = len(ticket.tokens)
        position = None if state.n_tokens or state.n_read else self._loop.position(ticket)
        elapsed_s = time.monotonic() - ticket.created_s
        rate = 0.0
        if state.n_read and state.read_s > state.started_s:
            rate = (state.n_read - state.n_first) / (state.read_s - state.started_s)
        left = n_prompt - state.n_read
        stalled = time.monotonic() - state.read_s > IDLE_S
        name = "answering" if not left else "queued" if position is not None else "paused" if stalled else "reading"
        return {
            "state": name,
            "position": position,
            "total": n_prompt,
            "processed": state.n_read,
            "time_ms": round(1000 * elapsed_s),
            "eta_ms": round(1000 * left / rate) if rate > 0 else None,
        }

    def close(self) -> None:
        """Frees the places of the answers that have not ended."""
        for ticket in self._open.values():
            self._loop.cancel(ticket)
            self._metrics.ended("cancelled")
        self._open.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _observe(self, index: int, event: Event) -> None:
        state, now = self._states[index], time.monotonic()
        if event.kind == "progress":
            if not state.started_s:
                state.started_s, state.n_first = now, event.n_done
            state.n_read, state.read_s = event.n_done, now
        elif event.kind == "token":
            if state.n_tokens == 0:
                self._metrics.first_token(now - self._tickets[index].created_s, len(self._tickets[index].tokens))
                state.n_read = len(self._tickets[index].tokens)
            else:
                self._metrics.next_token(now - state.token_s)
            state.n_tokens += 1
            state.token_s = now
        elif event.kind == "finish":
            self._metrics.ended(event.reason or "stop", now - self._tickets[index].created_s)


@dataclass
class _State:
    n_read: int = 0
    n_first: int = 0
    started_s: float = 0.0
    read_s: float = 0.0
    n_tokens: int = 0
    token_s: float = 0.0
    told_s: float = 0.0
