"""Why a grammar cannot be used, in one line; and how big a grammar may be.

Owns the limits that keep llguidance's recursion off the end of the stack, and the words. Never compiles anything.
Hazard: beyond the limits llguidance does not raise, it takes the whole process down.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from makeway.errors import UserError

MAX_SOURCE_BYTES = 256 << 10
# llguidance 1.9 recurses along rules and groups, and along a schema's levels through its references. With 8 MiB of
# stack it dies at about 4,000 of the first and 1,600 of the second.
MAX_RULES_AND_GROUPS = 1000
MAX_SCHEMA_LEVELS = 800
_MAX_CHECKS = 200


def check_bytes(source: str, *, name: str) -> None:
    """Raises UserError for a source that is too long or no Unicode."""
    try:
        n_bytes = len(source.encode("utf-8"))
    except UnicodeEncodeError as error:
        raise UserError(f"the {name} holds a lone surrogate at character {error.start}, which is no Unicode") from error
    if n_bytes > MAX_SOURCE_BYTES:
        raise UserError(f"the {name} has {n_bytes} bytes; at most {MAX_SOURCE_BYTES} are possible")


def check_rules(source: str, define: str, *, name: str) -> None:
    """Raises UserError for a grammar with too many rules (counted by `define`) and groups; its schemas count alone."""
    rules = _without_schemas(source)
    n = rules.count(define) + rules.count("(") + rules.count("[")
    if n > MAX_RULES_AND_GROUPS:
        raise UserError(f"the {name} has {n} rules and groups; at most {MAX_RULES_AND_GROUPS} are possible")


def _without_schemas(source: str) -> str:
    """Lark without its `%json` schemas, each of which is checked."""
    parts, start = [], 0
    for match in re.finditer(r"%json\s*(?=\{)", source):
        if match.start() < start:
            continue
        try:
            schema, end = json.JSONDecoder().raw_decode(source, match.end())
        except (ValueError, RecursionError):  # llguidance says so with its place
            continue
        check_schema_size(schema)
        parts.append(source[start : match.start()])
        start = end
    return "".join(parts) + source[start:]


def check_schema_size(schema: Any) -> None:
    """Raises UserError for a schema whose levels, those of all its references' targets included, are too many."""
    targets = {ref for ref in _references(schema) if ref.startswith("#")}
    n = _depth(schema) + sum(_depth(_resolve(schema, ref)) for ref in targets)
    if n > MAX_SCHEMA_LEVELS:
        raise UserError(
            f"the JSON schema and the definitions it refers to have {n} levels; at most {MAX_SCHEMA_LEVELS} "
            "are possible"
        )


def _references(value: Any) -> Iterator[str]:
    stack = [value]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            if isinstance(ref := value.get("$ref"), str):
                yield ref
            stack.extend(value.values())
        elif isinstance(value, list):
            stack.extend(value)


def _depth(value: Any) -> int:
    """Levels of objects and arrays inside each other."""
    depth, level = 0, [value]
    while level := [v for v in level if isinstance(v, dict | list)]:
        depth += 1
        level = [child for v in level for child in (v.values() if isinstance(v, dict) else v)]
    return depth


def _resolve(schema: Any, pointer: str) -> Any:
    """What a JSON pointer (RFC 6901, as a URI fragment) names; None where there is nothing."""
    for part in pointer.removeprefix("#").split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list) and key.isdigit() and int(key) < len(schema):
            schema = schema[int(key)]
        elif isinstance(schema, dict) and key in schema:
            schema = schema[key]
        else:
            return None
    return schema


def schema_path(schema: Any, fails: Callable[[Any], bool]) -> str:
    """The JSON pointer of the deepest part that `fails` by itself (the definitions at hand), as `#/a/b`."""
    shared = {key: schema[key] for key in ("$defs", "definitions") if isinstance(schema, dict) and key in schema}
    path: list[str] = []
    for _ in range(_MAX_CHECKS):
        for key, child in _children(schema):
            if fails({**shared, **child}):
                path += [part.replace("~", "~0").replace("/", "~1") for part in key]
                schema = child
                break
        else:
            break
    return "#" + "".join(f"/{part}" for part in path)


def _children(schema: Any) -> Iterator[tuple[list[str], dict[str, Any]]]:
    """Sub-schemas and their way from here."""
    for key, value in schema.items() if isinstance(schema, dict) else ():
        if key in ("properties", "patternProperties", "$defs", "definitions") and isinstance(value, dict):
            yield from (([key, name], child) for name, child in value.items() if isinstance(child, dict))
        elif key in ("anyOf", "allOf", "oneOf", "prefixItems") and isinstance(value, list):
            yield from (([key, str(i)], child) for i, child in enumerate(value) if isinstance(child, dict))
        elif key in ("items", "additionalProperties") and isinstance(value, dict):
            yield [key], value


def reason_of(report: str, *, kind: str) -> str:
    """One line out of llguidance's report: the place, where it is in the user's text, and the reason."""
    report = report.split("\n<state>")[0]
    if caret := re.search(r"regex parse error:\n    (?P<text>.*)\n    (?P<gap> *)\^+\nerror: (?P<reason>.*)", report):
        return f"column {len(caret['gap']) + 1}: {caret['reason']}"
    place = ""
    if match := re.match(r"(?:at )?(\d+)\((\d+)\): ", report):
        report = report[match.end() :]
        # For the other kinds it is a place in a text that llguidance made.
        place = f"line {match[1]}, column {match[2]}: " if kind == "lark" else ""
    lines = [line for line in report.splitlines() if not re.match(r"\s*(\d+ \||\^)", line)]
    reason = " ".join(" ".join(lines).split())
    return place + (reason if len(reason) <= 400 else reason[:397] + "...")
