import inspect
import json
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from dataclasses import fields

import pytest

from makeway import EngineConfig
from makeway.cli import main
from makeway.cli.serve import serve_command
from makeway.server.settings import ServerConfig
from tests.conftest import golden_path

MODEL = "qwen3moe-k256-Q4_K_M.gguf"


class Process:
    """`makeway serve` on a free port; `base` is its address."""

    def __init__(self, *flags):
        command = "from makeway.cli import main; main()"
        arguments = ["serve", golden_path(MODEL), "--port", 0, "--device", "cpu", "--context", 4000, *flags]
        self.process = subprocess.Popen(
            [sys.executable, "-c", command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.base = ""
        while not self.base:
            line = self.process.stderr.readline()
            assert line, "the server ended before it was ready"
            found = re.search(r"ready on (http://\S+)", line)
            self.base = found[1] if found else ""

    def stream(self, max_tokens):
        """Begins an answer; returns the open response after its first event."""
        body = {"prompt": "The router", "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        request = urllib.request.Request(f"{self.base}/v1/completions", json.dumps(body).encode(), method="POST")
        response = urllib.request.urlopen(request, timeout=60)
        assert response.readline().startswith(b"data: ")
        return response

    def end(self):
        out, err = self.process.communicate(timeout=60)
        assert out == ""
        assert "Traceback" not in err
        return self.process.returncode, err


def test_serve_says_where_it_is_and_ends_in_order():
    server = Process("--name", "a", "--name", "b", "--shutdown-s", "40")
    models = json.loads(urllib.request.urlopen(f"{server.base}/v1/models", timeout=60).read())
    assert [m["id"] for m in models["data"]] == ["a", "b"]
    with server.stream(30) as response:
        server.process.send_signal(signal.SIGTERM)
        rest = response.read()
    assert b'"finish_reason":"length"' in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    code, err = server.end()
    assert code == 0
    assert "40 s to finish" in err


@pytest.mark.slow
def test_a_second_signal_ends_it_at_once():
    server = Process("--shutdown-s", "600")
    with server.stream(3900):
        server.process.send_signal(signal.SIGINT)
        assert "a second signal stops" in server.process.stderr.readline()
        server.process.send_signal(signal.SIGINT)
    assert server.end()[0] == 128 + signal.SIGINT


@pytest.mark.slow
def test_answers_that_take_too_long_are_ended():
    server = Process("--shutdown-s", "0.5")
    with server.stream(3900) as response:
        server.process.send_signal(signal.SIGTERM)
        assert b"shutting down" in response.read()
    assert server.end()[0] == 0


def test_every_setting_has_a_flag():
    flags = set(inspect.signature(serve_command).parameters)
    assert {f.name for f in fields(EngineConfig)} <= flags
    renamed = {"names": "name", "api_keys": "api_key", "cors_origins": "cors_origin"}
    assert {renamed.get(f.name, f.name) for f in fields(ServerConfig)} <= flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["nothing.gguf", "--port", "0"], "no such file"),
        (["MODEL", "--port", "BUSY"], "cannot listen on 127.0.0.1 port"),
        (["MODEL", "--port", "99999"], "use 0 (any free one) to 65535"),
        (["MODEL", "--host", "no.such.host.invalid"], "cannot listen on"),
        (["MODEL", "--port", "0", "--context", "99999999"], "longest context"),
        (["MODEL", "--port", "0", "--parallel", "0"], "--parallel 0"),
        (["MODEL", "--port", "0", "--api-key", ""], "--api-key"),
        (["MODEL", "--port", "0", "--api-key-file", "nowhere"], "cannot be read"),
        (["MODEL", "--port", "0", "--max-waiting", "0"], "--max-waiting 0"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, flags, message):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        words = {"MODEL": str(golden_path(MODEL)), "BUSY": str(busy.getsockname()[1])}
        with pytest.raises(SystemExit) as end:
            main(["serve", *(words.get(f, f) for f in flags)])
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.splitlines()[-1].startswith("makeway: ")
