"""A conversation in OpenAI's form, checked and brought into the form that chat templates expect.

Owns what a message may hold. Never renders. Hazard: a broken message must be refused with its index, or it blocks the
conversation for good with an error that nobody can place.
"""

from typing import Any

from makeway.server.errors import bad_request
from makeway.server.fields import Fields, shorten

MAX_MESSAGES = 65536
_ROLES = ("system", "developer", "user", "assistant", "tool")
_TEXT_PARTS = ("text", "input_text", "output_text")
_OTHER_PARTS = {
    "image_url": "images",
    "input_image": "images",
    "image": "images",
    "input_audio": "audio",
    "video_url": "video",
    "file": "files",
    "input_file": "files",
}


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    """The `messages` of a request; raises ApiError (400) with the index of the message at fault."""
    given = fields.array("messages")
    if not given:
        what = "is missing" if given is None else "is empty"
        raise bad_request(f"'messages' {what}; give at least one message", "messages")
    if len(given) > MAX_MESSAGES:
        raise bad_request(f"'messages' has {len(given)} entries; give at most {MAX_MESSAGES}", "messages")
    return [_message(message) for message in fields.objects("messages")]


def _message(fields: Fields) -> dict[str, Any]:
    role = fields.need_text("role")
    if role not in _ROLES:
        name = fields.name("role")
        raise bad_request(f"'{name}' is '{shorten(role)}'; use one of {', '.join(_ROLES)}", name)
    if role == "developer":
        role = "system"
    calls = _tool_calls(fields) if role == "assistant" else None
    content = read_content(fields)
    reasoning = fields.text("reasoning_content") or fields.text("reasoning")
    if content is None and role != "assistant":
        raise fields.wrong("content", "a string or an array of text parts")
    message: dict[str, Any] = {"role": role, "content": content or ""}
    if calls:
        message["tool_calls"] = calls
    if role == "assistant" and reasoning is not None:
        message["reasoning_content"] = reasoning
    for key in ("name", "tool_call_id"):
        value = fields.text(key)
        if value is not None:
            message[key] = value
    return message


def read_content(fields: Fields) -> str | None:
    """The text of `content`: a string, or parts that must all be text."""
    value = fields.get("content")
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong("content", "a string or an array of text parts")
    texts = []
    for part in fields.objects("content"):
        kind = part.text("type", "text")
        name = part.name("type")
        if kind in _OTHER_PARTS:
            raise bad_request(f"'{name}' is '{kind}': this server reads no {_OTHER_PARTS[kind]}, only text", name)
        if kind == "refusal":
            texts.append(part.need_text("refusal"))
        elif kind in _TEXT_PARTS:
            texts.append(part.need_text("text"))
        else:
            raise bad_request(f"'{name}' is '{shorten(str(kind))}'; use 'text'", name)
    return "\n".join(texts)


def _tool_calls(fields: Fields) -> list[dict[str, Any]]:
    """Calls with a function's name and its arguments as text; what is wrong inside the arguments is looked at later."""
    calls = []
    for call in fields.objects("tool_calls"):
        function = call.object("function")
        if function is None:
            raise call.wrong("function", "an object with 'name' and 'arguments'")
        arguments = function.get("arguments")
        if arguments is None:
            arguments = "{}"
        if not isinstance(arguments, str | dict):
            raise function.wrong("arguments", "a string that holds a JSON object")
        given = {"name": function.need_text("name"), "arguments": arguments}
        calls.append({"type": "function", "function": given} | _id_of(call))
    return calls


def _id_of(call: Fields) -> dict[str, str]:
    value = call.text("id")
    return {} if value is None else {"id": value}
