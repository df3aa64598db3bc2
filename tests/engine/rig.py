"""Engines with little memory on golden models, an oracle that computes each answer alone, and a way to drive them."""

from contextlib import contextmanager
from functools import cache

import numpy as np
import pytest

from makeway import Engine, EngineConfig, SamplingParams
from makeway.engine import handover, sampler
from makeway.experts.trace import TraceHeader, TraceWriter
from makeway.memory import sizes
from tests.conftest import golden_path
from tests.devices import LazyDevice
from tests.models.runner import Runner

QWEN4EXP = "qwen4exp-k96-UD-Q4_K_XL.gguf"
QWEN35MOE = "qwen35moe-base-bf16.gguf"
QWEN3MOE = "qwen3moe-base-bf16.gguf"
FILES = (QWEN4EXP, QWEN35MOE, QWEN3MOE)
SHORT_TOKENS = 16


@contextmanager
def tight(batch_bytes=1):
    """Prompts of more than 16 tokens may borrow, and every expert returns in a batch of its own: what happens at
    thousands of tokens and gigabytes then happens with tens and kilobytes. Holds for the life of an engine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sizes, "SHORT_TOKENS", SHORT_TOKENS)
        patch.setattr(handover, "BATCH_BYTES", batch_bytes)
        patch.setattr(handover, "AHEAD_S", 0.0)
        yield


def open_engine(file=QWEN4EXP, *, device=None, backend=None, **config):
    """An engine that has the least memory for its slots."""
    config = {
        "device": "cpu",
        "context": 128,
        "parallel": 3,
        "slots": 2,
        "uploads_per_layer": 1,
        "drafter": "none",
        "prefix_ram": 0,
    } | config
    return Engine(golden_path(file), EngineConfig(**config), device=device or LazyDevice(), backend=backend)


@cache
def prompt(file, n, start=0):
    """`n` tokens, different for every `start`."""
    n_vocab = _runner(file).facts.n_vocab
    return tuple(int(t) for t in np.random.default_rng(1000 * n + start).integers(0, n_vocab, size=n))


def greedy(n):
    return SamplingParams(max_tokens=n, ignore_eos=True, logprobs=20)


def sampled(n, seed):
    return SamplingParams(max_tokens=n, ignore_eos=True, logprobs=20, temperature=0.9, top_p=0.95, seed=seed)


@cache
def _runner(file):
    return Runner(golden_path(file))


_answers = {}


def alone(file, tokens, sampling):
    """(token, log-probabilities) of each step of an answer, by a plain pass with every expert where it lies in the
    file. Greedy or seeded."""
    key = file, tuple(tokens), sampling.max_tokens, sampling.temperature, sampling.seed
    if key not in _answers:
        _answers[key] = _compute(_runner(file), list(tokens), sampling)
    return _answers[key]


def _compute(runner, tokens, sampling):
    sequence, answer, new = runner.sequence(), [], tokens
    for _ in range(sampling.max_tokens):
        row = runner.model.head(runner.residual(sequence, new)[-1:])[0].numpy()
        token = sampler.choose(
            row, sampling, seed=sampling.seed or 0, position=len(tokens), seen=tokens, counts={t: 1 for t, _ in answer}
        )
        answer.append((token, sampler.logprobs(row, token, n_best=20)))
        tokens, new = [*tokens, token], [token]
    sequence.close()
    return answer


@cache
def routed_alone(file, tokens):
    """Routed experts [n, layers, top_k] of a plain pass over tokens."""
    runner = _runner(file)
    runner.experts.ids.clear()
    runner.logits(list(tokens))
    return np.stack([runner.routed(layer) for layer in range(runner.facts.n_layers)], axis=1)


@cache
def logits_alone(file, tokens):
    """Logits [n, vocab] of a plain pass over tokens."""
    return _runner(file).logits(list(tokens))


def said(events, request_id):
    """(token, log-probabilities) of a request's answer so far."""
    return [(e.token, e.logprobs) for e in events if e.request_id == request_id and e.kind == "token"]


def run(engine, events=None, until=lambda events: False):
    """Steps until nothing is left to do or `until(all events)`; returns all events."""
    events = [] if events is None else events
    while engine.busy and not until(events):
        events += engine.step()
    return events


def write_profile(file, path, *, drafts=False):
    """A made-up routing trace for policy `static`, with favourites. `drafts`: with the layer of a drafting block."""
    facts = _runner(file).facts
    n_layers = facts.n_layers + (facts.n_draft_layers if drafts else 0)
    with TraceWriter(path, TraceHeader(n_layers, facts.n_experts, facts.top_k, "made up")) as trace:
        ids = np.random.default_rng(5).integers(0, facts.n_experts, size=(64, n_layers, facts.top_k))
        trace.write("decode", np.minimum(ids, ids[::-1]))
    return path


def check_idle(engine):
    """Nothing is left of any request, and every slot is what it says."""
    assert not engine.busy
    memory = engine.memory
    assert memory.kv.pool.n_free == memory.kv.pool.n_blocks
    assert memory.states.places.n_free == memory.states.places.n_places
    memory.swing.cache.audit()
    assert memory.swing.lending is None


class LateFlaky(LazyDevice):
    """Copies are as late as they may be, and call number `fail_at` since `arm` raises, once."""

    def __init__(self, vram_bytes=None, *, fault=RuntimeError):
        super().__init__(vram_bytes)
        self.fault, self.n_calls, self.fail_at = fault, 0, None

    def arm(self, fail_at):
        self.n_calls, self.fail_at = 0, fail_at

    def tick(self, what):
        self.n_calls += 1
        if self.n_calls == self.fail_at:
            raise self.fault(f"call {self.n_calls} ({what}) fails")

    def alloc(self, n_bytes):
        self.tick("alloc")
        return super().alloc(n_bytes)

    def host_alloc(self, n_bytes):
        self.tick("host_alloc")
        return super().host_alloc(n_bytes)

    def copy(self, target, source):
        self.tick("copy")
        super().copy(target, source)

    def record_copies(self):
        self.tick("record copies")
        return _LateFlakyEvent(self, super().record_copies())

    def record_compute(self):
        self.tick("record compute")
        return _LateFlakyEvent(self, super().record_compute())

    def compute_waits(self, event):
        self.tick("compute waits")
        event.event.wait()

    def copies_wait(self, event):
        self.tick("copies wait")
        event.event.wait()

    def synchronize(self):
        self.tick("synchronize")
        super().synchronize()


class _LateFlakyEvent:
    def __init__(self, device, event):
        self.device, self.event = device, event

    def is_done(self):
        self.device.tick("is_done")
        return self.event.is_done()

    def wait(self):
        self.device.tick("wait")
        self.event.wait()
