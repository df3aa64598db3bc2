import copy
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from makeway import UserError
from makeway.text import ChatTemplate
from makeway.text.messages import normalize_messages
from tests.text.test_tools import TEMPLATES, template_source

BROKEN = ['{"path": "cut', "no JSON", "[1]", '"text"', "NaN", '{"a": NaN}', "[" * 50_000, 5, ["x"]]


def assistant(arguments, **call):
    return {"role": "assistant", "tool_calls": [{**call, "function": {"name": "f", "arguments": arguments}}]}


@pytest.mark.parametrize("arguments", ['{"a": 1}', {"a": 1}, ' {"a":1} '])
def test_arguments_become_objects(arguments):
    message = assistant(arguments, id="x7")
    before = copy.deepcopy(message)
    (out,) = normalize_messages([message], format="xml")
    assert message == before
    assert out["tool_calls"] == [{"id": "x7", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert out["content"] == ""


@pytest.mark.parametrize("arguments", [None, "", {}])
def test_no_arguments_are_an_empty_object(arguments):
    (out,) = normalize_messages([assistant(arguments)], format="hermes")
    assert out["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("arguments", BROKEN, ids=[str(b)[:10] for b in BROKEN])
def test_a_malformed_tool_call_in_the_history_does_not_block_the_chat(name, arguments):
    messages = [
        {"role": "user", "content": "go"},
        assistant(arguments),
        {"role": "tool", "content": [{"type": "text", "text": "error: "}, {"type": "text", "text": "bad JSON"}]},
        {"role": "user", "content": None},
    ]
    normal = normalize_messages(messages, format=TEMPLATES[name])
    template = ChatTemplate(template_source(name), bos_token="", eos_token="", name=name)
    text = template.render(normal)
    assert (arguments if isinstance(arguments, str) else json.dumps(arguments)) in text
    assert "error: bad JSON" in text


def test_missing_ids_are_the_same_each_time():
    messages = [{"role": "user", "content": "x"}, assistant("{}"), assistant("{}", id=""), assistant("{}", id=5)]
    out = normalize_messages(messages, format=None)
    assert [m["tool_calls"][0]["id"] for m in out[1:]] == ["call_1_0", "call_2_0", "call_3_0"]
    assert normalize_messages(messages, format=None) == out


def test_what_clients_vary():
    out = normalize_messages(
        [
            {"role": "developer", "content": ["a", {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "tool_calls": None, "name": "n"},
            {"role": "assistant", "function_call": {"name": "g", "arguments": '{"x": 1}'}},
            {"role": "function", "name": "g", "content": "3"},
            {"role": "user"},
        ],
        format="hermes",
    )
    assert [(m["role"], m["content"]) for m in out] == [
        ("system", "ab"),
        ("assistant", "no"),
        ("assistant", ""),
        ("tool", "3"),
        ("user", ""),
    ]
    assert "tool_calls" not in out[1]
    assert out[2]["tool_calls"][0]["function"] == {"name": "g", "arguments": {"x": 1}}
    assert "function_call" not in out[2]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (5, "must be an object"),
        ({}, "role is None"),
        ({"role": "robot", "content": "x"}, "role is 'robot'"),
        ({"role": "user", "content": 5}, "content must be a text"),
        ({"role": "user", "content": [{"type": "image_url"}]}, r"content\[0\] is of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, r"content\[0\].text"),
        ({"role": "user", "content": [7]}, r"content\[0\] is of type None"),
        ({"role": "assistant", "tool_calls": "x"}, "tool_calls must be a list"),
        ({"role": "assistant", "tool_calls": [{}]}, r"tool_calls\[0\] names no function"),
        ({"role": "assistant", "tool_calls": [{"function": {"name": ""}}]}, r"tool_calls\[0\] names no function"),
        ({"role": "assistant", "tool_calls": [5]}, r"tool_calls\[0\] names no function"),
        ({"role": "user", "tool_calls": [{"function": {"name": "f"}}]}, "only 'assistant'"),
    ],
)
def test_what_cannot_be_shown_is_refused_with_its_index(message, words):
    with pytest.raises(UserError, match=r"messages\[1\].*" + words):
        normalize_messages([{"role": "user", "content": "x"}, message], format="xml")


@pytest.mark.parametrize("messages", [[], "x", {}, None])
def test_no_messages_are_refused(messages):
    with pytest.raises(UserError, match="at least one message"):
        normalize_messages(messages, format=None)


ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4) | st.sampled_from(["user", "text"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "tool_calls", "function", "name", "arguments", "type", "text", "id"]),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(ANYTHING, st.sampled_from(["hermes", "xml", None]))
def test_whatever_comes_is_normal_or_refused(message, format):
    try:
        out = normalize_messages([message], format=format)
    except UserError as error:
        out = str(error)
    if isinstance(out, str):
        assert out.startswith("messages[0]")
    else:
        assert normalize_messages(out, format=format) == out
