import json

import pytest

from makeway.server.errors import ApiError
from makeway.server.fields import MAX_DEPTH, Fields, parse_json, shorten


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "not valid JSON"),
        (b"{", "line 1"),
        (b"[1]", "an array"),
        (b"null", "null"),
        (b'"x"', "a string"),
        (b"\xff{}", "not UTF-8"),
        (b'{"a": NaN}', "NaN"),
        (b'{"a": 1e999}', "too large"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a":' * 100_000, "nested deeper"),
        (b"[" * 100_000, "nested deeper"),
        (json.dumps({"a": json.loads("[" * MAX_DEPTH + "]" * MAX_DEPTH)}).encode(), "nested deeper"),
    ],
)
def test_a_bad_body_is_refused(body, message):
    with pytest.raises(ApiError, match=message) as error:
        parse_json(body)
    assert error.value.status == 400


def test_a_body_at_the_limit_of_nesting_is_read():
    inner = json.loads("[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1))
    assert parse_json(json.dumps({"a": inner}).encode()) == {"a": inner}


def test_values_are_read_with_their_types():
    fields = Fields({"a": 3.0, "b": True, "c": "x", "d": None, "e": [{"f": 1}], "g": {"h": 2}})
    assert fields.integer("a", least=0, most=5) == 3
    assert fields.number("a", default=0, least=0, most=5) == 3.0
    assert fields.flag("b") is True
    assert fields.flag("missing", default=True) is True
    assert fields.text("c") == "x"
    assert fields.text("d", "default") == "default"
    assert fields.array("missing") is None
    assert [item.integer("f", least=0, most=9) for item in fields.objects("e")] == [1]
    assert fields.object("g").name("h") == "g.h"
    assert fields.object("d") is None
    assert next(fields.objects("e")).name("f") == "e[0].f"


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda f: f.integer("flag", least=0, most=1), "'at.flag' is a boolean; give an integer"),
        (lambda f: f.integer("half", least=0, most=1), "'at.half' is a number; give an integer"),
        (lambda f: f.integer("text", least=0, most=1), "'at.text' is a string; give an integer"),
        (lambda f: f.integer("big", least=0, most=1), "'at.big' is 10; use 0 to 1"),
        (lambda f: f.number("text", default=0, least=0, most=1), "give a number"),
        (lambda f: f.number("big", default=0, least=0, most=1), "use 0 to 1"),
        (lambda f: f.flag("text"), "give true or false"),
        (lambda f: f.text("big"), "give a string"),
        (lambda f: f.need_text("missing"), "'at.missing' is missing; give a string"),
        (lambda f: f.choice("text", among=("a", "b")), "'at.text' is 'x'; use one of a, b"),
        (lambda f: f.array("text"), "give an array"),
        (lambda f: f.object("text"), "give an object"),
        (lambda f: list(f.objects("list")), r"'at.list\[0\]' is a number; give an object"),
    ],
)
def test_a_wrong_type_names_the_field(read, message):
    fields = Fields({"flag": True, "half": 0.5, "text": "x", "big": 10, "list": [1]}, "at")
    with pytest.raises(ApiError, match=message) as error:
        read(fields)
    assert error.value.status == 400
    assert error.value.param.startswith("at.")


def test_texts_of_clients_are_cut_in_messages():
    assert shorten("x" * 10) == "x" * 10
    assert len(shorten("x" * 1000)) == 80
