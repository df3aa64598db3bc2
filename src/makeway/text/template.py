"""Chat templates: jinja2 in a sandbox, with the helpers that transformers offers them.

Owns the environment. Never runs template code outside the sandbox. Hazard: a template is untrusted input of a file.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from makeway.errors import UserError


class TemplateError(UserError):
    """The chat template does not compile, or refused these messages."""


class _Refused(jinja2.TemplateError):
    """raise_exception of a template."""


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


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


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    helpers: dict[str, Callable[..., Any]] = {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    environment.globals.update(helpers)
    return environment


class ChatTemplate:
    """A compiled template; raises TemplateError at once when it does not compile."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str, name: str) -> None:
        self._name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise TemplateError(f"{name}: the chat template does not compile, line {error.lineno}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **arguments: Any,
    ) -> str:
        """The prompt of a conversation. `arguments` (enable_thinking, ...) go to the template as they are.

        Raises TemplateError with the template's own message when it refuses the messages or fails.
        """
        variables = {**self._tokens, **arguments, "messages": messages, "tools": tools}
        try:
            return self._template.render(**variables, add_generation_prompt=add_generation_prompt)
        except _Refused as error:
            raise TemplateError(f"{self._name}: the chat template refuses these messages: {error}") from error
        except Exception as error:
            kind = type(error).__name__
            raise TemplateError(
                f"{self._name}: the chat template failed on these messages ({kind}): {error}"
            ) from error
