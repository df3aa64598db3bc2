import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from makeway import UserError
from makeway.text import ChatTemplate
from makeway.text.messages import normalize_messages
from makeway.text.tools import CallArguments, CallBroken, CallEnd, CallStart, Content, ToolParser, tool_format
from tests.conftest import SHARED

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "write",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string"},
                    "line": {"type": "integer"},
                    "options": {"type": "object"},
                    "force": {"type": "boolean"},
                    "note": {"type": ["string", "null"]},
                    "size": {"anyOf": [{"type": "number"}, {"$ref": "#/$defs/none"}]},
                    "any": {},
                },
                "$defs": {"none": {"type": "null"}},
            },
        },
    },
    {"type": "function", "function": {"name": "look"}},
]
TEMPLATES = {"Qwen-Qwen3-0.6B": "hermes", "Qwen3-Coder": "xml", "Qwen3.5-4B": "xml"}


def template_source(name):
    path = SHARED / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("the shared templates are absent")
    return path.read_text(encoding="utf-8")


def read(format, parts):
    """The pieces of an answer given in parts, neighbours joined, calls numbered instead of random ids."""
    ids = iter(range(1000))
    parser = ToolParser(format, TOOLS, new_id=lambda: f"id{next(ids)}")
    out = []
    for piece in [piece for part in parts for piece in parser.push(part)] + parser.flush():
        assert not isinstance(piece, Content | CallArguments) or piece.text
        last = out[-1] if out else None
        if isinstance(piece, Content | CallArguments) and type(piece) is type(last):
            out.pop()
            piece = (
                Content(last.text + piece.text)
                if isinstance(piece, Content)
                else CallArguments(piece.index, last.text + piece.text)
            )
        out.append(piece)
    return out


def calls_of(pieces):
    """(name, arguments) of the complete calls; checks the order of the pieces on the way."""
    calls, open_call, text = [], None, ""
    for piece in pieces:
        match piece:
            case CallStart():
                assert open_call is None
                open_call, text = piece, ""
            case CallArguments():
                assert piece.index == open_call.index
                text += piece.text
            case CallEnd():
                assert piece.index == open_call.index
                calls.append((open_call.name, json.loads(text)))
                open_call = None
            case CallBroken():
                with pytest.raises((ValueError, RecursionError)):
                    json.loads(text)
                open_call = None
    assert open_call is None
    return calls


def content_of(pieces):
    return "".join(piece.text for piece in pieces if isinstance(piece, Content))


HERMES = '<tool_call>\n{"name": "write", "arguments": {"path": "a/b", "line": 3}}\n</tool_call>'
XML = (
    "<tool_call>\n<function=write>\n<parameter=path>\na/b\n</parameter>\n<parameter=line>\n3\n</parameter>\n"
    "</function>\n</tool_call>"
)
WRITE = ("write", {"path": "a/b", "line": 3})


