import pytest
import torch

from makeway import Engine, EngineConfig, SamplingParams, UserError
from tests.conftest import golden_arrays, golden_path

MODEL = "qwen4exp-k96-UD-Q4_K_XL.gguf"


def reference():
    data = golden_arrays("qwen4exp-k96-quant.npz")
    n = int(data["n_prompt"])
    return [int(t) for t in data["tokens"][:n]], data["UD-Q4_K_XL/greedy"].tolist()


@pytest.fixture(scope="module")
def engine():
    with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", parallel=3, chunk=20)) as engine:
        yield engine


def answer(engine, prompt, **params):
    events = list(engine.generate(prompt, SamplingParams(ignore_eos=True, **params)))
    assert [e.kind for e in events].count("finish") == 1
    assert events[-1].kind == "finish"
    tokens = [e.token for e in events if e.kind == "token"]
    return tokens, "".join(e.text for e in events), events[-1]


def test_greedy_equals_llama_cpp(engine):
    prompt, greedy = reference()
    tokens, text, end = answer(engine, prompt, max_tokens=32)
    assert tokens == greedy
    assert text == engine.tokenizer.decode(greedy, skip_special=True)
    assert end.reason == "length"
    assert end.timings.n_prompt == len(prompt)
    assert end.timings.n_answer == 32
    assert end.timings.prompt_s > 0
    assert end.timings.answer_tokens_per_s > 0


def test_progress_grows_to_the_whole_prompt(engine):
    prompt, _ = reference()
    done = [e.n_done for e in engine.generate(prompt, SamplingParams(max_tokens=1)) if e.kind == "progress"]
    assert done == sorted(done)
    assert done[-1] == len(prompt) == 48
    assert len(done) == 2 * (3 + 1)  # 2 layers, 3 chunks of 20, and the experts


def test_progress_tells_what_is_left():
    prompt, _ = reference()
    with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", chunk=20, slots=0)) as engine:
        told = [e for e in engine.generate(prompt, SamplingParams(max_tokens=1)) if e.kind == "progress"]
    left = [e.bytes_left for e in told]
    assert left == sorted(left, reverse=True)
    assert left[-1] == 0 < left[0]
    assert told[-1].eta_s == 0.0


SAMPLED = {"temperature": 0.9, "seed": 3, "top_p": 0.95}


@pytest.mark.parametrize(("chunk", "sweep"), [(1, 4096), (7, 20), (3, 1), (64, 31)])
def test_chunk_size_does_not_change_the_tokens(engine, chunk, sweep):
    prompt, _ = reference()
    with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", chunk=chunk, sweep_tokens=sweep)) as other:
        assert answer(other, prompt, max_tokens=8, **SAMPLED)[:2] == answer(engine, prompt, max_tokens=8, **SAMPLED)[:2]


@pytest.mark.slow
@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_no_chunk_size_changes_a_long_answer(engine, params):
    prompt, _ = reference()
    alone = answer(engine, prompt, max_tokens=20, **params)[0]
    for chunk, sweep in ((1, 4096), (7, 4096), (512, 4096), (7, 20), (3, 1), (64, 31)):
        with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", chunk=chunk, sweep_tokens=sweep)) as other:
            assert answer(other, prompt, max_tokens=20, **params)[0] == alone


@pytest.mark.parametrize("params", [{}, SAMPLED])
def test_company_does_not_change_the_tokens(engine, params):
    prompt, _ = reference()
    alone = answer(engine, prompt, max_tokens=20, **params)[0]
    sampling = SamplingParams(max_tokens=20, ignore_eos=True, **params)
    ids = [engine.add(p, sampling) for p in (prompt, prompt[::-1], prompt[:5], prompt)]
    tokens = {i: [] for i in ids}
    while engine.busy:
        for event in engine.step():
            if event.kind == "token":
                tokens[event.request_id].append(event.token)
    assert tokens[ids[0]] == tokens[ids[3]] == alone
    assert all(len(t) == 20 for t in tokens.values())


def test_seeds(engine):
    prompt, _ = reference()
    one, two, three = (answer(engine, prompt, max_tokens=12, temperature=1.0, seed=s)[0] for s in (1, 1, 2))
    assert one == two != three


def test_logits_equal_for_every_chunk(engine):
    prompt, _ = reference()
    logits = engine.logits(prompt)
    assert logits.shape == (len(prompt), engine.model.facts.n_vocab)
    assert logits.dtype == torch.float32
    with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", chunk=7, sweep_tokens=25)) as other:
        assert torch.equal(other.logits(prompt), logits)


