"""A conversation as clients send it, made fit for chat templates.

Owns which messages are refused and how broken ones are shown to the model. Never changes the caller's data.
Hazard: what is not refused here must render, or one bad message would block a conversation for good.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from makeway.errors import UserError
from makeway.text.tools import ToolFormat

_ROLES = {role: role for role in ("system", "user", "assistant", "tool")} | {"developer": "system", "function": "tool"}


def normalize_messages(messages: Sequence[Mapping[str, Any]], *, format: ToolFormat | None) -> list[dict[str, Any]]:
    """Copies of OpenAI's messages that templates can render.

    Content becomes one text (parts are joined; missing: ""), roles those that templates know. Arguments of tool calls
    become the objects that templates expect; where they are no JSON object they stay the text they are, for "xml" as
    a parameter `arguments`, since its templates take nothing else. Calls without an id get one.
    Raises UserError with the message's index for what cannot be shown to a model: no role, images, calls without name.
    """
    if isinstance(messages, str | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise UserError("messages must be a list with at least one message")
    return [_message(message, f"messages[{i}]", i, format) for i, message in enumerate(messages)]


def _message(message: Any, where: str, index: int, format: ToolFormat | None) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise UserError(f"{where} must be an object with 'role' and 'content'")
    role = message.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise UserError(f"{where}.role is {role!r}; use {', '.join(sorted(_ROLES))}")
    out = {**message, "role": _ROLES[role], "content": _content(message.get("content"), f"{where}.content")}
    calls = out.pop("tool_calls", None)
    legacy = out.pop("function_call", None)
    if not calls and legacy:
        calls = [{"function": legacy}]
    if not calls:
        return out
    if role != "assistant":
        raise UserError(f"{where} has tool calls but the role {role!r}; only 'assistant' calls tools")
    if not isinstance(calls, list):
        raise UserError(f"{where}.tool_calls must be a list")
    out["tool_calls"] = [
        _call(call, f"{where}.tool_calls[{n}]", f"call_{index}_{n}", format) for n, call in enumerate(calls)
    ]
    return out


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise UserError(f"{where} must be a text or a list of text parts")
    return "".join(_part(part, f"{where}[{n}]") for n, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, Mapping) else None
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise UserError(f"{where} is of type {kind!r}; this model reads text only")
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise UserError(f"{where}.text must be a text")
    return text


def _call(call: Any, where: str, default_id: str, format: ToolFormat | None) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(name, str) or not name:
        raise UserError(f"{where} names no function; give an object with 'function': {{'name', 'arguments'}}")
    call_id = call.get("id")
    if not isinstance(call_id, str) or not call_id:
        call_id = default_id
    arguments = _arguments(function.get("arguments"), format)
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: Any, format: ToolFormat | None) -> Any:
    """An object where there is one in it; else the text as given, in the form that the templates take."""
    if arguments is None or arguments == "":
        return {}
    if isinstance(arguments, Mapping):
        return dict(arguments)
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False, default=str)
    try:
        value = json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return value
    return {"arguments": text} if format == "xml" else text


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON")
