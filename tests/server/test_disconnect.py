"""Clients that leave, at every place, and what the others see of it (nothing); clients that wait."""

import json
import socket
import time

import pytest
from openai import OpenAI

from makeway import Engine, EngineConfig, SamplingParams
from makeway.server import respond
from tests.conftest import golden_path
from tests.devices import FlakyDevice
from tests.server.conftest import FAST, NAME, running, small_engine, until
from tests.server.engines import ScriptedEngine
from tests.server.http import ask, events_of, opened, read_until

LONG = {"model": NAME, "prompt": "x" * 200, "max_tokens": 1000, "ignore_eos": True, "temperature": 0}


@pytest.fixture
def one_place():
    """A server with one place, whose engine waits for its gate."""
    with running(lambda progress: ScriptedEngine(lambda prompt: "word " * 100, parallel=1, step_s=0.001)) as up:
        up.engine = up.server.loop._engine
        yield up


def idle(up):
    return not up.loop.n_running and not up.loop.n_waiting


@pytest.mark.parametrize("stream", [True, False])
def test_complaint_09_generation_stops_when_the_client_is_gone(one_place, stream):
    up = one_place
    step, waits = up.engine.step, []

    def step_and_wait():
        events = step()
        if not waits and any(e.kind == "token" and e.text for e in events):
            up.engine.gate.clear()  # the answer does not end before its client has gone, however busy the machine is
            waits.append(True)
        return events

    up.engine.step = step_and_wait
    with opened(up, "/v1/completions", {"prompt": "hi", "max_tokens": 400, "stream": stream}) as sock:
        until(lambda: waits)
        if stream:
            read_until(sock, b'"text":"w')
    until(lambda: up.loop._cancels)
    n_steps = up.engine.n_steps
    up.engine.gate.set()
    until(lambda: len(up.engine.cancelled) == 1)
    assert up.engine.n_steps <= n_steps + 2
    until(lambda: idle(up))
    assert not up.engine.requests


def test_complaint_11_leaving_in_prefill_frees_the_place_within_one_step(one_place):
    up = one_place
    up.engine.gate.clear()
    with opened(up, "/v1/completions", {"prompt": "x" * 3000, "stream": True}):
        until(lambda: up.engine.requests)
    until(lambda: up.loop._cancels)
    before = up.engine.n_steps
    up.engine.gate.set()
    until(lambda: up.engine.cancelled)
    assert up.engine.n_steps <= before + 2
    until(lambda: idle(up))


def test_complaint_10_leaving_the_queue_frees_the_place_and_aborts_nobody(one_place):
    up = one_place
    up.engine.gate.clear()
    body = {"prompt": "hi", "max_tokens": 10}
    with opened(up, "/v1/completions", body, headers=["Connection: close"]) as first:
        until(lambda: up.loop.n_running == 1)
        with opened(up, "/v1/completions", body), opened(up, "/v1/completions", body | {"stream": True}):
            until(lambda: up.loop.n_waiting == 2)
        until(lambda: up.loop.n_waiting == 0)
        up.engine.gate.set()
        assert b'"finish_reason":"length"' in read_until(first, b"usage")
    assert up.engine.cancelled == []
    assert len(up.engine.prompts) == 1


def test_others_answers_are_the_same_beside_clients_that_leave():
    with small_engine() as engine:
        expected = "".join(e.text for e in engine.generate("The router", SamplingParams(max_tokens=60)))
    with running() as up, OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        for _ in range(2):
            with opened(up, "/v1/completions", LONG | {"stream": True}) as sock:
                read_until(sock, b"HTTP/1.1 200")
                stream = client.completions.create(
                    model=NAME, prompt="The router", max_tokens=60, temperature=0, stream=True
                )
                chunks = [next(stream)]
            chunks += list(stream)
            assert "".join(c.choices[0].text for c in chunks) == expected
        until(lambda: idle(up))
        pool = up.server.loop._engine.memory.kv.pool
        until(lambda: pool.n_free == pool.n_blocks)