def test_cancel_at_every_unit_of_a_prompt_frees_its_place(engine):
    prompt, greedy = reference()
    free = engine.memory.kv.pool.n_free
    for n_units in range(9):
        gone = engine.add(prompt, SamplingParams(max_tokens=2))
        for _ in range(n_units):
            engine.step()
        engine.cancel(gone)
        events = engine.step()
        assert [(e.kind, e.reason) for e in events if e.request_id == gone] == [("finish", "cancelled")]
        assert engine.memory.kv.pool.n_free == free
    assert answer(engine, prompt, max_tokens=32)[0] == greedy


def test_stop_strings_and_logprobs(engine):
    prompt, _ = reference()
    text = answer(engine, prompt, max_tokens=32)[1]
    clean = [i for i in range(4, len(text) - 2) if "�" not in text[i : i + 2]]
    stop = text[clean[0] : clean[0] + 2]
    events = list(engine.generate(prompt, SamplingParams(max_tokens=32, stop=(stop,), ignore_eos=True, logprobs=2)))
    assert events[-1].reason == "stop"
    assert events[-1].stop_string == stop
    assert "".join(e.text for e in events) == text[: text.index(stop)]
    for event in events:
        if event.kind == "token":
            assert event.logprobs.best[0][0] == event.token
            assert event.logprobs.chosen == pytest.approx(event.logprobs.best[0][1])


def test_eos_ends_the_answer(engine):
    prompt, greedy = reference()
    eos = next(iter(engine.tokenizer.eos_ids))
    bias = {eos: 1000.0}
    events = list(engine.generate(prompt, SamplingParams(logit_bias=bias)))
    assert [e.token for e in events if e.kind == "token"] == [eos]
    assert events[-1].reason == "stop"
    assert events[-1].text == ""


def test_leaving_early_and_cancel_free_everything(engine):
    prompt, _ = reference()
    free = engine.memory.kv.pool.n_free
    for event in engine.generate(prompt, SamplingParams(ignore_eos=True)):
        if event.kind == "token":
            break
    assert engine.memory.kv.pool.n_free == free
    assert not engine.busy
    kept = engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    gone = engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True))
    waiting = [engine.add(prompt, SamplingParams(max_tokens=3, ignore_eos=True)) for _ in range(3)]
    engine.step()
    engine.cancel(gone)
    engine.cancel(waiting[-1])
    engine.cancel(12345)
    finished = {}
    while engine.busy:
        for event in engine.step():
            if event.kind == "finish":
                finished[event.request_id] = event.reason
    assert finished == {kept: "length", gone: "cancelled", waiting[0]: "length", waiting[1]: "length"} | {
        waiting[2]: "cancelled"
    }
    assert engine.memory.kv.pool.n_free == free


def test_the_answer_ends_where_the_context_ends():
    prompt, _ = reference()
    with Engine.load(golden_path(MODEL), EngineConfig(device="cpu", context=50)) as small:
        tokens, _, end = answer(small, prompt)
        assert len(tokens) == 2
        assert end.reason == "length"
        with pytest.raises(UserError, match="shorten the prompt"):
            small.add(prompt + [1, 2])


@pytest.mark.parametrize(
    ("prompt", "message"),
    [("", "empty"), ([], "empty"), ([-1], "out of range"), ([320], "out of range"), ([0] * 5000, "context")],
)
def test_bad_prompts(engine, prompt, message):
    with pytest.raises(UserError, match=message):
        engine.add(prompt)
    assert not engine.busy


def test_bad_configurations(engine):
    with pytest.raises(UserError, match="longest context is 4096"):
        Engine.load(golden_path(MODEL), EngineConfig(context=5000))
    with pytest.raises(UserError, match="logit_bias"):
        engine.add([1], SamplingParams(logit_bias={999: 1.0}))
    for bad in ({"chunk": 0}, {"parallel": 0}, {"context": 0}, {"device": "tpu"}):
        with pytest.raises(UserError, match="--"):
            EngineConfig(**bad)
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--device cuda"):
            Engine.load(golden_path(MODEL), EngineConfig(device="cuda"))


def test_status_tells_what_runs(engine):
    status = engine.status()
    assert status["phase"] == "idle"
    assert status["kernels"] == "reference"
    assert status["expert_bytes"] == 368_640
    assert status["kv_bytes"] == engine.memory.kv.nbytes
    assert status["plan"]["arena_bytes"] == engine.memory.arena.nbytes


def test_a_closed_engine_says_so():
    engine = Engine.load(golden_path(MODEL), EngineConfig(device="cpu"))
    engine.close()
    engine.close()
    with pytest.raises(UserError, match="closed"):
        engine.step()
