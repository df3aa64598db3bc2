"""/v1/completions through the `openai` client, against the engine itself."""

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from makeway import SamplingParams
from tests.server.conftest import NAME, small_engine

PROMPT = "The router picks"


@pytest.fixture(scope="module")
def client(up):
    with OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def engine():
    with small_engine() as engine:
        yield engine


def alone(engine, prompt=PROMPT, **params):
    """What the engine says without a server."""
    events = list(engine.generate(prompt, SamplingParams(**params)))
    return "".join(e.text for e in events), events[-1]


def test_the_text_is_the_engine_s(client, engine):
    text, end = alone(engine, max_tokens=20)
    got = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0)
    assert got.choices[0].text == text
    assert got.choices[0].finish_reason == end.reason
    assert got.usage.prompt_tokens == end.timings.n_prompt
    assert got.usage.completion_tokens == end.timings.n_answer
    assert got.usage.total_tokens == end.timings.n_prompt + end.timings.n_answer
    assert got.usage.prompt_tokens_details.cached_tokens == 0
    assert got.usage.completion_tokens_details.accepted_prediction_tokens == 0


def test_a_stream_adds_up_to_the_whole(client, engine):
    params = {"max_tokens": 20, "temperature": 0.8, "seed": 11, "top_p": 0.9, "presence_penalty": 0.5}
    text, _ = alone(engine, **params)
    chunks = list(
        client.completions.create(
            model=NAME, prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **params
        )
    )
    assert "".join(c.choices[0].text for c in chunks if c.choices) == text
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length")
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens > 0
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1
    silent = list(client.completions.create(model=NAME, prompt=PROMPT, stream=True, **params))
    assert all(c.usage is None for c in silent)


def test_several_prompts_and_answers_are_numbered(client, engine):
    ids = engine.encode(PROMPT)
    got = client.completions.create(model=NAME, prompt=[PROMPT, "a b"], n=2, max_tokens=6, seed=5)
    assert [c.index for c in got.choices] == [0, 1, 2, 3]
    expected = [alone(engine, p, max_tokens=6, seed=s, temperature=1.0)[0] for p in (PROMPT, "a b") for s in (5, 6)]
    assert [c.text for c in got.choices] == expected
    assert got.usage.prompt_tokens == len(ids) + len(engine.encode("a b"))
    tokens = client.completions.create(model=NAME, prompt=ids, max_tokens=6, temperature=0)
    lists = client.completions.create(model=NAME, prompt=[ids, ids], max_tokens=6, temperature=0)
    assert [c.text for c in lists.choices] == [tokens.choices[0].text] * 2
    assert tokens.choices[0].text == alone(engine, max_tokens=6)[0]


def test_stop_echo_and_the_default_length(client, engine):
    text, _ = alone(engine, max_tokens=16)
    stop = text[3:5]
    got = client.completions.create(model=NAME, prompt=PROMPT, temperature=0, stop=stop, echo=True)
    assert got.choices[0].text == PROMPT + text[: text.index(stop)]
    assert got.choices[0].finish_reason == "stop"
    whole = client.completions.create(model=NAME, prompt=PROMPT, temperature=0)
    assert whole.usage.completion_tokens == 16


def test_logprobs(client, engine):
    got = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3)
    logprobs = got.choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 5
    assert all(len(best) <= 3 for best in logprobs.top_logprobs)
    events = [e for e in engine.generate(PROMPT, SamplingParams(max_tokens=5, logprobs=3)) if e.token is not None]
    assert logprobs.tokens == [engine.tokenizer.decode([e.token]) for e in events]
    assert logprobs.token_logprobs == pytest.approx([e.logprobs.chosen for e in events])
    stream = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=5, temperature=0, logprobs=3, stream=True)
    offsets = [o for c in stream for o in c.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_a_token_that_ends_an_answer_has_no_logprobs_unless_it_is_ignored(client, engine):
    end = min(engine.tokenizer.eos_ids)
    params = {"model": NAME, "prompt": PROMPT, "max_tokens": 3, "logprobs": 0, "logit_bias": {end: 100}}
    got = client.completions.create(**params)
    assert got.choices[0].finish_reason == "stop"
    assert got.choices[0].logprobs.tokens == []
    assert got.usage.completion_tokens == 1
    got = client.completions.create(**params, extra_body={"ignore_eos": True})
    assert got.choices[0].logprobs.tokens == [engine.tokenizer.decode([end])] * 3


def test_logit_bias_forces_a_token(client, engine):
    token = engine.encode("q")[0]
    got = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=3, temperature=0, logit_bias={token: 100})
    assert got.choices[0].text == "qqq"


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"prompt": ""}, None),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[], "a"]}, None),
        ({"prompt": [1.5]}, "prompt[0]"),
        ({"prompt": [999_999]}, None),
        ({"n": 0}, "n"),
        ({"n": 1000}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"logprobs": 21}, "logprobs"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True, "logprobs": 1}, "echo"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_what_cannot_be_is_refused(client, values, param):
    with pytest.raises(BadRequestError) as error:
        client.post("/completions", body={"model": NAME, "prompt": PROMPT, **values}, cast_to=object)
    assert error.value.body["type"] == "invalid_request_error"
    assert error.value.param == param


def test_an_unknown_model_is_named(client):
    with pytest.raises(NotFoundError, match="'gpt-9' does not exist; this server has 'tiny'") as error:
        client.completions.create(model="gpt-9", prompt=PROMPT)
    assert error.value.code == "model_not_found"
    assert client.models.list().data[0].id == NAME
    assert client.models.retrieve(NAME).max_model_len == 2048
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt-9")


def test_a_prompt_longer_than_the_context(client):
    for prompt in ("x" * 2100, "x" * 60_000, [65] * 2048):
        with pytest.raises(BadRequestError, match="maximum context length is 2048 tokens") as error:
            client.completions.create(model=NAME, prompt=prompt)
        assert error.value.code == "context_length_exceeded"


def test_embeddings_are_refused_by_name(client):
    with pytest.raises(BadRequestError, match="no embeddings"):
        client.embeddings.create(model=NAME, input="x")


def test_progress_of_the_prompt_is_shown_when_asked_for(client):
    stream = client.completions.create(
        model=NAME, prompt="x" * 300, max_tokens=2, stream=True, extra_body={"return_progress": True}
    )
    progress = [c.prompt_progress for c in stream if not c.choices]
    assert progress[-1]["processed"] == progress[-1]["total"] == 300
    assert [p["processed"] for p in progress] == sorted(p["processed"] for p in progress)
    plain = client.completions.create(model=NAME, prompt="x" * 300, max_tokens=2, stream=True)
    assert all(c.choices for c in plain)
