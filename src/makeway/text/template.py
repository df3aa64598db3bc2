"""Chat templates: jinja2 in a sandbox, with the helpers that transformers offers them.

Owns what a template can see and call. Never runs template code outside the sandbox, and shows it plain data only.
Hazard: a template is untrusted input of a file.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from makeway.errors import UserError
from makeway.text.sandbox import BoundedSandbox, Budget, line_of

_FILENAME = "<chat template>"
# Names under which a message's reasoning is passed; templates read the first, some the second.
_REASONING = ("reasoning_content", "thinking", "reasoning")


class TemplateError(UserError):
    """The chat template does not compile, or refused these messages."""


class _Refused(jinja2.TemplateError):
    """raise_exception of a template."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def _raise_exception(message: str) -> None:
    raise _Refused(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Environment(BoundedSandbox):
    """The settings and helpers that transformers gives to templates."""

    def __init__(self) -> None:
        super().__init__(Budget(), trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        self.filters["tojson"] = self._bounded("tojson", _tojson)
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now


class ChatTemplate:
    """A compiled template; safe to use from several threads."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, name: str) -> None:
        """`name` is what errors call it (a file). Raises TemplateError at once when it does not compile."""
        self._name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            environment = _Environment()
            self._code = environment.compile(environment.checked(source), filename=_FILENAME)
        except Exception as error:
            raise TemplateError(f"{name}: the chat template does not compile{_where(error)}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The prompt of a conversation. `arguments` (enable_thinking, ...) go to the template as they are.

        Raises TemplateError with the template's own message and line when it refuses the messages or fails, and
        when something given to it is not plain (JSON-like) data.
        """
        environment = _Environment()  # one for each rendering: it holds the budget
        try:
            variables = {
                "documents": None,
                **self._tokens,
                **{key: self._plain(value, key) for key, value in arguments.items()},
                "messages": self._messages(messages),
                "tools": self._plain(tools, "tools"),
                "add_generation_prompt": add_generation_prompt,
            }
            template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
            return template.render(variables)
        except TemplateError:
            raise
        except _Refused as error:
            raise TemplateError(f"{self._name}: the chat template refuses these messages{_where(error)}") from error
        except Exception as error:
            raise TemplateError(f"{self._name}: the chat template failed on these messages{_where(error)}") from error

    def _messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Copies, with the reasoning under every name that templates know."""
        if not all(isinstance(message, Mapping) for message in messages):
            raise TemplateError(f"{self._name}: messages must be a list of objects with 'role' and 'content'")
        copies: list[dict[str, Any]] = self._plain(list(messages), "messages")
        for i, message in enumerate(copies):
            reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
            if reasoning is not None:
                copies[i] = {"thinking": reasoning, **message, "reasoning_content": reasoning}
        return copies

    def _plain(self, value: Any, where: str) -> Any:
        """A copy in plain types, so that a template can neither change the caller's data nor call its methods."""
        if value is None or type(value) in (str, int, float, bool):
            return value
        if isinstance(value, Mapping):
            return {str(key): self._plain(item, f"{where}.{key}") for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
        # Subclasses (enumerations, numpy numbers) are taken back to their base type.
        if isinstance(value, str):
            return str.__str__(value)
        if isinstance(value, int):
            return int.__int__(value)
        if isinstance(value, float):
            return float.__float__(value)
        raise TemplateError(f"{self._name}: {where} is of type {type(value).__name__}; give plain JSON-like data")


def _where(error: Exception) -> str:
    """The line and the reason, as the end of a message."""
    line = line_of(error, _FILENAME)
    kind = "" if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: "
    reason = getattr(error, "message", None) or str(error)
    return (f", line {line}: " if line else ": ") + kind + (reason or "no reason given")
