"""The shipped model is trained, and its perplexity has the same bits however the text is read."""

import functools
import math
from importlib import resources

import pytest
import torch

from makeway import Engine, EngineConfig
from tests.conftest import DATA

N_TOKENS = 160


def path():
    return resources.files("makeway") / "data" / "demo.gguf"


def held_out(engine):
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    return engine.tokenizer.encode(text)[:N_TOKENS]


@functools.cache
def expected():
    with Engine.load(path(), EngineConfig(device="cpu", context=1024)) as engine:
        return perplexity(engine)


def perplexity(engine):
    tokens = held_out(engine)
    logp = torch.log_softmax(engine.logits(tokens).double(), dim=-1)
    chosen = logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return math.exp(-float(chosen.mean()))


def test_it_has_learned_its_language():
    assert expected() < 8192 / 100


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"chunk": 64}, marks=pytest.mark.slow),
        {"chunk": 70, "sweep_tokens": 100},
        {"slots": 0},
        {"slots": 3, "handover": "always"},
        {"vram": 32 << 20, "policy": "random"},
    ],
    ids=str,
)
def test_perplexity_has_the_same_bits_for_every_cache_lending_chunk_and_sweep(settings):
    config = EngineConfig(device="cpu", context=1024, **settings)
    with Engine.load(path(), config) as other:
        assert perplexity(other) == expected()
        assert perplexity(other) == expected(), "and again, with what the first reading left in the slots"
