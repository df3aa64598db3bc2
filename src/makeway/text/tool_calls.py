"""One tool call, read while its text appears: the JSON form of Hermes and the XML form of Qwen3-Coder and Qwen3.5.

Owns what makes a call well-formed and when its arguments may be passed on. Never closes the arguments before the call
is complete, so those of a broken call are no JSON. Hazard: after `is_broken` nothing more may be pushed.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from makeway.text.tool_schemas import json_value, only_text, types_of

CLOSE = "</tool_call>"


@dataclass(frozen=True)
class Started:
    """The name of the function is known: `text`."""

    text: str


@dataclass(frozen=True)
class Arguments:
    """More of the arguments' JSON text."""

    text: str


class Malformed(Exception):
    """The text cannot become a call any more."""


class Form(Protocol):
    """How a call is written, up to its last tag.

    `found`: what became certain, for the reader to take. `needs_tag`: whether the last tag must follow.
    """

    found: list[Started | Arguments]
    needs_tag: bool

    def read(self, text: str) -> tuple[str, bool]:
        """Reads on. Returns the text not read, which comes again with more, and whether the form is whole: then it is
        the text behind it. Raises Malformed."""
        ...

    def complete(self) -> None:
        """The call is complete: puts the rest into `found`. Raises Malformed."""
        ...


