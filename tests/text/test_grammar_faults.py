import pytest

from makeway import UserError
from makeway.text.grammar_faults import check_bytes, check_rules, check_schema_size, reason_of, schema_path


@pytest.mark.parametrize(
    ("report", "kind", "reason"),
    [
        ("2(3): Expected token\n   1 | start: x\n   2 |  y\n         ^\n", "lark", "line 2, column 3: Expected token"),
        ('at 1(8): unknown name: "foo"\n   1 | start: foo\n              ^', "regex", 'unknown name: "foo"'),
        ("at 1(8): regex parse error:\n    a(b\n     ^\nerror: unclosed group\n", "regex", "column 2: unclosed group"),
        ("regex parse error:\n    \\q{3}\n    ^^\nerror: unknown escape", "json_schema", "column 1: unknown escape"),
        ("Too many items\n<state>\nTokens: secret", "gbnf", "Too many items"),
        ("x" * 1000, "lark", "x" * 397 + "..."),
    ],
)  # fmt: skip
def test_the_reason_is_one_line_with_the_users_place(report, kind, reason):
    assert reason_of(report, kind=kind) == reason


def test_the_deepest_part_that_fails_is_named():
    bad = {"type": "wrong"}

    def fails(schema):
        return "wrong" in str({key: value for key, value in schema.items() if key != "$defs"})

    schema = {"$defs": {"ok": {}}, "properties": {"a/b": {}, "c~": {"anyOf": [{}, {"items": bad}]}}}
    assert schema_path(schema, fails) == "#/properties/c~0/anyOf/1/items"
    assert schema_path(bad, fails) == "#"
    assert schema_path(True, fails) == "#"


def test_levels_of_a_schema_are_counted_through_its_references():
    deep = {"items": {"items": {}}}
    for _ in range(100):
        deep = {"items": deep}
    definitions = {f"d{i}": deep for i in range(20)}
    check_schema_size({"$defs": definitions})  # nothing leads there
    check_schema_size({"$defs": definitions, "anyOf": [{"$ref": "#/$defs/d0"}, {"$ref": "#/$defs/d0"}]})
    check_schema_size({"anyOf": [{"$ref": "#/nowhere"}, {"$ref": "#/anyOf/7"}, {"$ref": 5}], "enum": [{"$ref": "#"}]})
    with pytest.raises(UserError, match="levels; at most 800"):
        check_schema_size({"$defs": definitions, "anyOf": [{"$ref": f"#/$defs/d{i}"} for i in range(20)]})


def test_schemas_inside_a_grammar_count_for_themselves():
    schema = '{"a": ["(((("' + ', "((("' * 2000 + "]}"
    check_rules(f"start: %json {schema} x\nx: /a/", ":", name="grammar")
    with pytest.raises(UserError, match="levels"):
        check_rules("start: %json " + '{"items":' * 900 + "{}" + "}" * 900, ":", name="grammar")
    for source in ("a: b\n" * 1001, "start: " + "(" * 1000, f"start: %json {{{schema}"):
        with pytest.raises(UserError, match="rules and groups; at most 1000"):
            check_rules(source, ":", name="grammar")


def test_a_source_has_a_limit():
    check_bytes("é" * (128 << 10), name="grammar")
    with pytest.raises(UserError, match="the grammar has 262146 bytes; at most 262144"):
        check_bytes("é" * (128 << 10) + "é", name="grammar")
    with pytest.raises(UserError, match="lone surrogate at character 1"):
        check_bytes("a\udfff", name="grammar")
