"""Typed reading of a JSON body: every wrong type is a 400 that names the field.

Owns the limits on bodies (nesting, numbers) and the wording of type errors. Never knows what a field is for.
Hazard: `null` counts as absent everywhere, as in OpenAI's interface; fields nobody asks for are ignored.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from makeway.server.errors import ApiError, bad_request

MAX_DEPTH = 100


def parse_json(body: bytes) -> dict[str, Any]:
    """The object in a request's body; raises ApiError (400) for anything else, and for nesting over MAX_DEPTH."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise bad_request(f"the body is not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels") from error
    except json.JSONDecodeError as error:
        raise bad_request(
            f"the body is not valid JSON: {error.msg} (line {error.lineno}, column {error.colno})"
        ) from error
    except ValueError as error:  # an integer of too many digits, or NaN
        raise bad_request(f"the body is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise bad_request(f"the body is {kind_of(value)}; send a JSON object")
    check_plain(value)
    return value


def check_plain(value: Any) -> None:
    """Raises ApiError when a document is nested deeper than MAX_DEPTH or holds an infinite number."""
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH + 1):
        if not level:
            return
        below: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                below.extend(item.values())
            elif isinstance(item, list):
                below.extend(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise bad_request("the body holds a number that is too large")
        level = below
    raise bad_request(f"the body is nested deeper than {MAX_DEPTH} levels")


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def kind_of(value: Any) -> str:
    """What a JSON value is, for messages."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    if isinstance(value, str):
        return "a string"
    return "an array" if isinstance(value, list) else "an object"


class Fields:
    """The fields of one JSON object; `path` is how messages call it ("" for the body)."""

    def __init__(self, values: Mapping[str, Any], path: str = "") -> None:
        self._values = values
        self.path = path

    @property
    def all(self) -> Mapping[str, Any]:
        return self._values

    def name(self, field: str) -> str:
        return f"{self.path}.{field}" if self.path else field

    def get(self, field: str) -> Any:
        """The value as it is; None when absent or null."""
        return self._values.get(field)

    def wrong(self, field: str, wanted: str) -> ApiError:
        """The error for a value of the wrong type."""
        name, value = self.name(field), self._values.get(field)
        if value is None:
            return bad_request(f"'{name}' is missing; give {wanted}", name)
        return bad_request(f"'{name}' is {kind_of(value)}; give {wanted}", name)

    def flag(self, field: str, default: bool = False) -> bool:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.wrong(field, "true or false")
        return value

    def integer(self, field: str, *, least: int, most: int) -> int | None:
        """An integer in [least, most], also written as 3.0; None when absent."""
        value = self.get(field)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.wrong(field, "an integer")
        if not least <= value <= most:
            raise self._out_of_range(field, least, most)
        return value

    def number(self, field: str, *, default: float, least: float, most: float) -> float:
        """A number in [least, most]."""
        value = self.get(field)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.wrong(field, "a number")
        if not least <= value <= most:
            raise self._out_of_range(field, least, most)
        return float(value)

    def text(self, field: str, default: str | None = None) -> str | None:
        value = self.get(field)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(field, "a string")
        return value

    def need_text(self, field: str) -> str:
        value = self.text(field)
        if value is None:
            raise self.wrong(field, "a string")
        return value

    def choice(self, field: str, *, among: Sequence[str]) -> str | None:
        value = self.text(field)
        if value is not None and value not in among:
            name = self.name(field)
            raise bad_request(f"'{name}' is '{shorten(value)}'; use one of {', '.join(among)}", name)
        return value

    def object(self, field: str) -> "Fields | None":
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.wrong(field, "an object")
        return Fields(value, self.name(field))

    def plain(self, field: str) -> dict[str, Any] | None:
        """An object as it is, for whoever understands it (a schema, template arguments)."""
        fields = self.object(field)
        return None if fields is None else dict(fields._values)

    def array(self, field: str) -> list[Any] | None:
        value = self.get(field)
        if value is None:
            return None
        if not isinstance(value, list):
            raise self.wrong(field, "an array")
        return value

    def objects(self, field: str) -> "Iterator[Fields]":
        """Each item of an array, which must be an object; nothing when absent."""
        for i, item in enumerate(self.array(field) or ()):
            name = f"{self.name(field)}[{i}]"
            if not isinstance(item, dict):
                raise bad_request(f"'{name}' is {kind_of(item)}; give an object", name)
            yield Fields(item, name)

    def _out_of_range(self, field: str, least: float, most: float) -> ApiError:
        name = self.name(field)
        return bad_request(f"'{name}' is {self._values[field]}; use {least} to {most}", name)


def shorten(text: str, most: int = 80) -> str:
    """A client's text, short enough to be shown in a message."""
    return text if len(text) <= most else text[: most - 3] + "..."
