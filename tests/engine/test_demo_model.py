"""The shipped model is trained, and its perplexity has the same bits however the text is read."""

import math
from importlib import resources

import pytest
import torch

from makeway import Engine, EngineConfig
from tests.conftest import DATA

N_TOKENS = 400


def path():
    return resources.files("makeway") / "data" / "demo.gguf"


def held_out(engine):
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    return engine.tokenizer.encode(text)[:N_TOKENS]


def perplexity(engine):
    tokens = held_out(engine)
    logp = torch.log_softmax(engine.logits(tokens).double(), dim=-1)
    chosen = logp[:-1].gather(1, torch.tensor(tokens[1:])[:, None])
    return math.exp(-float(chosen.mean()))


@pytest.fixture(scope="module")
def engine():
    with Engine.load(path(), EngineConfig(device="cpu", context=1024)) as engine:
        yield engine


def test_it_has_learned_its_language(engine):
    assert perplexity(engine) < engine.model.facts.n_vocab / 100


@pytest.mark.parametrize(("chunk", "sweep_tokens"), [(64, 4096), (100, 150)])
def test_perplexity_has_the_same_bits_for_every_chunk_and_sweep(engine, chunk, sweep_tokens):
    config = EngineConfig(device="cpu", context=1024, chunk=chunk, sweep_tokens=sweep_tokens)
    with Engine.load(path(), config) as other:
        assert perplexity(other) == perplexity(engine)
