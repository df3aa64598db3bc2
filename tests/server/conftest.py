"""A real server on a real socket, in a thread of the test's process."""

import asyncio
import socket
import threading
from contextlib import contextmanager

import pytest

from makeway import Engine, EngineConfig
from makeway.server.app import Server
from makeway.server.run import listen, make_uvicorn
from makeway.server.settings import ServerConfig
from tests.conftest import golden_path

FAST = "qwen3moe-k256-Q4_K_M.gguf"  # about 250 tokens a second on one core
NAME = "tiny"


class Running:
    """A server that is up; `base` is its address."""

    def __init__(self, server, http, sock):
        self.server = server
        self.loop = server.loop
        self.http = http
        self.port = sock.getsockname()[1]
        self.base = f"http://127.0.0.1:{self.port}"

    def ask(self, function):
        """Runs a function in the server's asyncio thread and returns its result."""
        done = threading.Event()
        result = []

        def run():
            result.append(function())
            done.set()

        self.asyncio.call_soon_threadsafe(run)
        assert done.wait(60)
        return result[0]


def small_engine(progress=None, **config):
    return Engine.load(
        golden_path(FAST), EngineConfig(**{"device": "cpu", "parallel": 3, "context": 2048} | config), progress=progress
    )


@contextmanager
def running(load=small_engine, *, wait=True, **config):
    """Starts a server; ends it at the exit and checks that nothing is left of it."""
    server = Server(ServerConfig(**{"names": (NAME,), "port": 0, "shutdown_s": 5.0} | config), load)
    sock = listen("127.0.0.1", 0)
    http = make_uvicorn(server)
    up = Running(server, http, sock)

    async def main():
        up.asyncio = asyncio.get_running_loop()
        await http.serve(sockets=[sock])

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    try:
        while not http.started:
            assert thread.is_alive()
            threading.Event().wait(0.005)
        if wait:
            until(lambda: server.loop.health.state == "ok")
        yield up
    finally:
        http.should_exit = True
        thread.join(30)
        sock.close()
    assert not thread.is_alive()
    assert not server.loop._thread.is_alive()


def until(condition, timeout_s=60.0):
    """Waits for a condition to become true; the limit only tells a failure, also on a busy machine."""
    waiter = threading.Event()
    for _ in range(int(timeout_s / 0.01)):
        if condition():
            return
        waiter.wait(0.01)
    raise AssertionError("it did not happen in time")


@pytest.fixture(scope="session")
def up():
    """One server for all tests that leave nothing behind."""
    with running() as server:
        yield server


def free_port():
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]
