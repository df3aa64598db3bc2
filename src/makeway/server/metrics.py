"""Counters for Prometheus, under vLLM's names where the meaning is the same (prefix `makeway:`).

Owns the registry of one server. Never reads the engine: its status document comes as a copy. Hazard: a label must come
from a fixed set, or a client could grow the memory.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_TIMES_S = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0, 1280.0)
_GAPS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0, 2.5, 5.0, 10.0, 60.0)


class Metrics:
    """What requests did."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self._prompt_tokens = Counter("makeway:prompt_tokens", "Prompt tokens of requests that answered.", registry=r)
        self._answer_tokens = Counter("makeway:generation_tokens", "Tokens generated.", registry=r)
        self._ended = Counter("makeway:request_success", "Requests by how they ended.", ["finished_reason"], registry=r)
        self._first = Histogram(
            "makeway:time_to_first_token_seconds", "Arrival to first token.", buckets=_TIMES_S, registry=r
        )
        self._next = Histogram("makeway:inter_token_latency_seconds", "Token to token.", buckets=_GAPS_S, registry=r)
        self._whole = Histogram("makeway:e2e_request_latency_seconds", "Arrival to end.", buckets=_TIMES_S, registry=r)
        self._http = Counter("makeway:http_responses", "HTTP responses by status class.", ["status"], registry=r)

    def first_token(self, after_s: float, n_prompt: int) -> None:
        self._first.observe(after_s)
        self._prompt_tokens.inc(n_prompt)
        self._answer_tokens.inc()

    def next_token(self, after_s: float) -> None:
        self._next.observe(after_s)
        self._answer_tokens.inc()

    def ended(self, reason: str, after_s: float | None = None) -> None:
        """One answer ended: stop, length, cancelled or error."""
        self._ended.labels(reason).inc()
        if after_s is not None:
            self._whole.observe(after_s)

    def responded(self, status: int) -> None:
        self._http.labels(f"{status // 100}xx").inc()

    def show(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self.registry)


class StatusCollector(Collector):
    """Gauges from the live state: the queue, and every number of the engine's status document."""

    def __init__(self, read: Callable[[], Mapping[str, Any]]) -> None:
        """`read` gives the whole document; the keys n_running and n_waiting are the server's."""
        self._read = read

    def collect(self) -> Iterator[Metric]:
        document = self._read()
        for key, help_text in (("running", "Requests in the engine."), ("waiting", "Requests in the queue.")):
            yield GaugeMetricFamily(f"makeway:num_requests_{key}", help_text, value=document[f"n_{key}"])
        numbers = GaugeMetricFamily("makeway:engine", "Numbers of the engine's status document.", labels=["name"])
        for name, value in _numbers("", document["engine"]):
            numbers.add_metric([name], value)
        yield numbers


def _numbers(prefix: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, bool | int | float):
        yield prefix, float(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(f"{prefix}.{key}" if prefix else str(key), item)
