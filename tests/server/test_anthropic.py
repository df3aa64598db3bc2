"""/v1/messages through the `anthropic` client."""

import json

import pytest
from anthropic import Anthropic, APIStatusError, BadRequestError, NotFoundError

from tests.server.conftest import NAME
from tests.server.test_chat import ADD, scripted

HI = [{"role": "user", "content": "hi"}]
TOOL = {"name": "add", "description": "Adds.", "input_schema": ADD["function"]["parameters"]}


def connect(up):
    return Anthropic(base_url=up.base, api_key="none", max_retries=0)


def answer(prompt):
    """The script of all tests: thinks when told to, calls the tool once, tells its result."""
    thought = "let me think</think>" if prompt.endswith("<think>\n") else ""
    if "<|im_start|>tool\n5" in prompt:
        return thought + "It is 5."
    if "<tools>" in prompt:
        return thought + 'I add.<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    return thought + "Hello there. END more"


@pytest.fixture(scope="module")
def up():
    with scripted(answer) as up:
        yield up


@pytest.fixture(scope="module")
def client(up):
    with connect(up) as client:
        yield client


def test_whole_and_streamed_answers_agree(client):
    params = {"model": NAME, "max_tokens": 50, "messages": HI, "system": "be brief"}
    whole = client.messages.create(**params)
    assert whole.content[0].text == "Hello there. END more"
    assert whole.stop_reason == "end_turn"
    assert (
        whole.usage.input_tokens
        == client.messages.count_tokens(model=NAME, messages=HI, system="be brief").input_tokens
    )
    with client.messages.stream(**params) as stream:
        texts = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert texts == whole.content[0].text
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_the_ends_of_an_answer(client):
    stopped = client.messages.create(model=NAME, max_tokens=50, messages=HI, stop_sequences=["END"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "END")
    assert stopped.content[0].text == "Hello there. "
    short = client.messages.create(model=NAME, max_tokens=3, messages=HI)
    assert short.stop_reason == "max_tokens"
    assert short.usage.output_tokens == 3


def test_thinking_is_a_block_of_its_own(client, up):
    params = {"model": NAME, "max_tokens": 2000, "messages": HI}
    thinking = {"type": "enabled", "budget_tokens": 1024}
    whole = client.messages.create(**params, thinking=thinking)
    assert [b.type for b in whole.content] == ["thinking", "text"]
    assert whole.content[0].thinking == "let me think"
    with client.messages.stream(**params, thinking=thinking) as stream:
        assert [b.type for b in stream.get_final_message().content] == ["thinking", "text"]
    assert [b.type for b in client.messages.create(**params).content] == ["text"]


@pytest.mark.parametrize("streamed", [False, True])
def test_a_loop_of_tool_calls(client, streamed):
    messages = [{"role": "user", "content": [{"type": "text", "text": "2+3?"}]}]
    for _ in range(4):
        params = {"model": NAME, "max_tokens": 200, "messages": messages, "tools": [TOOL]}
        if streamed:
            with client.messages.stream(**params) as stream:
                got = stream.get_final_message()
        else:
            got = client.messages.create(**params)
        if got.stop_reason != "tool_use":
            break
        text, call = got.content
        assert text.text == "I add."
        assert (call.name, call.input) == ("add", {"a": 2, "b": 3})
        messages.append(
            {
                "role": "assistant",
                "content": [b.model_dump(include={"type", "text", "id", "name", "input"}) for b in got.content],
            }
        )
        result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "5"}]}
        messages.append({"role": "user", "content": [result, {"type": "text", "text": "well?"}]})
    assert got.content[0].text == "It is 5."
    assert len(messages) == 3


def test_the_client_can_begin_the_answer(client, up):
    client.messages.create(model=NAME, max_tokens=5, messages=[*HI, {"role": "assistant", "content": "So"}])
    assert up.server.loop._engine.prompts[-1].endswith("<|im_start|>assistant\nSo")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_tokens": None}, "'max_tokens' is missing"),
        ({"messages": []}, "'messages' is empty"),
        ({"messages": [{"role": "robot", "content": "x"}]}, r"'messages\[0\].role' is 'robot'"),
        ({"messages": [{"role": "user", "content": 5}]}, r"messages\[0\].content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
            r"messages\[0\].content\[0\].type.*no images",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "tool_result"}]}]}, "tool_use_id"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}, *HI]}, "name"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "runs no tools of its own"),
        ({"tools": [{"name": "x"}]}, "input_schema"),
        ({"tool_choice": {"type": "any"}}, "no 'tools'"),
        ({"tool_choice": {"type": "tool", "name": "x"}}, "not among"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"temperature": -1}, "temperature"),
        ({"thinking": {"type": "maybe"}}, "thinking.type"),
        ({"system": [{"type": "image"}]}, "no images"),
    ],
)
def test_what_cannot_be_is_refused_in_anthropic_s_form(client, values, message):
    with pytest.raises(BadRequestError, match=message) as error:
        client.post("/v1/messages", body={"model": NAME, "max_tokens": 5, "messages": HI, **values}, cast_to=object)
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["type"] == "invalid_request_error"


def test_other_errors_have_the_form_too(client):
    with pytest.raises(NotFoundError) as error:
        client.messages.create(model="claude", max_tokens=5, messages=HI)
    assert error.value.body["error"]["type"] == "not_found_error"
    with pytest.raises(APIStatusError) as error:
        client.post("/v1/messages/batches", body={}, cast_to=object)
    assert json.loads(error.value.response.text)["type"] == "error"
