import json
import re

import pytest

from makeway.server.errors import ApiError
from makeway.server.fields import Fields
from makeway.server.grammars import read_grammar
from makeway.text.grammar import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
AS_GRAMMAR = Grammar("json_schema", json.dumps(SCHEMA))


@pytest.mark.parametrize(
    ("values", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "grammar": None}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_GRAMMAR),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}, AS_GRAMMAR),
        ({"response_format": {"type": "json_schema", "schema": SCHEMA}}, AS_GRAMMAR),
        ({"json_schema": SCHEMA}, AS_GRAMMAR),
        ({"guided_json": json.dumps(SCHEMA)}, AS_GRAMMAR),
        ({"structured_outputs": {"json": SCHEMA}}, AS_GRAMMAR),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"grammar": "root ::= 'a'"}, Grammar("gbnf", "root ::= 'a'")),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
    ],
)
def test_every_way_to_ask_for_a_grammar(values, grammar):
    assert read_grammar(Fields(values)) == grammar


def test_a_choice_is_one_of_the_texts_exactly():
    grammar = read_grammar(Fields({"guided_choice": ["a.b", "(c"]}))
    assert grammar.kind == "regex"
    assert re.fullmatch(grammar.source, "a.b")
    assert re.fullmatch(grammar.source, "(c")
    assert not re.fullmatch(grammar.source, "axb")


@pytest.mark.parametrize(
    "values",
    [
        {"response_format": "json"},
        {"response_format": {}},
        {"response_format": {"type": "grammar"}},
        {"response_format": {"type": "json_schema"}},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": 5}}},
        {"guided_json": "{"},
        {"guided_json": 5},
        {"guided_regex": 5},
        {"guided_choice": []},
        {"guided_choice": [1]},
        {"structured_outputs": "json"},
        {"response_format": {"type": "json_object"}, "grammar": "x"},
        {"structured_outputs": {"json": {}, "regex": "a"}},
    ],
)
def test_what_is_not_understood_is_refused(values):
    with pytest.raises(ApiError) as error:
        read_grammar(Fields(values))
    assert error.value.status == 400
