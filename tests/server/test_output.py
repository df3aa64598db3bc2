import json

from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.server.output import ChatOutput
from makeway.text.reasoning import ReasoningSplitter
from makeway.text.tools import ToolParser

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def read(text, cuts=(), *, opened=False, tools=True):
    """What the pieces add up to, however the text is cut: reasoning, content, calls; and the output."""
    output = ChatOutput(ReasoningSplitter(opened=opened), ToolParser("hermes", TOOLS) if tools else None, opened=opened)
    pieces, at = [], 0
    for cut in (*sorted(cuts), len(text)):
        pieces += output.push(text[at:cut])
        at = max(at, cut)
    pieces += output.finish()
    joined = {kind: "".join(p.text for p in pieces if p.kind == kind) for kind in ("reasoning", "content")}
    calls = {p.index: [p.name, ""] for p in pieces if p.kind == "call"}
    for p in pieces:
        if p.kind == "arguments":
            calls[p.index][1] += p.text
    broken = {p.index for p in pieces if p.kind == "broken"}
    return joined["reasoning"], joined["content"], [c for i, c in calls.items() if i not in broken], output


def test_reasoning_content_and_calls():
    reasoning, content, calls, output = read(f"why</think>\n\nSo: {CALL}", opened=True)
    assert (reasoning, content) == ("why", "So:")
    ((name, arguments),) = calls
    assert (name, json.loads(arguments)) == ("add", {"a": 1})
    assert output.n_calls == 1
    assert not output.is_reasoning


def test_a_broken_call_is_content_and_does_not_count():
    text = CALL[:-20]
    _, content, calls, output = read(text)
    assert content == text
    assert calls == []
    assert output.n_calls == 0


def test_without_tools_a_call_is_text():
    assert read(CALL, tools=False)[1] == CALL


def test_reasoning_that_never_ends():
    reasoning, content, _, output = read("on and on", opened=True)
    assert (reasoning, content) == ("on and on", "")
    assert output.is_reasoning


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 120), max_size=12))
def test_how_the_text_is_cut_changes_nothing(cuts):
    text = f"<think>a < b</think>\n\nlook {CALL} and {CALL[:30]} <"
    cuts = [min(c, len(text)) for c in cuts]
    assert read(text, cuts)[:3] == read(text)[:3]
