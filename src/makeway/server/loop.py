"""The engine thread: loads the engine, feeds it requests, hands its events to asyncio, and restarts it when told to.

Owns the engine and the queue of requests in front of it. Never formats anything and never blocks asyncio: methods that
clients' tasks call hold a lock for microseconds. Hazard: only the engine thread may touch the engine; asyncio sees
`Ready` (tokenizer, sizes) and copies of the status document.
"""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from makeway.engine.phases import Phase
from makeway.errors import EngineFailed, MakewayError, UserError
from makeway.server.errors import ApiError, Failure
from makeway.server.mailbox import Item
from makeway.server.queue import FairQueue
from makeway.server.served import Health, Progress, Ready, ServedEngine, State
from makeway.server.ticket import Ticket

logger = logging.getLogger("makeway.server")

MAX_OUTGOING = 65536  # events that asyncio has not taken yet; then the engine waits
STATUS_EVERY_S = 0.25
FIRST_RESTART_DELAY_S = 0.25
MAX_RESTART_DELAY_S = 60.0
SHUTTING_DOWN = Failure("the server is shutting down", code="shutting_down")


class EngineLoop:
    """`start` once, from asyncio; then `submit` and `cancel`; `stop` at the end."""

    def __init__(
        self, load: Callable[[Progress], ServedEngine], *, max_waiting: int, restart_on_failure: bool = False
    ) -> None:
        """`load` runs in the engine thread and tells its progress (bytes done, bytes in all).

        restart_on_failure: a failed engine is rebuilt, or loaded again when that fails too.
        """
        self._load = load
        self._restart = restart_on_failure
        self._lock = threading.Lock()
        self._wake = threading.Condition(self._lock)
        self._drained = threading.Condition(self._lock)
        self.max_waiting = max_waiting
        self._queue = FairQueue(max_waiting)
        self._running: set[Ticket] = set()  # in the engine's hands
        self._by_id: dict[int, Ticket] = {}  # the same, for the engine thread alone
        self._cancels: list[Ticket] = []
        self._outgoing: list[tuple[Ticket, Item]] = []
        self._ending = False  # no new requests
        self._stop = False  # no more steps
        self._asyncio: asyncio.AbstractEventLoop | None = None
        self._engine: ServedEngine | None = None  # for the engine thread alone
        self._thread = threading.Thread(target=self._main, name="makeway-engine", daemon=True)
        self._loaded: asyncio.Future[Exception | None] | None = None
        self._status_s = 0.0
        self.health = Health("loading", since_s=time.monotonic())
        self.status: Mapping[str, Any] = {}
        self.ready: Ready | None = None

    # ---- called from asyncio ----

    def start(self) -> None:
        """Starts the thread, which loads the engine."""
        self._asyncio = asyncio.get_running_loop()
        self._loaded = self._asyncio.create_future()
        self._thread.start()

    async def loaded(self) -> None:
        """Returns when the engine is loaded for the first time; raises what the first load raised."""
        assert self._loaded is not None
        error = await asyncio.shield(self._loaded)
        if error is not None:
            raise error

    @property
    def n_waiting(self) -> int:
        return len(self._queue)

    @property
    def n_running(self) -> int:
        return len(self._running)

    def need_ready(self) -> Ready:
        """What requests need of the engine; raises ApiError (503) while it loads, has failed, or stops."""
        health, ready = self.health, self.ready
        if health.state == "ok" and ready is not None:
            return ready
        if health.state == "loading":
            message = f"the model is loading ({health.loaded:.0%}); try again soon"
            raise ApiError(503, message, code="loading", retry_after_s=5)
        if health.state == "stopping":
            raise SHUTTING_DOWN.error()
        raise Failure(f"the engine has failed: {health.reason}").error()

    def submit(self, tickets: Sequence[Ticket]) -> None:
        """Queues the answers of one request, all or none; raises ApiError (429 when full, 503 when not ready)."""
        with self._lock:
            self.need_ready()
            if not self._queue.has_room(len(tickets)):
                raise ApiError(
                    429,
                    f"{len(self._queue)} requests are waiting and {len(tickets)} more would exceed the limit of "
                    f"{self._queue.limit}; try again later",
                    code="queue_full",
                    retry_after_s=1,
                )
            for ticket in tickets:
                self._queue.push(ticket)
            self._wake.notify()

    def cancel(self, ticket: Ticket) -> None:
        """Frees a request's place, wherever it is; harmless when it has ended."""
        with self._lock:
            if not self._queue.remove(ticket):
                self._cancels.append(ticket)
                self._wake.notify()

    def position(self, ticket: Ticket) -> int | None:
        """How many requests are served before this one; None when it does not wait."""
        with self._lock:
            return self._queue.position(ticket)

    def refuse_new(self) -> None:
        """From now on new requests get a 503; the others go on."""
        with self._lock:
            self._ending = True
            self._set_health("stopping")
            self._wake.notify()

    async def stop(self, timeout_s: float) -> None:
        """Lets requests finish for `timeout_s`, ends the rest with an error, closes the engine, joins the thread."""
        self.refuse_new()
        end = time.monotonic() + timeout_s
        while self._thread.is_alive() and (self._queue or self._running or self._outgoing) and time.monotonic() < end:
            await asyncio.sleep(0.02)
        self.stop_now()
        await asyncio.to_thread(self._thread.join, 10.0)
        if self._thread.is_alive():
            logger.warning("the engine is still busy with one step; leaving it behind")

    def stop_now(self) -> None:
        """Ends every request with an error and asks the thread to end; does not wait for it."""
        with self._lock:
            self._ending = self._stop = True
            self._set_health("stopping")
            left = self._take_all()
            self._wake.notify()
            self._drained.notify()
        self._deliver()
        for ticket in left:
            ticket.mailbox.put(ticket.index, SHUTTING_DOWN)

    def _deliver(self) -> None:
        with self._lock:
            outgoing, self._outgoing = self._outgoing, []
            self._drained.notify()
        for ticket, item in outgoing:
            if not ticket.mailbox.put(ticket.index, item):
                self.cancel(ticket)

    # ---- the engine thread ----

    def _main(self) -> None:
        delay_s = FIRST_RESTART_DELAY_S
        try:
            while not self._ending:
                started_s = time.monotonic()
                try:
                    engine = self._revive()
                    while self._turn(engine):
                        pass
                except MakewayError as error:
                    if not self._stop:
                        logger.error("the engine failed: %s", error)
                    self._fail(error)
                except Exception as error:
                    logger.exception("the engine failed")
                    self._fail(error)
                if not self._restart:
                    return
                delay_s = FIRST_RESTART_DELAY_S if time.monotonic() - started_s > MAX_RESTART_DELAY_S else delay_s
                with self._lock:
                    self._wake.wait_for(lambda: self._ending, timeout=delay_s)
                    self._set_health("loading", n_more_restarts=1)
                delay_s = min(MAX_RESTART_DELAY_S, 2 * delay_s)
        finally:
            self._close_engine()

    def _revive(self) -> ServedEngine:
        """A working engine: the failed one rebuilt, or a fresh one."""
        if self._engine is not None:
            logger.warning("rebuilding the engine")
            try:
                self._engine.rebuild()
            except Exception:
                logger.exception("the engine cannot be rebuilt; loading the model again")
                self._close_engine()
        if self._engine is None:
            self._engine = self._load(self._loading)
        engine = self._engine
        self.status = engine.status()
        with self._lock:
            self.ready = Ready(engine.tokenizer, engine.encode, engine.context, engine.model.facts.n_vocab)
            self._set_health("ok")
        self._tell_loaded(None)
        return engine

    def _loading(self, n_done: int, n_all: int) -> None:
        with self._lock:
            if self._stop:
                raise EngineFailed("the server was stopped while the model was loading")
            self.health = replace(self.health, loaded=n_done / max(1, n_all))

    def _turn(self, engine: ServedEngine) -> bool:
        """Takes what clients asked for, and runs one step; False when asked to stop."""
        admitted: list[Ticket] = []
        with self._lock:
            n_places = engine.config.parallel - len(self._running)
            busy = engine.busy
            self._wake.wait_for(lambda: self._stop or busy or self._cancels or (n_places > 0 and len(self._queue) > 0))
            if self._stop:
                return False
            while len(admitted) < n_places and (ticket := self._queue.pop()) is not None:
                admitted.append(ticket)
                self._running.add(ticket)
            cancels, self._cancels = self._cancels, []
        for ticket in admitted:
            self._add(engine, ticket)
        for ticket in cancels:
            if ticket.request_id is not None and self._by_id.get(ticket.request_id) is ticket:
                del self._by_id[ticket.request_id]
                engine.cancel(ticket.request_id)
                self._forget(ticket)
        self._step(engine)
        if not engine.busy or engine.phase is Phase.FAILED or time.monotonic() - self._status_s > STATUS_EVERY_S:
            self.status = engine.status()
            self._status_s = time.monotonic()
        if engine.phase is Phase.FAILED:
            raise EngineFailed(str(self.status.get("failure") or "no reason given"))
        return True

    def _add(self, engine: ServedEngine, ticket: Ticket) -> None:
        try:
            ticket.request_id = engine.add(ticket.tokens, ticket.sampling, grammar=ticket.grammar)
        except UserError as error:
            self._forget(ticket)
            self._post([(ticket, Failure(str(error), code="invalid_request", status=400, retry_after_s=None))])
        else:
            self._by_id[ticket.request_id] = ticket

    def _step(self, engine: ServedEngine) -> None:
        """One step; its events go to their clients, but not those of clients that have left."""
        items: list[tuple[Ticket, Item]] = []
        for event in engine.step() if engine.busy else ():
            ticket = self._by_id.get(event.request_id)
            if ticket is None:
                continue
            item: Item = event
            if event.kind == "error":  # of this request alone; a failed engine is told to all of them by `_fail`
                if engine.phase is Phase.FAILED:
                    continue
                item = Failure(event.text, code="invalid_request", status=400, retry_after_s=None)
            items.append((ticket, item))
            if event.kind in ("finish", "error"):
                del self._by_id[event.request_id]
                self._forget(ticket)
        self._post(items)

    def _forget(self, ticket: Ticket) -> None:
        with self._lock:
            self._running.discard(ticket)

    def _post(self, items: Sequence[tuple[Ticket, Item]]) -> None:
        """Hands events to asyncio; waits while it is too far behind."""
        if not items:
            return
        with self._lock:
            self._drained.wait_for(lambda: self._stop or len(self._outgoing) < MAX_OUTGOING)
            first = not self._outgoing
            self._outgoing.extend(items)
        if first:
            self._call(self._deliver)

    def _fail(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        self._by_id.clear()
        with self._lock:
            self._set_health("failed", reason)
            left = self._take_all()
        failure = Failure(f"the engine has failed: {reason}")
        self._post([(ticket, failure) for ticket in left])
        self._tell_loaded(error)

    def _take_all(self) -> list[Ticket]:
        left = [*self._running, *self._queue.drain()]
        self._running.clear()
        self._cancels.clear()
        return left

    def _set_health(self, state: State, reason: str = "", *, n_more_restarts: int = 0) -> None:
        if self._ending:
            state = "stopping"
        n_restarts = self.health.n_restarts + n_more_restarts
        self.health = Health(state, reason, since_s=time.monotonic(), n_restarts=n_restarts)

    def _tell_loaded(self, error: Exception | None) -> None:
        def tell() -> None:
            assert self._loaded is not None
            if not self._loaded.done():
                self._loaded.set_result(error)

        self._call(tell)

    def _call(self, callback: Callable[[], None]) -> None:
        assert self._asyncio is not None
        try:
            self._asyncio.call_soon_threadsafe(callback)
        except RuntimeError:  # asyncio has ended: nobody listens any more
            logger.debug("asyncio is closed")

    def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        if engine is None:
            return
        try:
            engine.close()
        except Exception:
            logger.exception("the engine could not be closed")
