"""What the schemas of tools say: which functions there are, and which JSON types a parameter has.

Owns the reading of OpenAI's `tools`. Never validates a value against a schema. Hazard: schemas come from clients; a
reference may point to itself.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from makeway.errors import UserError

_MAX_REFERENCES = 32
_PYTHON = {"True": "true", "False": "false", "None": "null"}  # how templates show these values to the model
Schema = Mapping[str, Any]


def functions(tools: Sequence[Mapping[str, Any]]) -> dict[str, Schema]:
    """The schema of each function's parameters, by name; `{}` where there is none.

    Reads `{"type": "function", "function": {...}}` and the inner object alone. Raises UserError with the tool's index.
    """
    found: dict[str, Schema] = {}
    if isinstance(tools, str | Mapping) or not isinstance(tools, Sequence):
        raise UserError("tools must be a list of tools")
    for i, tool in enumerate(tools):
        function = tool.get("function", tool) if isinstance(tool, Mapping) else None
        if not isinstance(function, Mapping):
            raise UserError(f"tools[{i}] is not a function; give an object with 'type' and 'function'")
        name = function.get("name")
        if not isinstance(name, str) or not name or set(name) & set('<>"\n'):
            raise UserError(f"tools[{i}] has the name {name!r}; give a text without quotes and angle brackets")
        schema = function.get("parameters")
        if schema is not None and not isinstance(schema, Mapping):
            raise UserError(f"tools[{i}].function.parameters must be a JSON schema of type object")
        if name in found:
            raise UserError(f"tools[{i}] has the name {name!r}, which another tool has already")
        found[name] = schema or {}
    return found


def properties(schema: Schema) -> Mapping[str, Any]:
    """The schemas of a function's parameters by name."""
    found = resolved(schema, schema).get("properties")
    return found if isinstance(found, Mapping) else {}


def resolved(schema: Any, root: Schema) -> Schema:
    """The schema that a chain of local references leads to; `{}` for what is no object or leads nowhere."""
    for _ in range(_MAX_REFERENCES):
        if not isinstance(schema, Mapping):
            return {}
        ref = schema.get("$ref")
        if not isinstance(ref, str):
            return schema
        schema = root
        for part in ref.removeprefix("#").split("/")[1:]:
            schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
    return {}


def types_of(schema: Schema | None, key: str) -> frozenset[str]:
    """The JSON types that a parameter may have; empty where the schema leaves them open."""
    if schema is None or key not in (known := properties(schema)):
        return frozenset(("string",))
    return frozenset(_types(known[key], schema))


def only_text(schema: Schema | None, key: str) -> bool:
    """Whether a parameter is text and nothing else; so is one that the schema does not know."""
    return types_of(schema, key) == {"string"}


def _types(schema: Any, root: Schema) -> Iterator[str]:
    waiting, seen = [schema], set()
    while waiting:
        schema = resolved(waiting.pop(), root)
        if id(schema) in seen:
            continue
        seen.add(id(schema))
        declared = schema.get("type")
        if isinstance(declared, str):
            yield declared
        elif isinstance(declared, list):
            yield from (name for name in declared if isinstance(name, str))
        elif isinstance(values := schema.get("enum", [schema["const"]] if "const" in schema else None), list):
            yield from map(_type_name, values)
        else:
            parts = (schema.get(key) for key in ("anyOf", "oneOf", "allOf"))
            waiting += [part for some in parts if isinstance(some, list) for part in some]


def _type_name(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", type(None): "null"}
    return names.get(type(value), "object")


def json_value(text: str, types: frozenset[str]) -> str:
    """The JSON text of a parameter that a model wrote as plain text: itself where it is JSON of one of the types
    (empty: of any), else a string."""

    def refuse(constant: str) -> NoReturn:
        raise ValueError(constant)

    literal = _PYTHON.get(text.strip(), text.strip())
    try:
        name = _type_name(json.loads(literal, parse_constant=refuse))
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    if not types or name in types or (name == "integer" and "number" in types):
        return literal
    return json.dumps(text, ensure_ascii=False)