def test_a_client_that_goes_away_in_the_middle_of_its_request_leaves_nothing(up):
    for n_bytes in (5, 40, 120):
        with socket.create_connection(("127.0.0.1", up.port)) as sock:
            sock.sendall(
                (b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 5000\r\n\r\n" + b"x" * 500)[:n_bytes]
            )
    assert ask(up, "/v1/completions", {"prompt": "hi", "max_tokens": 1})[0] == 200
    until(lambda: not up.http.server_state.tasks and not up.http.server_state.connections)


def test_waiting_and_reading_clients_hear_something_and_see_their_progress(one_place, monkeypatch):
    monkeypatch.setattr(respond, "KEEP_ALIVE_S", 0.1)
    up = one_place
    up.engine.gate.clear()
    body = {"prompt": "hi", "max_tokens": 10, "stream": True}
    with opened(up, "/v1/completions", body) as first, opened(up, "/v1/messages", {
        "model": NAME, "max_tokens": 5, "messages": [{"role": "user", "content": "x"}], "stream": True,
    }) as second:  # fmt: skip
        until(lambda: up.loop.n_running + up.loop.n_waiting == 2)
        with opened(up, "/v1/completions", body | {"return_progress": True}) as third:
            started = time.monotonic()
            assert b"text/event-stream" in read_until(first, b": keep-alive\n\n")
            read_until(second, b"event: ping")
            seen = read_until(third, b"prompt_progress")
            assert time.monotonic() - started < 20, "5 s on a machine with room"
            (progress,) = [e["prompt_progress"] for e in events_of(seen) if "prompt_progress" in e][:1]
            assert progress["state"] == "queued"
            assert progress["position"] == 1
            up.engine.gate.set()
            rest = events_of(read_until(third, b"[DONE]"))
            assert rest[-1]["choices"][0]["finish_reason"] == "length"


def test_complaint_11_progress_in_prefill_tells_tokens_and_time(one_place):
    body = {"prompt": "x" * 3000, "max_tokens": 1, "stream": True, "return_progress": True}
    _, _, content = ask(one_place, "/v1/completions", body)
    progress = [e["prompt_progress"] for e in events_of(content) if "prompt_progress" in e]
    assert progress[-1]["processed"] == progress[-1]["total"] == 3000
    assert progress[0]["processed"] < 3000
    assert all(p["time_ms"] >= 0 for p in progress)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages"])
@pytest.mark.parametrize("stream", [False, True])
def test_complaint_15_a_failing_engine_is_told_to_every_client_at_once(path, stream):
    template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    with running(
        lambda progress: ScriptedEngine(lambda prompt: "w" * 50, parallel=1, fail_at=8), chat_template=template
    ) as up:
        engine = up.server.loop._engine
        engine.gate.clear()
        body = {"prompt": "hi", "max_tokens": 40, "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
        with opened(up, path, body) as first, opened(up, path, body) as second:
            until(lambda: up.loop.n_running + up.loop.n_waiting == 2)
            engine.gate.set()
            for sock in (first, second):
                data = read_until(sock, b"a slot is torn")
                assert (b"HTTP/1.1 200" if stream else b"HTTP/1.1 503") in data
        status, _, content = ask(up, "/health", method="GET")
        assert status == 503
        assert json.loads(content) | {"since_s": 0} == {"status": "failed", "reason": "a slot is torn", "since_s": 0}
        assert ask(up, path, body)[0] == 503


def test_complaint_15_an_engine_whose_device_fails_comes_back_and_is_right(caplog):
    """A device that fails in the middle of an answer: its client is told, the engine is rebuilt, the next is right."""
    body = {"prompt": "The router", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    device = FlakyDevice()

    def load(progress):
        config = EngineConfig(device="cpu", context=512, slots=1)
        return Engine(golden_path(FAST), config, device=device, progress=progress)

    def text(content):
        return json.loads(content)["choices"][0]["text"]

    with running(load, restart_on_failure=True) as up:
        status, _, content = ask(up, "/v1/completions", body)
        assert status == 200
        expected = text(content)
        with opened(up, "/v1/completions", body | {"max_tokens": 400, "stream": True}) as sock:
            read_until(sock, b"data: ")
            device.fail_at = device.n_calls + 10
            data = read_until(sock, b"[DONE]")
        assert b"flaky device" in data
        until(lambda: up.loop.health.state == "ok" and up.loop.health.n_restarts == 1)
        status, _, content = ask(up, "/v1/completions", body)
        assert status == 200
        assert text(content) == expected
        assert json.loads(ask(up, "/status", method="GET")[2])["n_restarts"] == 1
    assert "flaky device" in caplog.text
