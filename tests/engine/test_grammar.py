import json
import math

import pytest

from makeway import Engine, EngineConfig, SamplingParams
from makeway.text.grammar import Grammar, GrammarVocabulary
from tests.conftest import golden_path

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "n": {"type": "integer", "maximum": 99, "minimum": 0}},
    "required": ["name", "n"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def engine():
    with Engine.load(golden_path("qwen3moe-k256-Q4_K_M.gguf"), EngineConfig(device="cpu", parallel=3)) as engine:
        yield engine


@pytest.fixture(scope="module")
def grammar(engine):
    vocabulary = GrammarVocabulary(engine.tokenizer, n_vocab=engine.model.facts.n_vocab)
    return Grammar("json_schema", json.dumps(SCHEMA)).compile(vocabulary)


def run(engine):
    events = {}
    while engine.busy:
        for event in engine.step():
            events.setdefault(event.request_id, []).append(event)
    return events


def test_answers_follow_their_grammar_beside_others(engine, grammar):
    params = {"temperature": 1.0, "ignore_eos": True}
    free = engine.add("The router", SamplingParams(seed=1, max_tokens=20, **params))
    alone = run(engine)[free]
    ids = [engine.add("The router", SamplingParams(seed=s, **params), grammar=grammar) for s in range(6)]
    free = engine.add("The router", SamplingParams(seed=1, max_tokens=20, **params))
    events = run(engine)
    for i in ids:
        value = json.loads("".join(e.text for e in events[i]))
        assert set(value) == {"name", "n"}
        assert 0 <= value["n"] <= 99
        assert events[i][-1].reason == "stop"
    assert [e.token for e in events[free]] == [e.token for e in alone]


def test_a_request_whose_bias_bans_what_its_grammar_allows_breaks_off_alone(engine, grammar):
    free = engine.memory.kv.pool.n_free
    bans = SamplingParams(logit_bias=dict.fromkeys(range(engine.model.facts.n_vocab), -math.inf))
    stuck = engine.add("The router", bans, grammar=grammar)
    other = engine.add("The router", SamplingParams(max_tokens=5, ignore_eos=True))
    events = run(engine)
    assert [(e.kind, "bans every token" in e.text) for e in events[stuck] if e.kind != "progress"] == [("error", True)]
    assert events[other][-1].kind == "finish"
    assert engine.phase == "idle"
    assert engine.memory.kv.pool.n_free == free
