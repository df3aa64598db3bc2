"""What people complain about in other servers and what must not happen here; numbers as in the issue.

9, 10, 11 and 15 (clients that leave, progress, dead engines) are in test_disconnect.
"""

import json

import pytest
from openai import BadRequestError, OpenAI

from makeway import Engine, EngineConfig
from tests.conftest import golden_path
from tests.server.conftest import NAME, running
from tests.server.engines import ScriptedEngine
from tests.server.http import ask, events_of
from tests.server.test_chat import ADD, HI, TEMPLATE, scripted

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "model",
    ["qwen35moe-base-bf16.gguf", pytest.param("qwen4exp-k96-UD-Q4_K_XL.gguf", marks=pytest.mark.slow)],
)
def test_complaint_12_hybrid_models_do_not_read_the_whole_conversation_again_every_turn(model):
    def load(progress):
        config = EngineConfig(device="cpu", context=2048, drafter="none")
        return Engine.load(golden_path(model), config, progress=progress)

    def turn(up, messages):
        body = {"messages": messages, "max_tokens": 10, "temperature": 0, "ignore_eos": True}
        status, _, content = ask(up, "/v1/chat/completions", body)
        assert status == 200
        document = json.loads(content)
        return document["choices"][0]["message"]["content"], document["usage"]

    messages = [{"role": "user", "content": "Hello there. " * 20}]
    with running(load, chat_template=CHAT) as up:
        first, usage = turn(up, messages)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        n_before = usage["prompt_tokens"]
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "More please."}]
        warm, usage = turn(up, messages)
        assert n_before - 64 <= usage["prompt_tokens_details"]["cached_tokens"] < usage["prompt_tokens"]
    with running(load, chat_template=CHAT) as up:
        cold, usage = turn(up, messages)
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    assert warm == cold


BAD_GRAMMARS = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"$ref": "#/nowhere"}}}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {"response_format": {"type": "yaml"}},
    {"guided_regex": "(("},
    {"grammar": "root ::= nothing"},
    {"structured_outputs": {"grammar": "?"}},
]


@pytest.mark.parametrize("values", BAD_GRAMMARS)
@pytest.mark.parametrize("stream", [False, True])
def test_complaint_13_a_bad_grammar_is_a_400_and_never_an_unconstrained_answer(up, values, stream):
    for path, body in (
        ("/v1/chat/completions", {"messages": HI}),
        ("/v1/completions", {"prompt": "hi"}),
    ):
        status, _, content = ask(up, path, {**body, **values, "stream": stream, "max_tokens": 3})
        assert status == 400
        assert json.loads(content)["error"]["message"]


def test_complaint_13_a_bad_tool_schema_is_a_400_with_the_tool_s_name():
    tool = {"type": "function", "function": {"name": "broken", "parameters": {"type": "nonsense"}}}
    with scripted(lambda prompt: "x") as up:
        status, _, content = ask(
            up, "/v1/chat/completions", {"messages": HI, "tools": [tool], "tool_choice": "required"}
        )
    assert status == 400
    assert b"broken" in content


BAD_ARGUMENTS = ['{"a": 1', "not json", "", "[1]", "null", '{"a": NaN}', '"text"', "\\u12", {"a": 1}, None]


@pytest.mark.parametrize("format", ["hermes", "xml"])
def test_complaint_14_a_malformed_call_in_the_history_does_not_block_the_conversation(format):
    template = TEMPLATE if format == "hermes" else (
        "{% for m in messages %}<|im_start|>{{ m.content }}"
        "{% for c in m.tool_calls or [] %}<tool_call><function={{ c.function.name }}>"
        "{% for k, v in c.function.arguments | items %}<parameter={{ k }}>{{ v }}</parameter>{% endfor %}"
        "</function></tool_call>{% endfor %}{% endfor %}"
    )  # fmt: skip
    with running(lambda progress: ScriptedEngine(lambda prompt: "sorry"), chat_template=template) as up:
        for arguments in BAD_ARGUMENTS:
            messages = [
                *HI,
                {"role": "assistant", "tool_calls": [{"function": {"name": "add", "arguments": arguments}}]},
                {"role": "tool", "content": "error: bad arguments"},
                {"role": "user", "content": "try again"},
            ]
            status, _, content = ask(up, "/v1/chat/completions", {"messages": messages, "tools": [ADD]})
            assert status == 200, content
            prompt = up.server.loop._engine.prompts[-1]
            assert "try again" in prompt
            if isinstance(arguments, str):
                assert arguments in prompt or json.dumps(arguments)[1:-1] in prompt


def test_complaint_14_what_cannot_be_shown_to_a_model_is_refused_with_the_message_s_index():
    with scripted(lambda prompt: "x") as up, OpenAI(base_url=f"{up.base}/v1", api_key="none", max_retries=0) as client:
        for message in ({"role": "assistant", "tool_calls": [{"function": {}}]}, {"role": "user", "content": None}):
            with pytest.raises(BadRequestError) as error:
                client.chat.completions.create(model=NAME, messages=[*HI, message])
            assert error.value.param.startswith("messages[1]")


@pytest.mark.parametrize("stream", [False, True])
def test_complaint_16_usage_and_logprobs_are_there(up, stream):
    options = {"stream": stream, "max_tokens": 4, "ignore_eos": True}
    if stream:
        options["stream_options"] = {"include_usage": True}
    for path, body in (
        ("/v1/chat/completions", {"messages": HI, "logprobs": True, "top_logprobs": 3}),
        ("/v1/completions", {"prompt": "hi", "logprobs": 3}),
    ):
        status, _, content = ask(up, path, {**body, **options})
        assert status == 200
        documents = events_of(content) if stream else [json.loads(content)]
        usage = documents[-1]["usage"]
        assert usage["completion_tokens"] == 4
        assert usage["total_tokens"] == usage["prompt_tokens"] + 4
        assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
        assert set(usage["completion_tokens_details"]) == {
            "reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens",
        }  # fmt: skip
        parts = [c["logprobs"] for d in documents for c in d["choices"] if c["logprobs"]]
        assert sum(len(p.get("content", p.get("tokens"))) for p in parts) == 4
    stream_of = {"stream": stream, "max_tokens": 4, "messages": HI}
    _, _, content = ask(up, "/v1/messages", stream_of)
    documents = events_of(content) if stream else [json.loads(content)]
    usage = next(d["usage"] for d in reversed(documents) if "usage" in d)
    assert usage["output_tokens"] > 0
    assert usage["input_tokens"] > 0


def test_complaint_17_answers_do_not_differ_from_run_to_run_or_with_company(up):
    """The same seed alone, beside others, and after others gives the same text."""
    body = {"prompt": "The router", "max_tokens": 24, "temperature": 1.1, "seed": 7, "ignore_eos": True}

    def text(**more):
        status, _, content = ask(up, "/v1/completions", {**body, **more})
        assert status == 200
        return [choice["text"] for choice in json.loads(content)["choices"]]

    (alone,) = text()
    assert text() == [alone]
    company = text(prompt=["The router", "other " * 20, "The router"], n=1)
    assert company[0] == company[2] == alone
    assert text(n=3)[0] == alone
    assert text() == [alone]
