import pytest

from makeway.text.tool_schemas import functions, json_value, properties, resolved, types_of

LOOP = {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}


def types(schema, **root):
    return set(types_of({"properties": {"k": schema}, **root}, "k"))


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"integer"}),
        ({"type": ["string", "null", 5]}, {"string", "null"}),
        ({"enum": ["a", 1, 2.5, True]}, {"string", "integer", "number", "boolean"}),
        ({"enum": [None, [], {}]}, {"null", "array", "object"}),
        ({"const": "x"}, {"string"}),
        ({"anyOf": [{"type": "string"}, {"oneOf": [{"type": "null"}, {"allOf": [{"type": "array"}]}]}]},
         {"string", "null", "array"}),
        ({"$ref": "#/$defs/d~1e"}, {"boolean"}),
        ({"$ref": "#/$defs/nowhere"}, set()),
        ({"$ref": "http://elsewhere"}, set()),
        ({}, set()),
        (True, set()),
        ("nonsense", set()),
    ],
)  # fmt: skip
def test_types_of_a_parameter(schema, expected):
    assert types(schema, **{"$defs": {"d/e": {"type": "boolean"}}}) == expected


def test_unknown_parameters_are_text():
    assert types_of({"properties": {}}, "k") == {"string"}
    assert types_of(None, "k") == {"string"}


def test_references_that_go_round_end():
    assert resolved(LOOP, LOOP) == {}
    assert properties(LOOP) == {}
    both = {"anyOf": [{"$ref": "#/properties/k"}, {"$ref": "#/properties/k"}, {"type": "null"}]}
    assert types(both) == {"null"}


def test_tools_with_and_without_their_wrapping():
    schema = {"type": "object", "properties": {"a": {}}}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}, {"name": "g"}]
    assert functions(tools) == {"f": schema, "g": {}}
    assert list(functions(tools)) == ["f", "g"]


@pytest.mark.parametrize(
    ("text", "types", "expected"),
    [
        ("5", {"integer"}, "5"),
        ("5", {"number"}, "5"),
        ("5.0", {"integer"}, '"5.0"'),
        (" 1E400 ", {"number"}, "1E400"),
        ("Infinity", {"number"}, '"Infinity"'),
        ("True", {"boolean"}, "true"),
        ("None", set(), "null"),
        ('{"a":  1}', {"object"}, '{"a":  1}'),
        ('{"a":  1}', {"string", "object"}, '{"a":  1}'),
        ("{'a': 1}", {"object"}, "\"{'a': 1}\""),
        ("[" * 50_000, set(), '"' + "[" * 50_000 + '"'),
        ('é "\n', set(), '"é \\"\\n"'),
    ],
)
def test_the_json_of_a_value_that_a_model_wrote(text, types, expected):
    assert json_value(text, frozenset(types)) == expected
