import pytest

from makeway.server.errors import ApiError
from makeway.server.fields import Fields
from makeway.server.messages import read_messages


def read(*messages):
    return read_messages(Fields({"messages": list(messages)}))


def test_all_roles_and_forms_of_content():
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    messages = read(
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "name": "me"},
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "extra": 1},
    )
    assert messages == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "me"},
        {"role": "assistant", "content": "", "tool_calls": [call], "reasoning_content": "hm"},
        {"role": "tool", "content": "42", "tool_call_id": "c1"},
        {"role": "assistant", "content": "no"},
    ]


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("hi", "messages[1]"),
        ({}, "messages[1].role"),
        ({"role": "robot", "content": "x"}, "messages[1].role"),
        ({"role": "user"}, "messages[1].content"),
        ({"role": "user", "content": 5}, "messages[1].content"),
        ({"role": "user", "content": ["x"]}, "messages[1].content[0]"),
        ({"role": "user", "content": [{"type": "text"}]}, "messages[1].content[0].text"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "input_audio"}]}, "messages[1].content[0].type"),
        ({"role": "user", "content": [{"type": "hologram"}]}, "messages[1].content[0].type"),
        ({"role": "assistant", "tool_calls": [{}]}, "messages[1].tool_calls[0].function"),
        ({"role": "assistant", "tool_calls": [{"function": {}}]}, "messages[1].tool_calls[0].function.name"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": 3}}]},
            "messages[1].tool_calls[0].function.arguments",
        ),
        ({"role": "assistant", "tool_calls": "x"}, "messages[1].tool_calls"),
        ({"role": "tool", "content": "x", "tool_call_id": 4}, "messages[1].tool_call_id"),
    ],
)
def test_a_broken_message_is_named(message, param):
    with pytest.raises(ApiError) as error:
        read({"role": "user", "content": "hi"}, message)
    assert error.value.status == 400
    assert error.value.param == param


def test_no_messages():
    for fields in ({}, {"messages": []}, {"messages": None}):
        with pytest.raises(ApiError, match="at least one message"):
            read_messages(Fields(fields))


def test_images_and_audio_are_refused_in_words():
    for kind, word in (("image_url", "images"), ("input_audio", "audio")):
        with pytest.raises(ApiError, match=f"reads no {word}, only text"):
            read({"role": "user", "content": [{"type": kind}]})
