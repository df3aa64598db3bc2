"""Requests that no client should send: whatever comes, the answer is a clear refusal, and the server goes on."""

import copy
import http.client
import json
import random
import socket

import pytest

from tests.server.conftest import NAME, running, small_engine, until
from tests.server.test_chat import ADD, TEMPLATE

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
SEEDS = {
    "/v1/completions": {
        "model": NAME, "prompt": "hi", "max_tokens": 1, "n": 1, "stream": False, "logprobs": 1, "stop": ["x"],
        "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 1, "logit_bias": {"5": 1.0}, "echo": False,
        "stream_options": None, "return_progress": False, "guided_regex": None, "structured_outputs": None,
    },
    "/v1/chat/completions": {
        "model": NAME, "max_tokens": 1, "n": 1, "stream": True, "stream_options": {"include_usage": True},
        "messages": [
            {"role": "system", "content": "s"},
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "3"},
        ],
        "tools": [ADD], "tool_choice": "auto", "logprobs": True, "top_logprobs": 1,
        "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": False},
        "continue_final_message": False, "reasoning_effort": "low",
    },
    "/v1/messages": {
        "model": NAME, "max_tokens": 1, "system": [{"type": "text", "text": "s"}],
        "messages": [
            {"role": "user", "content": "hi"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": "3"}]},
        ],
        "tools": [{"name": "add", "input_schema": ADD["function"]["parameters"]}],
        "tool_choice": {"type": "auto"}, "thinking": {"type": "disabled"}, "stop_sequences": ["x"], "stream": False,
    },
    "/v1/messages/count_tokens": {"model": NAME, "messages": [{"role": "user", "content": "hi"}]},
    "/tokenize": {"prompt": "hi", "add_special_tokens": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/v1/embeddings": {"model": NAME, "input": "x"},
}  # fmt: skip
VALUES = (
    None, True, False, 0, 1, -1, 3.5, -0.0, 1e-320, 1e308, 2**31, 2**63, 2**64, -(2**70), "", " ", "x", "\0", "\ud800",
    "🙂" * 50, "<|im_start|>", "{{ 7*7 }}", "<tool_call>", "</think>", "x" * 5000, [], {}, [[]], [None], [{}], [1, "a"],
    {"a": None}, {"type": "function"}, {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}},
    {"role": "user", "content": "x"}, [{"role": "assistant", "content": ""}], [[[[[[[[[[1]]]]]]]]]],
    {"type": "image_url", "image_url": {"url": "http://x"}}, "required", "none", "auto", "a(b", "root ::= ",
)  # fmt: skip
PATHS = (
    *SEEDS,
    "/",
    "/health",
    "/status",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/static/page.js",
    "/%00",
    "/x" * 50,
)


def places(value):
    """Every (container, key) inside a document."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, item in list(items):
        yield value, key
        if isinstance(item, dict | list):
            yield from places(item)


def mutated(body, rng):
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        spots = list(places(body))
        if not spots:
            break
        container, key = rng.choice(spots)
        action = rng.random()
        if action < 0.65:
            container[key] = copy.deepcopy(rng.choice(VALUES))
        elif action < 0.8:
            del container[key]
        elif action < 0.9 and isinstance(container, list):
            container.extend(copy.deepcopy(container[:3]) * rng.choice((1, 20)))
        else:
            other = rng.choice(list(SEEDS.values()))
            container[key] = copy.deepcopy(rng.choice([c[k] for c, k in places(other)]))
    return body


def as_bytes(body, rng):
    data = json.dumps(body).encode()
    kind = rng.random()
    if kind < 0.85:
        return data
    if kind < 0.9:
        return data[: rng.randrange(len(data) + 1)]
    if kind < 0.95:
        at = rng.randrange(len(data))
        return data[:at] + rng.randbytes(rng.randrange(1, 5)) + data[at + 1 :]
    return rng.choice((b"", b"null", b"[" * 5000, b'{"a":' * 5000, rng.randbytes(50), b"\xef\xbb\xbf{}", data + b"}"))


def fuzz(up, seed, n):
    """Sends n requests over one connection that is opened again when the server closes it; returns the statuses."""
    rng = random.Random(seed)
    statuses = {}
    connection = http.client.HTTPConnection("127.0.0.1", up.port, timeout=30)
    for i in range(n):
        path = rng.choice(list(SEEDS)) if rng.random() < 0.93 else rng.choice(PATHS)
        data = as_bytes(mutated(SEEDS.get(path, {"a": 1}), rng), rng)
        method = "POST" if rng.random() < 0.97 else rng.choice(("GET", "PUT", "DELETE", "OPTIONS", "HEAD", "BREW"))
        headers = {} if rng.random() < 0.95 else rng.choice(
            ({"Content-Type": "text/plain"}, {"Origin": "null"}, {"Accept": "x" * 3000}, {"Authorization": "Bearer é"})
        )  # fmt: skip
        connection.request(method, path, body=data, headers=headers)
        response = connection.getresponse()
        content = response.read()
        case = f"request {i} of seed {seed}: {method} {path} {data[:2000]!r} -> {response.status} {content[:500]!r}"
        assert response.status < 500, case
        if response.status >= 400 and method != "HEAD":
            assert "error" in json.loads(content), case
        if response.headers["content-type"].startswith("text/event-stream"):
            assert b"data: [DONE]" in content or b"event: message_stop" in content or b"error" in content, case
        statuses[response.status] = statuses.get(response.status, 0) + 1
    connection.close()
    return statuses


def garbage(up, seed, n):
    """Bytes that are hardly HTTP; the server may answer or close, but must not hang."""
    rng = random.Random(seed)
    for _ in range(n):
        with socket.create_connection(("127.0.0.1", up.port), timeout=10) as sock:
            sock.sendall(
                rng.choice(
                    (
                        rng.randbytes(200),
                        b"GET / HTTP/9.9\r\n\r\n",
                        b"POST /v1/completions HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
                        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
                        b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 3000 + b"\r\n",
                    )
                )
            )
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(65536):
                pass


def survives(n, n_garbage):
    with running(lambda progress: small_engine(progress, context=1024), chat_template=TEMPLATE) as up:
        statuses = fuzz(up, 1, n)
        garbage(up, 2, n_garbage)
        assert statuses[200] > n / 50
        assert statuses[400] > n / 3
        until(lambda: not up.loop.n_running and not up.loop.n_waiting)
        until(lambda: not up.http.server_state.tasks and not up.http.server_state.connections)
        pool = up.server.loop._engine.memory.kv.pool
        assert pool.n_free == pool.n_blocks
        assert up.loop.health.state == "ok"
        assert up.loop.health.n_restarts == 0


def test_bad_requests_are_refused_and_nothing_hangs():
    survives(60, 20)


@pytest.mark.slow
def test_ten_thousand_bad_requests():
    survives(10_000, 500)
