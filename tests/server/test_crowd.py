"""Many clients that connect, ask, wait or leave at random moments; who stays gets the right answer, nothing is left."""

import asyncio
import gc
import random
import threading
import time

import pytest

from makeway import SamplingParams
from makeway.server.service import N_WORKERS
from tests.server.conftest import running, small_engine, until
from tests.server.http import ask, events_of, opened, read_until

PROMPTS = [("The router picks " * n)[: 17 * n] for n in (1, 2, 5)]
N_TOKENS = 6


def expected():
    """Each prompt's greedy text, from an engine of its own."""
    texts = {}
    with small_engine() as engine:
        for prompt in PROMPTS:
            params = SamplingParams(max_tokens=N_TOKENS, ignore_eos=True)
            texts[prompt] = "".join(e.text for e in engine.generate(prompt, params))
    return texts


class Client(threading.Thread):
    """One client; `problems` collects what went wrong."""

    def __init__(self, up, texts, *, seed, until_s, problems):
        super().__init__()
        self.up, self.texts, self.until_s, self.problems = up, texts, until_s, problems
        self.rng = random.Random(seed)
        self.n_answers = 0

    def run(self):
        try:
            while time.monotonic() < self.until_s:
                self.once()
        except Exception as error:  # noqa: BLE001 - whatever it is, the test shows it
            self.problems.append(repr(error))

    def once(self):
        rng = self.rng
        prompt, stream = rng.choice(PROMPTS), rng.random() < 0.6
        body = {
            "prompt": prompt,
            "max_tokens": N_TOKENS,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
            "n": rng.choice((1, 1, 1, 3)),
            "return_progress": rng.random() < 0.3,
        }
        if rng.random() < 0.5:  # leaves at a random moment
            with opened(self.up, "/v1/completions", body | {"max_tokens": 200}, timeout=120) as sock:
                if stream and rng.random() < 0.5:
                    read_until(sock, b"data: ")
                time.sleep(rng.random() * rng.choice((0.0, 0.1, 0.5)))
            return
        status, _, content = ask(self.up, "/v1/completions", body, timeout=120)
        if status != 200:
            self.problems.append(f"{status} {content!r}")
            return
        got = [""] * body["n"]
        for document in events_of(content) if stream else events_of(b"data: " + content):
            for choice in document.get("choices", ()):
                got[choice["index"]] += choice["text"]
        self.n_answers += 1
        if got != [self.texts[prompt]] * body["n"]:
            self.problems.append(f"wrong text {got} for {prompt!r}")


def crowd(n_clients, seconds):
    texts = expected()
    with running(max_waiting=4 * n_clients) as up:
        pool = up.server.loop._engine.memory.kv.pool
        free, n_threads = pool.n_free, threading.active_count()

        def calm():
            until(lambda: not up.loop.n_running and not up.loop.n_waiting, 60)
            until(lambda: not up.http.server_state.connections and not up.http.server_state.tasks)
            until(lambda: pool.n_free == free)
            assert not up.loop._by_id
            assert not up.loop._cancels
            assert not up.loop._outgoing
            gc.collect()
            return threading.active_count(), len(gc.get_objects())

        problems, clients = [], []
        for part in range(2):  # the first part fills caches, the second must not grow
            until_s = time.monotonic() + seconds / 2
            group = [
                Client(up, texts, seed=100 * part + i, until_s=until_s, problems=problems) for i in range(n_clients)
            ]
            for client in group:
                client.start()
            for client in group:
                client.join(120 + seconds)
                assert not client.is_alive()
            clients += group
            after = (*calm(), len(up.ask(lambda: asyncio.all_tasks())))
            if part == 0:
                before = after
        assert problems == []
        assert sum(client.n_answers for client in clients) > 0
        assert after[0] <= n_threads + N_WORKERS
        assert after[2] <= before[2]  # tasks
        assert after[1] - before[1] < 5_000  # objects
        assert up.loop.health.state == "ok"


def test_twenty_clients_come_and_go():
    crowd(20, 0.6)


@pytest.mark.slow
def test_two_hundred_clients_come_and_go_for_minutes():
    crowd(200, 240.0)
