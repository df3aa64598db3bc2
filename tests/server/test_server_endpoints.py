import json

import pytest

from tests.server.conftest import NAME, running, until
from tests.server.engines import ScriptedEngine
from tests.server.http import ask, get


def test_health_and_status(up):
    status, _, content = get(up, "/health")
    assert status == 200
    assert json.loads(content)["status"] == "ok"
    document = json.loads(get(up, "/status")[2])
    assert document["models"] == [NAME]
    assert document["engine"]["kernels"] == "reference"
    assert {"phase", "experts", "link", "handovers"} <= set(document["engine"])


def test_metrics_count_what_happened():
    with running(lambda progress: ScriptedEngine(lambda prompt: "abc")) as up:
        for _ in range(3):
            ask(up, "/v1/completions", {"prompt": "hello", "max_tokens": 2})
        ask(up, "/v1/completions", {"prompt": 5})
        n_prompt = json.loads(ask(up, "/tokenize", {"prompt": "hello"})[2])["count"]
        status, fields, content = get(up, "/metrics")
        values = dict(line.rsplit(" ", 1) for line in content.decode().splitlines() if not line.startswith("#"))
    assert status == 200
    assert fields["content-type"].startswith("text/plain")
    assert float(values["makeway:generation_tokens_total"]) == 6
    assert float(values["makeway:prompt_tokens_total"]) == 3 * n_prompt
    assert float(values['makeway:request_success_total{finished_reason="length"}']) == 3
    assert float(values["makeway:time_to_first_token_seconds_count"]) == 3
    assert float(values["makeway:inter_token_latency_seconds_count"]) == 3
    assert float(values['makeway:http_responses_total{status="4xx"}']) == 1
    assert float(values["makeway:num_requests_running"]) == 0
    assert float(values['makeway:engine{name="experts.hit_rate"}']) == 0.5


def test_tokens_there_and_back(up):
    text = "The router, <|im_end|> ünïcode"
    for field in ("prompt", "content"):
        status, _, content = ask(up, "/tokenize", {field: text})
        assert status == 200
        document = json.loads(content)
        assert document["count"] == len(document["tokens"])
    status, _, content = ask(up, "/detokenize", {"tokens": document["tokens"]})
    assert status == 200
    assert json.loads(content)["prompt"] == text
    for path, body in (
        ("/tokenize", {}),
        ("/tokenize", {"prompt": 5}),
        ("/tokenize", {"prompt": "\ud800"}),
        ("/detokenize", {}),
        ("/detokenize", {"tokens": ["x"]}),
        ("/detokenize", {"tokens": [10**9]}),
        ("/detokenize", {"tokens": [-1]}),
    ):
        assert ask(up, path, body)[0] == 400


def test_while_the_model_loads_requests_are_told_to_come_back():
    progress, going = [], []

    def load(tell):
        tell(25, 100)
        progress.append(tell)
        until(lambda: going)
        return ScriptedEngine(lambda prompt: "yes")

    with running(load, wait=False) as up:
        until(lambda: progress)
        status, fields, content = get(up, "/health")
        assert (status, fields["retry-after"]) == (503, "5")
        assert json.loads(content)["loaded"] == 0.25
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/messages", "/tokenize"):
            status, fields, content = ask(up, path, {"prompt": "x"})
            assert status == 503
            assert int(fields["retry-after"]) > 0
            assert b"loading (25%)" in content
        assert get(up, "/status")[0] == get(up, "/metrics")[0] == get(up, "/v1/models")[0] == get(up, "/")[0] == 200
        going.append(True)
        until(lambda: get(up, "/health")[0] == 200)
        assert ask(up, "/v1/completions", {"prompt": "x"})[0] == 200


@pytest.mark.parametrize("path", ["/nowhere", "/v1/nowhere", "/static/../app.py", "/static/nothing.js"])
def test_unknown_paths_are_json_404s(up, path):
    status, fields, content = get(up, path)
    assert status == 404
    assert fields["content-type"] == "application/json"
    assert json.loads(content)["error"]["type"] == "invalid_request_error"


def test_wrong_methods_are_told_so(up):
    assert get(up, "/v1/completions")[0] == 405
    assert ask(up, "/health", {})[0] == 405


def test_bodies_that_are_too_large_are_refused():
    with running(lambda progress: ScriptedEngine(lambda prompt: "yes"), max_body_mib=1) as up:
        status, _, content = ask(up, "/v1/completions", b" " * (2 << 20))
        assert status == 413
        assert b"1 MiB" in content
        assert ask(up, "/v1/completions", {"prompt": "x" * 1000})[0] == 200


def test_the_page_works_offline(up):
    status, fields, content = get(up, "/")
    assert status == 200
    assert fields["content-type"].startswith("text/html")
    assert "default-src 'self'" in fields["content-security-policy"]
    text = content.decode()
    for name in ("page.css", "page.js"):
        assert f"static/{name}" in text
        status, _, content = get(up, f"/static/{name}")
        assert status == 200
        text += content.decode()
    assert "http://" not in text
    assert "https://" not in text


def test_a_long_body_is_read_like_a_short_one(up):
    status, _, content = ask(up, "/tokenize", {"prompt": "abc", "ignored": "x" * 1_500_000})
    assert status == 200
    assert json.loads(content) == json.loads(ask(up, "/tokenize", {"prompt": "abc"})[2])
    assert ask(up, "/tokenize", b"[" * 1_500_000)[0] == 400
