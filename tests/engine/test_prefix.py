"""A prompt that begins like an earlier one reads only the rest, and gives the tokens of a cold run."""

import pytest

from makeway import Engine, EngineConfig, SamplingParams
from makeway.engine.request import message_ends
from tests.conftest import golden_path

FILES = ("qwen4exp-k96-UD-Q4_K_XL.gguf", "qwen35moe-base-bf16.gguf", "qwen3moe-base-bf16.gguf")
PROMPT = [(13 * i + i // 9) % 250 for i in range(200)]
CONFIG = {"device": "cpu", "context": 512, "chunk": 50, "sweep_tokens": 100, "audit": True}


def answer(engine, prompt, n=5):
    events = list(engine.generate(prompt, SamplingParams(max_tokens=n, ignore_eos=True)))
    return [e.token for e in events if e.kind == "token"], events[-1].timings.n_cached


def cold(file, prompt, n=5):
    with Engine.load(golden_path(file), EngineConfig(**CONFIG, prefix_ram=0)) as engine:
        tokens, n_cached = answer(engine, prompt, n)
        assert n_cached == 0
        assert answer(engine, prompt, n) == (tokens, 0), "nothing is kept without memory for it"
        return tokens


@pytest.mark.parametrize("file", [*FILES[:2], pytest.param(FILES[2], marks=pytest.mark.slow)])
def test_a_conversation_reads_only_what_is_new(file):
    with Engine.load(golden_path(file), EngineConfig(**CONFIG)) as engine:
        first, n_cached = answer(engine, PROMPT)
        assert n_cached == 0
        assert first == cold(file, PROMPT)
        assert answer(engine, PROMPT) == (first, 192)
        turn = PROMPT + first + [5, 6, 7]
        before = engine.status()["n_prompt_tokens"]
        tokens, n_cached = answer(engine, turn)
        assert tokens == cold(file, turn)
        assert n_cached == 192
        assert engine.status()["n_prompt_tokens"] == before + len(turn) - 192
        other = PROMPT[:100] + [1] * 60
        assert answer(engine, other)[0] == cold(file, other)
        prefixes = engine.status()["prefixes"]
        assert prefixes["hits"] >= 2
        assert 0 < prefixes["bytes"] <= prefixes["budget_bytes"]


def test_a_long_answer_is_kept_too():
    file = FILES[0]
    with Engine.load(golden_path(file), EngineConfig(**CONFIG)) as engine:
        first, _ = answer(engine, PROMPT[:110], n=24)
        turn = PROMPT[:110] + first + [1, 2]
        tokens, n_cached = answer(engine, turn)
        assert n_cached == 128
    assert tokens == cold(file, turn)


def test_a_cancelled_long_prompt_resumes_after_its_last_completed_sweep():
    file = FILES[0]
    with Engine.load(golden_path(file), EngineConfig(**CONFIG)) as engine:
        gone = engine.add(PROMPT)
        done = 0
        while done < 120:
            done = max([done, *(e.n_done for e in engine.step() if e.request_id == gone)])
        engine.cancel(gone)
        tokens, n_cached = answer(engine, PROMPT)
        assert n_cached == 64, "the first sweep of 100 tokens, down to a whole block"
    assert tokens == cold(file, PROMPT)


def test_company_and_lost_memory_find_it_again():
    file = FILES[1]
    with Engine.load(golden_path(file), EngineConfig(**CONFIG | {"context": 128}, parallel=3)) as engine:
        n_answer = 8
        ids = [engine.add(PROMPT[: 60 + i], SamplingParams(max_tokens=n_answer, ignore_eos=True)) for i in range(3)]
        tokens = {i: [] for i in ids}
        while engine.busy:
            for event in engine.step():
                if event.kind == "token":
                    tokens[event.request_id].append(event.token)
        status = engine.status()
        assert status["n_preempted"] > 0, "three times two blocks do not fit in five"
        assert status["prefixes"]["hits"] > 0
    for i, id_ in enumerate(ids):
        assert tokens[id_] == cold(file, PROMPT[: 60 + i], n_answer)


def test_another_conversation_begins_behind_the_first_message():
    file = FILES[0]
    with Engine.load(golden_path(file), EngineConfig(**CONFIG)) as engine:
        end = next(iter(engine.tokenizer.eos_ids))
        system = [t for t in PROMPT[:90] if t != end] + [end]
        first = [*system, *[3] * 70]
        other = [*system, *[4] * 20]
        answer(engine, first)
        tokens, n_cached = answer(engine, other)
        assert n_cached == 64, "the end of the system message, down to a whole block"
    assert tokens == cold(file, other)


def test_ends_of_messages():
    assert message_ends([1, 9, 2, 9, 3, 9, 4, 9, 5], {9}) == (2, 6, 8)
    assert message_ends([1, 9, 2], {9}) == (2,)
    assert message_ends([1, 2], {9}) == ()
