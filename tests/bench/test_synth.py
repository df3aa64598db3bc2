"""Synthetic models: the bytes, on disk and in memory; sane activations; routing as set; llama.cpp agrees."""

import json
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from bench.policy_replay import replay

from bench import synth as script
from makeway import Engine, EngineConfig, SamplingParams, UserError
from makeway.bench.shapes import SHAPES
from makeway.bench.synth import in_memory, synthesize, write_model
from makeway.bench.topics import Knobs, token_stream
from makeway.device import CpuDevice
from makeway.experts.loader import load_experts
from makeway.experts.policies import Gate
from makeway.experts.trace import TraceHeader, TraceRecord
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE
from makeway.kv import Batch
from makeway.models import load_model
from makeway.models.base import run_layer
from tests.models.runner import CPU, Runner
from tests.models.test_llama_cpp import ORACLE, write_f32

TINY = ("tiny-flash-next", "tiny-qwen3")


def model_file(tmp_path, name, knobs=None, **changes):
    shape = replace(SHAPES[name], **changes)
    path = tmp_path / f"{name}.gguf"
    n_bytes = write_model(synthesize(shape, knobs), path, n_threads=2)
    assert path.stat().st_size == n_bytes
    return path, shape


@pytest.mark.parametrize("name", TINY)
def test_the_file_and_the_memory_hold_the_same_bytes(tmp_path, name):
    path, shape = model_file(tmp_path, name)
    with open_gguf(path) as file, in_memory(synthesize(shape)) as memory:
        assert list(file.tensors) == list(memory.tensors) == list(shape.tensors())
        for tensor in file.tensors:
            assert np.array_equal(file.bytes_of(tensor), memory.bytes_of(tensor)), tensor
        for key, value in file.metadata.items():
            assert np.array_equal(value, memory.metadata[key]), key
        store = load_experts(memory, load_model(memory, REFERENCE, device=CPU).store.layers, CpuDevice())
        assert torch.equal(
            store.layers[1].of(3)[2].raw.flatten(),
            load_model(file, REFERENCE, device=CPU).store.layers[1].of(3)[2].raw.flatten(),
        )
        store.close()


def test_an_engine_runs_the_model_from_memory(tmp_path):
    path, shape = model_file(tmp_path, "tiny-qwen3")
    config = EngineConfig(device="cpu", context=64, slots=8)
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    answers = []
    with in_memory(synthesize(shape)) as memory:
        for source in (path, memory):
            with Engine(source, config) as engine:
                events = engine.generate([5, 70, 133, 9], sampling)
                answers.append([event.token for event in events if event.kind == "token"])
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_no_two_experts_of_a_full_layer_are_alike():
    """The bank that large tensors are cut from is far smaller than a layer, but no expert repeats another."""
    model = synthesize(replace(SHAPES["flash-next"], n_layers=1, interval=2, n_vocab=512))
    source = model.tensors["blk.0.ffn_gate_exps.weight"]
    n_bytes = source.n_bytes // 512
    assert source.bank.size < source.n_bytes // 8
    starts = (source.phase + n_bytes * np.arange(512)) % source.bank.size
    assert len(set(starts.tolist())) == 512
    first = np.take(source.bank, starts[:, None] + np.arange(64), mode="wrap")
    assert len({row.tobytes() for row in first}) == 512


@pytest.mark.parametrize("name", TINY)
def test_activations_stay_sane_through_48_layers(tmp_path, name):
    path, shape = model_file(tmp_path, name, n_layers=48, **({"n_draft": 0} if name == TINY[0] else {}))
    runner = Runner(path)
    sequence = runner.sequence()
    tokens = token_stream(6, n_vocab=shape.n_vocab, knobs=Knobs())
    sequence.reserve(len(tokens))
    batch = Batch.of([(sequence, tokens.tolist())], device=CPU)
    h = runner.model.embed(batch)
    norms = []
    for layer in range(48):
        h = run_layer(runner.model, runner.experts, layer, h=h, batch=batch)
        norms.append(h.square().mean(-1).sqrt())
    norms = torch.stack(norms)
    assert norms.min() > 0.5
    assert norms.max() < 4.0
    assert norms[-1].mean() > 1.2 * norms[0].mean()  # the layers do write
    logits = runner.model.head(h)
    assert bool(logits.isfinite().all())
    assert 0.5 < logits.std() < 10


