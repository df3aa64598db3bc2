"""Requests in Anthropic's form, read into the same plain data as OpenAI's chat requests.

Owns the meaning of Anthropic's fields. Never renders or tokenises. Hazard: a user's turn may hold results of tools and
text, which become several messages, so errors must name the place in the request and not in what it became.
"""

import json
from typing import Any

from makeway.config import SamplingParams
from makeway.server.errors import bad_request
from makeway.server.fields import Fields, shorten
from makeway.server.openai_requests import ChatRequest, Delivery
from makeway.server.sampling import MAX_TOKENS, read_sampling, read_stop

_UNREAD = {"image": "images", "document": "documents", "file": "files", "audio": "audio"}


def read_anthropic(fields: Fields, *, n_vocab: int, counting: bool = False) -> ChatRequest:
    """A /v1/messages request; `counting`: one of /v1/messages/count_tokens, which needs no max_tokens.

    Raises ApiError (400) naming the field or the message.
    """
    limit = fields.integer("max_tokens", least=1, most=MAX_TOKENS)
    if limit is None and not counting:
        raise fields.wrong("max_tokens", "an integer")
    messages = _system(fields) + _messages(fields)
    prefill = None
    if messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
        prefill = messages.pop()["content"]
    thinking = fields.object("thinking")
    kind = None if thinking is None else thinking.choice("type", among=("enabled", "disabled", "adaptive"))
    tools = _tools(fields)
    choice, only, parallel = _tool_choice(fields, tools)
    return ChatRequest(
        model=fields.text("model"),
        messages=messages,
        sampling=_sampling(fields, n_vocab, limit),
        delivery=Delivery(stream=fields.flag("stream"), usage=True, progress=fields.flag("return_progress")),
        tools=tools,
        tool_choice=choice,
        only_tool=only,
        parallel_tool_calls=parallel,
        # Anthropic's models think only when told to; so here.
        template_arguments={"enable_thinking": kind in ("enabled", "adaptive")},
        prefill=prefill,
    )


def _sampling(fields: Fields, n_vocab: int, limit: int | None) -> SamplingParams:
    stops = Fields({**fields.all, "stop": list(read_stop(fields, "stop_sequences"))}, fields.path)
    return read_sampling(stops, n_vocab=n_vocab, max_tokens=limit, logprobs=None)


def _system(fields: Fields) -> list[dict[str, Any]]:
    if fields.get("system") is None:
        return []
    return [{"role": "system", "content": _text(fields, "system")}]


def _messages(fields: Fields) -> list[dict[str, Any]]:
    given = fields.array("messages")
    if not given:
        what = "is missing" if given is None else "is empty"
        raise bad_request(f"'messages' {what}; give at least one message", "messages")
    messages: list[dict[str, Any]] = []
    for message in fields.objects("messages"):
        role = message.choice("role", among=("user", "assistant", "system"))
        if role is None:
            raise message.wrong("role", "user or assistant")
        if role == "assistant":
            messages.append(_assistant(message))
        else:
            messages.extend(_user(message, role))
    return messages


def _user(message: Fields, role: str) -> list[dict[str, Any]]:
    """Results of tools become messages of their own, in order."""
    if isinstance(message.get("content"), str):
        return [{"role": role, "content": message.get("content")}]
    if message.array("content") is None:
        raise message.wrong("content", "a string or an array of blocks")
    messages: list[dict[str, Any]] = []
    texts: list[str] = []
    for block in message.objects("content"):
        kind = _kind(block, ("text", "tool_result"))
        if kind == "text":
            texts.append(block.need_text("text"))
            continue
        if texts:
            messages.append({"role": role, "content": "\n".join(texts)})
            texts = []
        content = "" if block.get("content") is None else _text(block, "content")
        messages.append({"role": "tool", "tool_call_id": block.need_text("tool_use_id"), "content": content})
    if texts or not messages:
        messages.append({"role": role, "content": "\n".join(texts)})
    return messages


def _assistant(message: Fields) -> dict[str, Any]:
    if isinstance(message.get("content"), str):
        return {"role": "assistant", "content": message.get("content")}
    if message.array("content") is None:
        raise message.wrong("content", "a string or an array of blocks")
    texts, thoughts, calls = [], [], []
    for block in message.objects("content"):
        kind = _kind(block, ("text", "tool_use", "thinking", "redacted_thinking"))
        if kind == "text":
            texts.append(block.need_text("text"))
        elif kind == "thinking":
            thoughts.append(block.need_text("thinking"))
        elif kind == "tool_use":
            arguments = json.dumps(block.plain("input") or {}, ensure_ascii=False)
            function = {"name": block.need_text("name"), "arguments": arguments}
            calls.append({"id": block.need_text("id"), "type": "function", "function": function})
    result: dict[str, Any] = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        result["reasoning_content"] = "\n".join(thoughts)
    if calls:
        result["tool_calls"] = calls
    return result


def _kind(block: Fields, known: tuple[str, ...]) -> str:
    kind, name = block.need_text("type"), block.name("type")
    if kind in _UNREAD:
        raise bad_request(f"'{name}' is '{kind}': this server reads no {_UNREAD[kind]}, only text", name)
    if kind not in known:
        raise bad_request(f"'{name}' is '{shorten(kind)}'; use one of {', '.join(known)}", name)
    return kind


def _text(fields: Fields, field: str) -> str:
    """A text, or text blocks joined."""
    value = fields.get(field)
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise fields.wrong(field, "a string or an array of text blocks")
    blocks = list(fields.objects(field))
    for block in blocks:
        _kind(block, ("text",))
    return "\n".join(block.need_text("text") for block in blocks)


def _tools(fields: Fields) -> list[dict[str, Any]]:
    tools = []
    for tool in fields.objects("tools"):
        kind = tool.text("type", "custom")
        if kind != "custom":
            name = tool.name("type")
            raise bad_request(f"'{name}' is '{shorten(str(kind))}': this server runs no tools of its own", name)
        schema = tool.plain("input_schema")
        if schema is None:
            raise tool.wrong("input_schema", "a JSON schema")
        function: dict[str, Any] = {"name": tool.need_text("name"), "parameters": schema}
        description = tool.text("description")
        if description is not None:
            function["description"] = description
        tools.append({"type": "function", "function": function})
    return tools


def _tool_choice(fields: Fields, tools: list[dict[str, Any]]) -> tuple[str, str | None, bool]:
    """In OpenAI's words: the choice, the one tool, and whether several calls are allowed."""
    given = fields.object("tool_choice")
    if given is None:
        return "auto", None, True
    kind = given.choice("type", among=("auto", "any", "tool", "none"))
    if kind is None:
        raise given.wrong("type", "auto, any, tool or none")
    parallel = not given.flag("disable_parallel_tool_use")
    if kind == "tool":
        only = given.need_text("name")
        if only not in (tool["function"]["name"] for tool in tools):
            raise bad_request("'tool_choice' names a tool that is not among 'tools'", "tool_choice")
        return "named", only, parallel
    if kind == "any" and not tools:
        raise bad_request("'tool_choice' is 'any', but there are no 'tools'", "tool_choice")
    return {"any": "required"}.get(kind, kind), None, parallel
