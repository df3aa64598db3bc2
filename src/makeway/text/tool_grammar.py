"""The grammar of an answer that must be tool calls.

Owns how a call is written so that `ToolParser` reads it back. Never checks whether a tool makes sense.
Hazard: the XML form cannot say everything a schema can; patterns and lengths of text are not enforced there.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from makeway.errors import UserError
from makeway.text.grammar import Grammar, Reasoning, with_json_options
from makeway.text.tool_schemas import Schema, functions, only_text, properties, resolved, types_of
from makeway.text.tools import ToolFormat

# Free text ends at the first closing tag on a line of its own.
_FREE_TEXT = 'free_text[lazy]: /(?s:.*)\\n<\\/parameter>\\n/\nANY_KEY: /[^<>"\\s]{1,64}/\n'


def tool_grammar(
    tools: Sequence[Mapping[str, Any]],
    choice: str | Mapping[str, Any],
    format: ToolFormat,
    *,
    parallel: bool = True,
    reasoning: Reasoning = "none",
) -> Grammar:
    """The grammar for OpenAI's `tool_choice`: "required", or `{"type": "function", "function": {"name": ...}}`.

    parallel: several calls are possible. The arguments follow the tools' schemas, their keys in the schema's order.
    Raises UserError for a choice that names no tool, and with the tool's index for a schema that cannot be enforced.
    """
    schemas = functions(tools)
    if not schemas:
        raise UserError("tool_choice demands a tool call, but there are no tools")
    if choice != "required":
        name = _named(choice)
        if name not in schemas:
            raise UserError(f"tool_choice names {name!r}, which is none of the tools: {', '.join(schemas)}")
        schemas = {name: schemas[name]}
    rules = [f"start: call{' (NEXT call)*' if parallel else ''}", 'NEXT: "\\n"']
    rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
    write = _hermes if format == "hermes" else _xml
    for i, (name, schema) in enumerate(schemas.items()):
        schema = {"type": "object", **schema}
        if resolved(schema, schema).get("type", "object") != "object":
            raise UserError(f"the parameters of tool {name!r} must be a JSON schema of type object")
        try:
            Grammar("json_schema", json.dumps(schema)).check()
        except UserError as error:
            raise UserError(f"the parameters of tool {name!r}: {error}") from error
        rules += write(i, name, schema=schema)
    source = "\n".join(rules) + "\n" + (_FREE_TEXT if format == "xml" else "")
    return Grammar("lark", source, reasoning=reasoning, is_generated=True)


def _named(choice: str | Mapping[str, Any]) -> str:
    function = choice.get("function", choice) if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str):
        raise UserError("tool_choice must be 'none', 'auto', 'required' or an object that names a function")
    return name


def _text(text: str) -> str:
    """A literal of Lark."""
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Schema) -> str:
    return "%json " + json.dumps(with_json_options(dict(schema)), ensure_ascii=False)


def _hermes(i: int, name: str, *, schema: Schema) -> list[str]:
    head = f'<tool_call>\n{{"name": {_text(name)}, "arguments": '
    return [f"call_{i}: {_text(head)} arguments_{i} {_text('}' + _LAST)}", f"arguments_{i}: {_json(schema)}"]


_LAST = "\n</tool_call>"


def _xml(i: int, name: str, *, schema: Schema) -> list[str]:
    root = resolved(schema, schema)
    known = properties(schema)
    required = root.get("required")
    must = [key for key in required if isinstance(key, str)] if isinstance(required, list) else []
    keys = [*known, *(key for key in must if key not in known)]
    parts, rules = [], []
    for n, key in enumerate(keys):
        if set(key) & set("<>\n"):
            raise UserError(f"the parameter {key!r} of tool {name!r} cannot be written in the model's tool format")
        parts.append(f"value_{i}_{n}" + ("" if key in must else "?"))
        head = _text(f"<parameter={key}>\n")
        rules.append(f"value_{i}_{n}: {head} {_value(schema, key)}")
    if not keys and root.get("additionalProperties") is not False:
        parts.append(f"value_{i}_any*")
        rules.append(f'value_{i}_any: "<parameter=" ANY_KEY ">\\n" free_text')
    head, last = _text(f"<tool_call>\n<function={name}>\n"), _text("</function>" + _LAST)
    return [f"call_{i}: {head} {' '.join(parts)} {last}", *rules]


def _value(schema: Schema, key: str) -> str:
    """What follows the opening tag of a parameter: the value and the closing tag."""
    last = _text("\n</parameter>\n")
    part = resolved(properties(schema).get(key, {}), schema)
    texts = part.get("enum", [part["const"]] if "const" in part else None)
    if isinstance(texts, list) and texts and all(isinstance(text, str) for text in texts):
        return f"({' | '.join(map(_text, texts))}) {last}"
    if only_text(schema, key) or "string" in (types := types_of(schema, key)) or not types:
        return "free_text"
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    return f"{_json({**shared, **part})} {last}"