def decode_hit_rate(tmp_path, knobs, *, n_slots, n=200):
    path, shape = model_file(tmp_path, "tiny-flash-next", knobs, n_layers=2, ple_rows=0, n_draft=0)
    runner = Runner(path)
    runner.logits(token_stream(n, n_vocab=shape.n_vocab, knobs=knobs, topic_tokens=60).tolist())
    ids = np.stack([runner.routed(layer) for layer in range(shape.n_layers)], axis=1)
    header = TraceHeader(shape.n_layers, shape.n_experts, shape.top_k, "tiny")
    records = [TraceRecord("decode", 0, step[None].astype(np.int32)) for step in ids]
    return replay(header, records, name="lru", n_slots=n_slots, gate=Gate(1, 1)).hit_rate


def test_locality_and_skew_make_experts_come_back(tmp_path):
    """Of 64 experts 8 fit: without either knob that is one hit in eight."""
    rates = [
        decode_hit_rate(tmp_path, Knobs(locality=locality, skew=skew), n_slots=8)
        for locality, skew in ((0.0, 0.0), (0.5, 0.0), (0.9, 0.0), (0.0, 0.8))
    ]
    assert 0.08 < rates[0] < 0.25
    assert rates[0] + 0.15 < rates[1] < rates[2] - 0.15
    assert rates[3] > rates[0] + 0.15


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (TINY[0], {}),
        pytest.param(TINY[0], {"ple_rows": 0, "n_draft": 0}, marks=pytest.mark.slow),
        pytest.param(TINY[1], {}, marks=pytest.mark.slow),
    ],
    ids=["flash-next", "flash-next without PLE and MTP", "qwen3"],
)
def test_llama_cpp_loads_it_and_agrees(tmp_path, name, changes):
    """On the file as it is (llama.cpp rounds activations to 8 bits), and in float32, where only rounding is left."""
    path, shape = model_file(tmp_path, name, **changes)
    tokens = token_stream(60, n_vocab=shape.n_vocab, knobs=Knobs(), topic_tokens=20).tolist()
    ours = torch.log_softmax(Runner(path).logits(tokens).double(), dim=-1).numpy()
    plain = tmp_path / "f32.gguf"
    write_f32(path, plain)
    for file, limit in ((path, 0.5), (plain, 3e-4)):
        request = json.dumps([str(file), [tokens[:20], tokens], shape.n_vocab])
        done = subprocess.run([sys.executable, "-c", ORACLE], input=request, capture_output=True, text=True, timeout=60)
        lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT")]
        assert lines, done.stderr[-2000:]
        for n, row in zip((20, 60), json.loads(lines[0].removeprefix("RESULT")), strict=True):
            theirs = np.array([row[str(i)] for i in range(shape.n_vocab)])
            assert np.abs(ours[n - 1] - theirs).max() <= limit, file.name


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    model = synthesize(SHAPES["tiny-qwen3"])
    with pytest.raises(UserError, match=r"absent.*cannot be written"):
        write_model(model, tmp_path / "absent" / "x.gguf")


def test_the_script_writes_what_was_asked_for(tmp_path, capsys, monkeypatch):
    path = tmp_path / "model.gguf"
    flags = {
        "--shape": "tiny-flash-next",
        "--layers": 2,
        "--ple-rows": 2048,
        "--skew": 0.4,
        "--locality": 0.25,
        "--seed": 3,
    }
    words = [str(part) for flag in flags.items() for part in flag]
    monkeypatch.setattr("sys.argv", ["synth.py", str(path), "--mtp", *words])
    assert script.main() == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["n_bytes"] == path.stat().st_size
    shape = replace(SHAPES["tiny-flash-next"], n_layers=2, n_draft=1, ple_rows=2048)
    with open_gguf(path) as file, in_memory(synthesize(shape, Knobs(skew=0.4, locality=0.25, seed=3))) as memory:
        assert list(file.tensors) == list(memory.tensors)
        for tensor in ("token_embd.weight", "blk.1.ffn_gate_inp.weight", "per_layer_token_embd.weight"):
            assert np.array_equal(file.bytes_of(tensor), memory.bytes_of(tensor))
    for wrong, message in (
        (["--shape", "tiny-qwen3", "--mtp"], "neither MTP nor PLE"),
        (["--locality", "2"], "locality"),
    ):
        monkeypatch.setattr("sys.argv", ["synth.py", str(path), *wrong])
        assert script.main() == 2
        assert message in capsys.readouterr().err
