"""Which grammar a request asks for: OpenAI's `response_format`, and the fields of llama-server and vLLM.

Owns these fields. Never compiles a grammar. Hazard: a grammar that is not understood must be refused, never ignored.
"""

import json
import re
from collections.abc import Callable
from typing import Any

from makeway.server.errors import bad_request
from makeway.server.fields import Fields
from makeway.text.grammar import Grammar


def read_grammar(fields: Fields) -> Grammar | None:
    """The grammar of a request, None when it asks for none; raises ApiError (400) for two, or an unknown form."""
    found = [_response_format(fields)]
    found += [read(fields, name) for name, read in _FIELDS.items() if fields.get(name) is not None]
    structured = fields.object("structured_outputs")
    if structured is not None:
        found += [read(structured, name) for name, read in _STRUCTURED.items() if structured.get(name) is not None]
        if structured.flag("json_object"):
            found.append(Grammar("json_object", ""))
    grammars = [g for g in found if g is not None]
    if len(grammars) > 1:
        raise bad_request("the request asks for more than one grammar; give one", "response_format")
    return grammars[0] if grammars else None


def _response_format(fields: Fields) -> Grammar | None:
    wanted = fields.object("response_format")
    if wanted is None:
        return None
    kind = wanted.choice("type", among=("text", "json_object", "json_schema"))
    if kind is None:
        raise wanted.wrong("type", "text, json_object or json_schema")
    if kind == "text":
        return None
    holder = wanted
    if kind == "json_schema":
        inner = wanted.object("json_schema")
        holder = wanted if inner is None else inner
        if holder.get("schema") is None:
            raise holder.wrong("schema", "a JSON schema")
    return Grammar("json_object", "") if holder.get("schema") is None else _schema(holder, "schema")


def _schema(fields: Fields, field: str) -> Grammar:
    """A JSON schema, as an object, as `true`, or as text that holds one."""
    value: Any = fields.get(field)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise bad_request(
                f"'{fields.name(field)}' is text that holds no JSON: {error}", fields.name(field)
            ) from error
    if not isinstance(value, dict | bool):
        raise fields.wrong(field, "a JSON schema")
    return Grammar("json_schema", json.dumps(value))


def _regex(fields: Fields, field: str) -> Grammar:
    return Grammar("regex", fields.need_text(field))


def _gbnf(fields: Fields, field: str) -> Grammar:
    return Grammar("gbnf", fields.need_text(field))


def _choice(fields: Fields, field: str) -> Grammar:
    choices = fields.array(field)
    if not choices or not all(isinstance(c, str) for c in choices):
        raise fields.wrong(field, "an array of texts")
    return Grammar("regex", "|".join(re.escape(c) for c in choices))


_FIELDS: dict[str, Callable[[Fields, str], Grammar]] = {
    "json_schema": _schema,
    "grammar": _gbnf,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_grammar": _gbnf,
    "guided_choice": _choice,
}
_STRUCTURED: dict[str, Callable[[Fields, str], Grammar]] = {
    "json": _schema,
    "regex": _regex,
    "grammar": _gbnf,
    "choice": _choice,
}