@pytest.mark.parametrize(("format", "call"), [("hermes", HERMES), ("xml", XML)])
def test_calls_and_content_are_told_apart(format, call):
    assert read(format, [call]) == [
        CallStart(0, "id0", "write"),
        CallArguments(0, '{"path": "a/b", "line": 3}'),
        CallEnd(0),
    ]
    pieces = read(format, [f"I look.\n\n{call}\n{call}\n"])
    assert calls_of(pieces) == [WRITE, WRITE]
    assert content_of(pieces) == "I look."
    assert [p.index for p in pieces if isinstance(p, CallStart)] == [0, 1]
    pieces = read(format, [f"{call}\n\nDone. \n"])
    assert calls_of(pieces) == [WRITE]
    assert content_of(pieces) == "\n\nDone. \n"


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ('<tool_call>{"arguments": {"a": [1, {}]}, "name": "f"}</tool_call>', [("f", {"a": [1, {}]})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>{"name": "f", "parameters": {"a": 1}, "id": "7"}</tool_call>', [("f", {"a": 1})]),
        ('<tool_call>{"name": "f"}</tool_call>', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_call>', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {}}</tool_ca', [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', [("f", {"a": 2})]),
        (
            '<tool_call>{"name":"f","arguments":{"a":"</tool_call>}\\\\"}}</tool_call>',
            [("f", {"a": "</tool_call>}\\"})],
        ),
        ('<tool_call>{"name": "f", "arguments": {"a": "1\n2\t\x01"}}</tool_call>', [("f", {"a": "1\n2\t\x01"})]),
        ('<tool_call> {"name": "\\u0066é", "arguments": {"é": "\\ud83d\\ude00"}}</tool_call>', [("fé", {"é": "😀"})]),
    ],
)
def test_the_json_form_as_models_vary_it(text, calls):
    pieces = read("hermes", [text])
    assert calls_of(pieces) == calls
    assert content_of(pieces) == ""


@pytest.mark.parametrize(
    ("parameters", "expected"),
    [
        ({"path": "\nx\n</parameter>\ny\n"}, {"path": "\nx\n</parameter>\ny\n"}),
        ({"path": ""}, {"path": ""}),
        ({"path": '"\\\t</function>'}, {"path": '"\\\t</function>'}),
        ({"path": "5"}, {"path": "5"}),
        ({"line": "5", "force": "True", "options": '{"a": [1]}'}, {"line": 5, "force": True, "options": {"a": [1]}}),
        ({"line": "five", "force": "maybe", "options": "[1]"}, {"line": "five", "force": "maybe", "options": "[1]"}),
        ({"line": "5.5", "size": "1e3"}, {"line": "5.5", "size": 1000.0}),
        ({"note": "null", "size": "None"}, {"note": None, "size": None}),
        ({"note": "5", "any": "5", "other": "5"}, {"note": "5", "any": 5, "other": "5"}),
        ({"any": "NaN"}, {"any": "NaN"}),
        ({}, {}),
    ],
)
def test_xml_parameters_have_the_types_of_the_schema(parameters, expected):
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in parameters.items())
    pieces = read("xml", [f"<tool_call>\n<function=write>\n{text}</function>\n</tool_call>"])
    assert calls_of(pieces) == [("write", expected)]


def test_the_outer_tag_of_an_xml_call_may_be_missing():
    bare = XML.removeprefix("<tool_call>\n")
    assert calls_of(read("xml", ["Now:\n" + bare])) == [WRITE]
    twice = bare.removesuffix("\n</tool_call>") * 2
    pieces = read("xml", [twice + " ok"])
    assert calls_of(pieces) == [WRITE, WRITE]
    assert content_of(pieces) == " ok"


MALFORMED = [
    ("hermes", "<tool_call>"),
    ("hermes", "<tool_call>\nno JSON</tool_call>"),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": "cut off'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": tru}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": 1}} then </tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'),
    ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
    ("hermes", '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 20_000 + "]" * 20_000 + "}}</tool_call>"),
    ("hermes", "<function=write>\n</function>"),
    ("hermes", "</tool_call>"),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\ncut off"),
    ("xml", "<tool_call>\n<function=write>\n<parameter=path>\na\n</parameter>\n<parameter=li"),
    ("xml", "<tool_call>\n<function=write>\nwhat</function>\n</tool_call>"),
    ("xml", "<tool_call>\n<function=>\n</function>\n</tool_call>"),
    ("xml", "<tool_call>\n<function=wri\nte>\n</function>\n</tool_call>"),
    ("xml", "<tool_call>\n</tool_call>"),
    ("xml", "<tool_call>\n<function=f>\n</function>\nand </tool_call>"),
    ("xml", "<function"),
    ("xml", HERMES),
]


@pytest.mark.parametrize(("format", "text"), MALFORMED, ids=[f"{f}-{t[11:60]!r}" for f, t in MALFORMED])
def test_a_malformed_call_is_content_as_it_was_written(format, text):
    pieces = read(format, ["Hm. \n" + text])
    assert calls_of(pieces) == []
    assert content_of(pieces) == "Hm. \n" + text


@pytest.mark.parametrize(("format", "call"), [("hermes", HERMES), ("xml", XML)])
def test_a_call_after_a_malformed_one_is_found(format, call):
    broken = {"hermes": '<tool_call>{"name": "f", "arguments": {"a": 1}', "xml": "<tool_call>\n<function=f>\nx"}[format]
    pieces = read(format, [broken + "\n" + call])
    assert calls_of(pieces) == [WRITE]
    assert content_of(pieces) == broken


SNIPPETS = [
    *("<tool_call>", "</tool_call>", "\n", " ", "<", "{", "}", '"', "\\", "text", "é", ","),
    *('{"name": "write", "arguments": ', '{"path": "a"}', '"x": 1', "[1]"),
    *("<function=write>", "<parameter=path>", "<parameter=line>", "</parameter>", "</function>", "5", HERMES, XML),
]


@given(st.sampled_from(["hermes", "xml"]), st.lists(st.sampled_from(SNIPPETS), max_size=14), st.data())
@example("hermes", ["<tool_call>", '{"name": "write", "arguments": ', '{"path": "a"}', "</tool_call>"], None)
def test_how_the_text_is_cut_changes_nothing(format, snippets, data):
    text = "".join(snippets)
    whole = read(format, [text])
    assert read(format, text) == whole  # character by character
    if data is not None:
        cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
        parts = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        assert read(format, parts) == whole
    calls_of(whole)
    if not any(isinstance(piece, CallEnd) for piece in whole):
        assert content_of(whole) == text


@pytest.mark.parametrize("format", ["hermes", "xml"])
def test_only_what_may_begin_a_call_is_held_back(format):
    parser = ToolParser(format, TOOLS)
    assert parser.push("a < b") == [Content("a < b")]
    assert parser.push("c <") == [Content("c")]
    assert parser.push("tool") == []
    assert parser.push("s \n") == [Content(" <tools")]
    assert parser.push("d") == [Content(" \nd")]
    assert parser.flush() == []


def test_arguments_come_as_they_are_written():
    parser = ToolParser("hermes", TOOLS)
    assert isinstance(parser.push('<tool_call>{"name": "write", "arguments": {')[0], CallStart)
    assert parser.push('"path": "abc') == [CallArguments(0, '"path": "abc')]
    parser = ToolParser("xml", TOOLS)
    start = parser.push("<tool_call>\n<function=write>\n<parameter=path>\nab")
    assert start[1:] == [CallArguments(0, '{"path": "ab')]
    assert parser.push('"c\n</par') == [CallArguments(0, '\\"c')]
    assert parser.push("k") == [CallArguments(0, "\\n</park")]


def test_ids_are_new_each_time():
    ids = {piece.id for _ in range(50) for piece in ToolParser("xml").push(XML) if isinstance(piece, CallStart)}
    assert len(ids) == 50
    assert all(i.startswith("call_") for i in ids)


@pytest.mark.parametrize("name", TEMPLATES)
def test_what_a_template_writes_is_read_back(name):
    """The templates are the models' own: a call they render from a conversation is the form that models write."""
    source = template_source(name)
    assert tool_format(source) == TEMPLATES[name]
    template = ChatTemplate(source, bos_token="", eos_token="", name=name)
    calls = [
        ("write", {"path": "é\n<&>\"'\n", "line": 3, "options": {"a": [1, "x"]}, "force": True, "note": "n"}),
        ("look", {}),
        ("write", {"path": "x\n</parameter>\ny", "force": False, "note": None}),
    ]
    history = [
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I write.",
            "tool_calls": [{"type": "function", "function": {"name": n, "arguments": json.dumps(a)}} for n, a in calls],
        },
    ]
    messages = normalize_messages(history, format=TEMPLATES[name])
    text = template.render(messages, tools=TOOLS, add_generation_prompt=False)
    answer = text[text.rindex("I write.") : text.rindex("<|im_end|>")]
    pieces = read(TEMPLATES[name], [answer])
    assert calls_of(pieces) == calls
    assert content_of(pieces) == "I write."


def test_templates_without_calls_have_no_format():
    assert tool_format("{{ messages[0].content }}") is None


@pytest.mark.parametrize(
    "tools", ["x", [5], [{}], [{"function": {"name": ""}}], [{"name": "f", "parameters": []}], [{"name": "a>b"}], None]
)
def test_tools_that_are_none_are_refused(tools):
    with pytest.raises(UserError, match="tools"):
        ToolParser("xml", tools)
    with pytest.raises(UserError, match=r"tools\[1\] has the name 'f'"):
        ToolParser("xml", [{"name": "f"}, {"name": "f"}])
