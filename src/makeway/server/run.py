"""Runs the server on a socket until a signal: uvicorn, and what SIGTERM means.

Owns the process's signals while it runs. Never parses flags. Hazard: uvicorn's own signal handling would end the
process by the signal; here the first signal ends it in order, and a second one at once.
"""

import asyncio
import contextlib
import logging
import signal
import socket
from collections.abc import Callable, Iterator

import uvicorn

from makeway.errors import UserError
from makeway.server.app import Server

logger = logging.getLogger("makeway.server")

SIGNALS = (signal.SIGINT, signal.SIGTERM)
MAX_CONNECTIONS = 800  # below the usual limit of 1024 open files
KEEP_CONNECTION_S = 75
EXTRA_S = 5.0  # for answers that were ended to be written


class Uvicorn(uvicorn.Server):
    """uvicorn without its signal handlers."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def make_uvicorn(server: Server) -> Uvicorn:
    """uvicorn for this server's host and port; nothing is bound yet."""
    config = server.config
    return Uvicorn(
        uvicorn.Config(
            server.app,
            host=config.host,
            port=config.port,
            http="h11",
            ws="none",
            lifespan="on",
            access_log=False,
            log_config=None,
            server_header=False,
            limit_concurrency=MAX_CONNECTIONS,
            timeout_keep_alive=KEEP_CONNECTION_S,
            timeout_graceful_shutdown=int(config.shutdown_s + EXTRA_S),
        )
    )


def listen(host: str, port: int) -> socket.socket:
    """A bound socket; raises UserError when the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:
        sock.close()
        raise UserError(f"cannot listen on {host} port {port}: {error}; choose another --host or --port") from error
    return sock


async def serve(
    server: Server, sock: socket.socket, *, on_ready: Callable[[], None], on_second_signal: Callable[[int], None]
) -> None:
    """Serves until a signal, then lets requests finish. `on_second_signal` should end the process at once.

    Raises what the first load of the model raised. Must run in the main thread, whose signals it takes.
    """
    http = make_uvicorn(server)
    loop = asyncio.get_running_loop()
    ending: asyncio.Task[None] | None = None

    def on_signal(number: int) -> None:
        nonlocal ending
        if ending is not None:
            on_second_signal(number)
            return
        seconds = server.config.shutdown_s
        logger.warning("stopping: requests have %g s to finish; a second signal stops at once", seconds)
        http.should_exit = True
        ending = asyncio.ensure_future(server.loop.stop(seconds))

    for number in SIGNALS:
        loop.add_signal_handler(number, on_signal, number)
    serving = asyncio.ensure_future(http.serve(sockets=[sock]))
    try:
        while not http.started and not serving.done():
            await asyncio.sleep(0.01)
        loaded = asyncio.ensure_future(server.loop.loaded())
        await asyncio.wait((loaded, serving), return_when=asyncio.FIRST_COMPLETED)
        if loaded.done():
            if loaded.exception() is None:
                on_ready()
            elif _is_final(server, loaded.exception()):
                http.should_exit = True
        await serving
        if ending is not None:
            await ending
        elif loaded.done() and _is_final(server, loaded.exception()):
            loaded.result()
        loaded.cancel()
    finally:
        for number in SIGNALS:
            loop.remove_signal_handler(number)


def _is_final(server: Server, error: BaseException | None) -> bool:
    """Whether trying again cannot help: the file or a flag is wrong, or nobody asked for it."""
    return isinstance(error, UserError) or (error is not None and not server.config.restart_on_failure)
