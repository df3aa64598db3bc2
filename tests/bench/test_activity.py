"""The recorder: what it sees of a prompt, what it leaves as it was, and which kernels it names."""

import itertools

import pytest
import torch

from makeway.bench.activity import COPY, Recorder, watched_backend, watched_device
from makeway.bench.rig import Setup, opened
from makeway.bench.shapes import SHAPES
from makeway.bench.synth import in_memory, synthesize
from makeway.config import EngineConfig
from makeway.device import CpuDevice
from makeway.engine import Engine
from makeway.engine.backend import ReferenceBackend
from makeway.kernels import Ops

CONFIG = EngineConfig(device="cpu", context=512, parallel=1, slots=8, prefix_ram=0, drafter="none")


@pytest.fixture(scope="module")
def rig():
    with opened(Setup(shape="tiny-flash-next", config=CONFIG)) as opened_rig:
        yield opened_rig


def read(engine, tokens):
    request = engine.add(tokens)
    found = []
    while len(found) < 3:
        found += [e.token for e in engine.step() if e.kind == "token"]
    engine.cancel(request)
    while engine.busy:
        engine.step()
    return found


def test_every_copy_and_every_layer_is_seen_once(rig):
    rig.rest()
    tokens, before = rig.tokens(100), rig.engine.device.link_bytes
    with rig.recorder.on(torch.device("cpu")):
        request = rig.ask(tokens)
        while not any(e.kind == "token" for e in rig.step()):
            pass
        rig.rest()
    assert request >= 0
    spans = rig.recorder.spans()
    assert sum(s.n_bytes for s in spans if s.what == COPY) == rig.engine.device.link_bytes - before > 0
    facts = rig.engine.model.facts
    n_chunks = -(-100 // rig.plan.lend_for(100).shape.chunk)
    mixers = [s.what for s in spans if s.what.startswith("mixer")]
    assert mixers.count("mixer: GDN") == len(facts.state_shapes) * n_chunks
    assert mixers.count("mixer: attention") == (facts.n_layers - len(facts.state_shapes)) * n_chunks
    assert sum(s.what == "combine" for s in spans) == n_chunks, "mixers take in the sum of the layer before"
    assert sum(s.what == "experts: sort" for s in spans) == facts.n_layers
    assert all(s.seconds >= 0 for s in spans)
    assert [s.begin_s for s in spans] == sorted(s.begin_s for s in spans)
    # One thread does it all, so spans nest or follow each other, and compute spans never overlap.
    compute = [s for s in spans if s.what != COPY]
    assert all(a.end_s <= b.begin_s for a, b in itertools.pairwise(compute))


def test_nothing_is_written_down_while_it_is_off(rig):
    with rig.recorder.on(torch.device("cpu")):
        pass
    read(rig.engine, rig.tokens(20))
    assert rig.recorder.spans() == []


def test_a_watched_engine_says_the_same_and_names_its_kernels(rig):
    tokens = rig.tokens(40)
    with in_memory(synthesize(SHAPES["tiny-flash-next"])) as file, Engine(file, CONFIG) as engine:
        assert read(engine, tokens) == read(rig.engine, tokens)
    kernels = rig.recorder.kernels
    assert {"reference: linear", "reference: gated_delta", "reference: experts of a step"} <= kernels
    assert "reference: replay_delta" not in kernels  # nothing was drafted


def test_kernels_that_are_not_the_reference_are_told_apart():
    backend, recorder = ReferenceBackend(CpuDevice()), Recorder()
    watched = watched_backend(backend, recorder)
    watched.ops.silu(torch.zeros(3))
    assert recorder.kernels == {"reference: silu"}

    def other(x):
        return x

    backend = ReferenceBackend(CpuDevice())
    notes = {}
    backend.ops = Ops("fast", silu=other, notes=notes)
    recorder = Recorder()
    watched = watched_backend(backend, recorder)
    watched.ops.silu(torch.zeros(3))
    assert recorder.kernels == {"fast: silu"}
    notes["linear Q8_0 of 33"] = "reference"  # an implementation that hands a call on says so
    assert recorder.kernels == {"fast: silu", "reference: linear Q8_0 of 33"}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_spans_are_those_of_the_streams():
    recorder = Recorder()
    device = watched_device(EngineConfig(device="cuda"), recorder)
    host, room = device.host_alloc(64 << 20), device.alloc(64 << 20)
    a = torch.randn(4096, 4096, device="cuda")
    try:
        with recorder.on(device.torch_device):
            device.copy(room[: 32 << 20], host.tensor[: 32 << 20])
            device.copy(room[32 << 20 :], host.tensor[32 << 20 :])
            device.record_copies()
            with recorder.span("product"):
                for _ in range(20):
                    a = torch.softmax(a @ a, dim=1)
        spans = {span.what: span for span in recorder.spans()}
    finally:
        torch.cuda.synchronize()
        host.close()
    assert spans[COPY].n_bytes == 64 << 20
    assert 64e6 / 200e9 < spans[COPY].seconds < 1  # no link is faster
    assert 0 < spans["product"].seconds < 1
    assert spans["product"].begin_s < spans[COPY].end_s  # they run beside each other