class Call:
    """A call after its opening marker."""

    def __init__(self, form: Form) -> None:
        self.is_broken = False
        self._form = form
        self._unread = ""
        self._is_whole = False

    def push(self, text: str) -> str | None:
        """Reads on. Returns the text after the call once it is complete, else None; look at `is_broken` first."""
        text = self._unread + text
        try:
            if not self._is_whole:
                text, self._is_whole = self._form.read(text)
            rest = self._close(text) if self._is_whole else None
        except Malformed:
            self.is_broken = True
            return None
        self._unread = text
        return rest

    def _close(self, text: str) -> str | None:
        """The text after the last tag; None while it may still come."""
        tail = text.lstrip()
        if CLOSE.startswith(tail):
            if tail != CLOSE:
                return None
        elif not tail.startswith(CLOSE):
            if self._form.needs_tag:
                raise Malformed
            self._form.complete()
            return text
        self._form.complete()
        return tail[len(CLOSE) :]

    def take(self) -> list[Started | Arguments]:
        """What became certain since the last time."""
        found, self._form.found = self._form.found, []
        return found

    def flush(self) -> bool:
        """At the end of the answer: whether the call is complete but for its last tag; then `take` has the rest."""
        try:
            if self._is_whole:
                self._form.complete()
        except Malformed:
            return False
        return self._is_whole


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*\{', re.DOTALL)
_IN_TEXT = re.compile(r'[^"\\\x00-\x1f]+')
_BETWEEN = re.compile(r'[^"{}\[\]<]+')


class HermesForm:
    """`{"name": NAME, "arguments": {...}}`, whose arguments are passed on as they are written.

    Raw control characters inside strings, which JSON forbids and models write, are escaped. In any other order of the
    keys, or with the arguments as a string that holds JSON, they are passed on at the end.
    """

    def __init__(self) -> None:
        self.found: list[Started | Arguments] = []
        self.needs_tag = True
        self._whole: list[str] = []
        self._depth = 0
        self._in_text = False
        self._after_backslash = False
        self._name: str | None = None  # set when the arguments are passed on as they come
        self._streams = False  # inside such arguments
        self._looked = False
        self._is_whole = False

    def read(self, text: str) -> tuple[str, bool]:
        i = 0
        while i < len(text) and not self._is_whole:
            step = self._string if self._in_text else self._structure
            i += step(text, i)
        return text[i:], self._is_whole

    def _keep(self, text: str) -> None:
        self._whole.append(text)
        if self._streams:
            self.found.append(Arguments(text))

    def _string(self, text: str, i: int) -> int:
        """Reads inside a string; returns the number of characters."""
        if self._after_backslash:
            self._after_backslash = False
            self._keep(text[i])
            return 1
        if run := _IN_TEXT.match(text, i):
            self._keep(run[0])
            return len(run[0])
        character = text[i]
        if character == '"':
            self._in_text = False
        elif character == "\\":
            self._after_backslash = True
        self._keep(character if character in '"\\' else json.dumps(character)[1:-1])
        return 1

    def _structure(self, text: str, i: int) -> int:
        """Reads between strings; returns the number of characters."""
        if run := _BETWEEN.match(text, i):
            if self._depth == 0 and not run[0].isspace():
                raise Malformed
            self._keep(run[0])
            return len(run[0])
        character = text[i]
        if character == "<" or (self._depth == 0 and character != "{"):  # a tag comes too early
            raise Malformed
        if character == '"':
            self._in_text = True
        elif character in "{[":
            self._depth += 1
        else:
            self._depth -= 1
        if self._streams and self._depth == 1:  # the last brace waits for the end of the call
            self._streams = False
        self._keep(character)
        if character == "{" and self._depth == 2 and not self._looked:
            self._look_at_head()
        self._is_whole = self._depth == 0
        return 1

    def _look_at_head(self) -> None:
        self._looked = True
        head = _HEAD.fullmatch("".join(self._whole))
        name = _loads(head[1]) if head else None
        if isinstance(name, str) and name:
            self._name, self._streams = name, True
            self.found += [Started(name), Arguments("{")]

    def complete(self) -> None:
        call = _loads("".join(self._whole))
        keys = [key for key in ("arguments", "parameters") if isinstance(call, dict) and key in call]
        if not isinstance(call, dict) or not isinstance(name := call.get("name"), str) or not name or len(keys) > 1:
            raise Malformed
        arguments = call[keys[0]] if keys else None
        if self._name is not None:
            if name != self._name or not isinstance(arguments, dict):
                raise Malformed
            self.found.append(Arguments("}"))
            return
        if isinstance(arguments, str):
            arguments = _loads(arguments)
        if not isinstance(arguments := {} if arguments is None else arguments, dict):
            raise Malformed
        self.found += [Started(name), Arguments(json.dumps(arguments, ensure_ascii=False))]


def _loads(text: str) -> Any:
    """The value of JSON text; raises Malformed, also when the outermost object has a key twice."""
    outermost: list[tuple[str, Any]] = []

    def keep(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        outermost[:] = pairs  # the outermost object is complete last
        return dict(pairs)

    def refuse(constant: str) -> NoReturn:
        raise Malformed

    try:
        value = json.loads(text, object_pairs_hook=keep, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise Malformed from error
    if isinstance(value, dict) and len(value) != len(outermost):
        raise Malformed
    return value


_FUNCTION, _PARAMETER, _FUNCTION_END = "<function=", "<parameter=", "</function>"
_PARAMETER_END = re.compile(r"\n?</parameter>\s*")
_NAME = re.compile(r"[^<>\n]*")


class XmlForm:
    """`<function=NAME>`, a `<parameter=KEY>VALUE</parameter>` each, `</function>`.

    A line break after the first tag and before the second is no part of the value. A `</parameter>` ends the value
    only when another parameter or the function's end follows, so that values may hold the tag. Values that the schema
    says are text are passed on as they come, others when they are whole.
    """

    def __init__(self, schemas: Mapping[str, Any], *, is_bare: bool) -> None:
        """`is_bare`: the marker was `<function=` itself, so that the last tag may be missing too."""
        self.found: list[Started | Arguments] = []
        self.needs_tag = not is_bare
        self._schemas = schemas
        self._text = _FUNCTION if is_bare else ""
        self._name: str | None = None
        self._key: str | None = None
        self._n_keys = 0
        self._value_begins = False
        self._value: list[str] = []  # of a typed parameter, until it is whole
        self._is_whole = False

    def read(self, text: str) -> tuple[str, bool]:
        self._text += text
        while not self._is_whole and self._step():
            pass
        return (self._text, True) if self._is_whole else ("", False)

    def _step(self) -> bool:
        """One tag or stretch of a value; False when more text is needed."""
        if self._key is not None:
            return self._read_value(self._key)
        text = self._text.lstrip()
        expected = (_FUNCTION,) if self._name is None else (_PARAMETER, _FUNCTION_END)
        tag = next((tag for tag in expected if text.startswith(tag)), None)
        if tag is None:
            if not any(tag.startswith(text) for tag in expected):
                raise Malformed
            return False
        if tag == _FUNCTION_END:
            self._text = text[len(tag) :]
            self._is_whole = True
            return True
        name = _NAME.match(text, len(tag))
        assert name is not None
        if name.end() == len(text):
            return False
        if text[name.end()] != ">" or not name[0].strip():
            raise Malformed
        self._text = text[name.end() + 1 :]
        self._open(name[0].strip())
        return True

    def _open(self, name: str) -> None:
        if self._name is None:
            self._name = name
            self.found += [Started(name), Arguments("{")]
            return
        self.found.append(Arguments((", " if self._n_keys else "") + json.dumps(name, ensure_ascii=False) + ": "))
        self._n_keys += 1
        self._key, self._value_begins = name, True
        if self._is_text(name):
            self.found.append(Arguments('"'))

    def _is_text(self, key: str) -> bool:
        return only_text(self._schemas.get(self._name or ""), key)

    def _read_value(self, key: str) -> bool:
        if self._value_begins:
            if not self._text:
                return False
            self._text = self._text.removeprefix("\n")
            self._value_begins = False
        n_certain, after = _value_end(self._text)
        value, self._text = self._text[:n_certain], self._text[n_certain if after is None else after :]
        if not self._is_text(key):
            self._value.append(value)
        elif value:
            self.found.append(Arguments(json.dumps(value, ensure_ascii=False)[1:-1]))
        if after is None:
            return False
        if self._is_text(key):
            self.found.append(Arguments('"'))
        else:
            types = types_of(self._schemas.get(self._name or ""), key)
            self.found.append(Arguments(json_value("".join(self._value), types)))
            self._value = []
        self._key = None
        return True

    def complete(self) -> None:
        self.found.append(Arguments("}"))


def _value_end(text: str) -> tuple[int, int | None]:
    """How much of the text is the value's for certain; where the text goes on after its end, if that is there."""
    start = 0
    while end := _PARAMETER_END.search(text, start):
        rest = text[end.end() : end.end() + len(_FUNCTION_END)]
        if rest.startswith((_PARAMETER, _FUNCTION_END)):
            return end.start(), end.end()
        if _PARAMETER.startswith(rest) or _FUNCTION_END.startswith(rest):
            return end.start(), None
        start = end.start() + 1
    tag = "\n</parameter>"
    for n in range(min(len(tag), len(text) - start), 0, -1):
        if tag.startswith(text[-n:]) or tag[1:].startswith(text[-n:]):
            return len(text) - n, None
    return len(text), None
