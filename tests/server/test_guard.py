import json
import logging

import pytest

from tests.server.conftest import NAME, running
from tests.server.engines import ScriptedEngine
from tests.server.http import ask, get

BODY = {"model": NAME, "prompt": "hi", "max_tokens": 2}


def server(**config):
    return running(lambda progress: ScriptedEngine(lambda prompt: "yes"), **config)


@pytest.fixture(scope="module")
def locked():
    with server(api_keys=("first-key", "second-key"), cors_origins=("https://good.example",)) as up:
        yield up


@pytest.mark.parametrize("header", ["Authorization: Bearer first-key", "x-api-key: second-key"])
def test_each_key_opens(locked, header):
    assert ask(locked, "/v1/completions", BODY, headers=[header])[0] == 200
    assert get(locked, "/v1/models", headers=[header])[0] == 200


@pytest.mark.parametrize(
    "headers",
    [[], ["Authorization: Bearer wrong"], ["Authorization: first-ke"], ["x-api-key: "], ["x-api-key: \xff\xfe"]],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/messages", "/status", "/metrics", "/nowhere", "/tokenize"])
def test_without_a_key_everything_else_is_closed(locked, headers, path):
    status, fields, content = ask(locked, path, BODY, headers=headers)
    assert status == 401
    assert "www-authenticate" in fields
    assert "error" in json.loads(content)
    assert b"first-key" not in content


def test_health_and_the_page_need_no_key(locked):
    for path in ("/health", "/", "/static/page.js"):
        assert get(locked, path)[0] == 200


def test_web_pages_of_other_origins_may_not_call(up):
    status, _, content = ask(up, "/v1/completions", BODY, headers=["Origin: https://evil.example"])
    assert status == 403
    assert b"--cors-origin" in content
    assert ask(up, "/v1/completions", BODY, headers=["Origin: http://test"])[0] == 200  # its own page
    assert "access-control-allow-origin" not in get(up, "/v1/models")[1]


def test_web_pages_of_an_allowed_origin_may(locked):
    preflight = ["Origin: https://good.example", "Access-Control-Request-Method: POST"]
    status, fields, _ = ask(locked, "/v1/completions", method="OPTIONS", headers=preflight)
    assert status == 200
    assert fields["access-control-allow-origin"] == "https://good.example"
    key = "x-api-key: first-key"
    status, fields, _ = ask(locked, "/v1/completions", BODY, headers=["Origin: https://good.example", key])
    assert status == 200
    assert fields["access-control-allow-origin"] == "https://good.example"


def test_the_log_has_no_text_of_prompts_unless_asked(caplog):
    secret = "attack at dawn"
    for log_prompts in (False, True):
        caplog.clear()
        with caplog.at_level(logging.DEBUG), server(log_prompts=log_prompts) as up:
            status, fields, _ = ask(up, "/v1/completions", BODY | {"prompt": secret})
            assert status == 200
            chat = {"messages": [{"role": "user", "content": secret}], "max_tokens": 0}
            assert ask(up, "/v1/chat/completions", chat)[0] == 400
        assert (secret in caplog.text) == log_prompts
        assert f"{fields['x-request-id']} POST /v1/completions 200" in caplog.text


def test_a_mistake_of_the_server_is_a_500_without_details(up, monkeypatch, caplog):
    def broken(*_):
        raise RuntimeError("details")

    monkeypatch.setattr(up.server.service, "completion_prompts", broken)
    status, _, content = ask(up, "/v1/completions", BODY)
    assert status == 500
    assert b"details" not in content
    assert json.loads(content)["error"]["type"] == "server_error"
    assert "details" in caplog.text
