"""What the server costs: tokens a second through HTTP against the engine alone, and how late the first byte is.

    PYTHONPATH=src python bench/server.py [--model src/makeway/data/demo.gguf] [--tokens 48] [--rounds 9]

Arms take turns, each with an engine of its own; the client is a process of its own and reads raw server-sent events.
The lateness of the first byte is counted from the moment the engine returned the first token. Prints a table, then one
JSON line.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from makeway import Engine, EngineConfig, SamplingParams
from makeway.server.app import Server
from makeway.server.run import listen, make_uvicorn
from makeway.server.settings import ServerConfig

PROMPT = "The router picks one of the experts, and the sea"
# Sends one request a line of its input and answers with the times (CLOCK_MONOTONIC) of its chunks with text.
CLIENT = """
import http.client, json, sys, time
connection = http.client.HTTPConnection("127.0.0.1", int(sys.argv[1]))
for line in sys.stdin:
    connection.request("POST", "/v1/completions", line.encode(), {"content-type": "application/json"})
    response, times = connection.getresponse(), []
    while piece := response.readline():
        if piece.startswith(b"data: {"):
            times.append(time.perf_counter())
    print(json.dumps(times), flush=True)
"""


class Watched(Engine):
    """Notes when each token left the engine."""

    times: list[float]

    def step(self):
        events = super().step()
        now = time.perf_counter()
        self.times += [now for event in events if event.kind == "token"]
        return events


def alone(engine: Watched, params: SamplingParams) -> list[float]:
    """Times of the tokens without a server."""
    engine.times.clear()
    for _ in engine.generate(PROMPT, params):
        pass
    return list(engine.times)


def rate(times: list[float]) -> float:
    """Tokens a second after the first."""
    return (len(times) - 1) / (times[-1] - times[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=Path("src/makeway/data/demo.gguf"))
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    engine, other = (Watched.load(options.model, EngineConfig(device=options.device)) for _ in range(2))
    engine.times, other.times = [], []
    params = SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    device = engine.status()["device_name"]
    server = Server(ServerConfig(names=("bench",)), lambda progress: engine)
    sock = listen("127.0.0.1", 0)
    http = make_uvicorn(server)
    thread = threading.Thread(target=lambda: asyncio.run(http.serve(sockets=[sock])))
    thread.start()
    while server.loop.health.state != "ok":
        time.sleep(0.01)
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(sock.getsockname()[1])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    body = json.dumps(
        {"prompt": PROMPT, "max_tokens": options.tokens, "ignore_eos": True, "temperature": 0, "stream": True}
    )
    engine_rates, server_rates, late_ms = [], [], []
    for i in range(options.rounds + 1):
        plain = alone(other, params)
        engine.times.clear()
        client.stdin.write(body + "\n")
        client.stdin.flush()
        received = json.loads(client.stdout.readline())
        while server.loop.n_running:
            time.sleep(0.01)
        sent = list(engine.times)
        if i == 0:  # warm-up
            continue
        engine_rates.append(rate(plain))
        server_rates.append((len(sent) - 1) / (received[-1] - received[0]))
        late_ms.append(1000 * (received[0] - sent[0]))
    client.stdin.close()
    client.wait()
    http.should_exit = True
    thread.join()
    ratio = statistics.median(s / e for s, e in zip(server_rates, engine_rates, strict=True))
    print(f"{'':24}{'median':>10}{'best':>10}{'worst':>10}")
    for name, values, best in (
        ("engine, tokens/s", engine_rates, max),
        ("server, tokens/s", server_rates, max),
        ("first byte late, ms", late_ms, min),
    ):
        worst = min if best is max else max
        print(f"{name:24}{statistics.median(values):10.2f}{best(values):10.2f}{worst(values):10.2f}")
    print(f"server / engine, median of rounds: {ratio:.3f}")
    print(
        json.dumps(
            {
                "model": options.model.name,
                "device": device,
                "tokens": options.tokens,
                "engine_tokens_per_s": engine_rates,
                "server_tokens_per_s": server_rates,
                "ratio": ratio,
                "first_byte_late_ms": late_ms,
            }
        )
    )


if __name__ == "__main__":
    main()
