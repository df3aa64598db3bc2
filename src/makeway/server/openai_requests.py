"""Requests in OpenAI's form, read into plain data: completions and chat completions.

Owns the meaning of OpenAI's fields and the refusals of what cannot be had. Never renders or tokenises.
Hazard: a field that is silently ignored must not change what the client believes it gets.
"""

from dataclasses import dataclass, field
from typing import Any

from makeway.config import SamplingParams
from makeway.server.errors import bad_request
from makeway.server.fields import Fields, kind_of
from makeway.server.grammars import read_grammar
from makeway.server.messages import read_messages
from makeway.server.sampling import MAX_LOGPROBS, MAX_TOKENS, read_sampling
from makeway.text.grammar import Grammar

MAX_ANSWERS = 128
MAX_TOOLS = 1024


@dataclass(frozen=True)
class Delivery:
    """How the client wants its answer. `progress`: with events about the prompt being read."""

    stream: bool
    usage: bool
    progress: bool


@dataclass(frozen=True)
class CompletionRequest:
    """A /v1/completions request; `prompts` are texts or token ids, each gets `n` answers."""

    model: str | None
    prompts: list[str | list[int]]
    n: int
    echo: bool
    sampling: SamplingParams
    delivery: Delivery
    grammar: Grammar | None


@dataclass(frozen=True)
class ChatRequest:
    """A conversation to be continued; also what Anthropic's form becomes.

    `tool_choice`: auto, none, required, or the name of the one tool to call in `only_tool`. `prefill`: the beginning of
    the answer, given by the client.
    """

    model: str | None
    messages: list[dict[str, Any]]
    sampling: SamplingParams
    delivery: Delivery
    n: int = 1
    tools: list[dict[str, Any]] = field(default_factory=list)
    tool_choice: str = "auto"
    only_tool: str | None = None
    parallel_tool_calls: bool = True
    grammar: Grammar | None = None
    template_arguments: dict[str, Any] = field(default_factory=dict)
    prefill: str | None = None


def read_completion(fields: Fields, *, n_vocab: int) -> CompletionRequest:
    """Raises ApiError (400) naming the field."""
    if fields.text("suffix"):
        raise bad_request("'suffix' is not supported; leave it out", "suffix")
    prompts = _prompts(fields)
    n = fields.integer("n", least=1, most=MAX_ANSWERS) or 1
    best_of = fields.integer("best_of", least=1, most=MAX_ANSWERS)
    if best_of is not None and best_of != n:
        raise bad_request("'best_of' other than 'n' is not supported; leave it out", "best_of")
    if n * len(prompts) > MAX_ANSWERS:
        raise bad_request(f"{len(prompts)} prompts with {n} answers each; ask for at most {MAX_ANSWERS} answers", "n")
    logprobs = fields.integer("logprobs", least=0, most=MAX_LOGPROBS)
    echo = fields.flag("echo")
    if echo and logprobs is not None:
        raise bad_request("'echo' with 'logprobs' is not supported: prompts have no log-probabilities here", "echo")
    return CompletionRequest(
        model=fields.text("model"),
        prompts=prompts,
        n=n,
        echo=echo,
        sampling=read_sampling(
            fields, n_vocab=n_vocab, max_tokens=_limit(fields, "max_tokens") or 16, logprobs=logprobs
        ),
        delivery=read_delivery(fields),
        grammar=read_grammar(fields),
    )


def read_chat(fields: Fields, *, n_vocab: int) -> ChatRequest:
    """Raises ApiError (400) naming the field or the message."""
    for name in ("functions", "function_call"):
        if fields.get(name):
            raise bad_request(f"'{name}' is no longer supported; use 'tools' and 'tool_choice'", name)
    for modality in fields.array("modalities") or ():
        if modality != "text":
            raise bad_request("'modalities': this server answers in text only", "modalities")
    top = fields.integer("top_logprobs", least=0, most=MAX_LOGPROBS)
    if top is not None and not fields.flag("logprobs"):
        raise bad_request("'top_logprobs' needs 'logprobs': true", "top_logprobs")
    n_best = (top or 0) if fields.flag("logprobs") else None
    limit = _limit(fields, "max_completion_tokens") or _limit(fields, "max_tokens")
    messages = read_messages(fields)
    prefill = None
    if fields.flag("continue_final_message"):
        if messages[-1]["role"] != "assistant" or messages[-1].get("tool_calls"):
            raise bad_request("'continue_final_message' needs a last message of the assistant", "messages")
        prefill = messages.pop()["content"]
    tools, choice, only = _tools(fields)
    grammar = read_grammar(fields)
    if grammar is not None and choice in ("required", "named"):
        raise bad_request("a grammar and a forced tool call exclude each other; give one of them", "tool_choice")
    return ChatRequest(
        model=fields.text("model"),
        messages=messages,
        sampling=read_sampling(fields, n_vocab=n_vocab, max_tokens=limit, logprobs=n_best),
        delivery=read_delivery(fields),
        n=fields.integer("n", least=1, most=MAX_ANSWERS) or 1,
        tools=tools,
        tool_choice=choice,
        only_tool=only,
        parallel_tool_calls=fields.flag("parallel_tool_calls", default=True),
        grammar=grammar,
        template_arguments=_template_arguments(fields),
        prefill=prefill,
    )


def read_delivery(fields: Fields) -> Delivery:
    """`stream`, `stream_options` and `return_progress`."""
    stream = fields.flag("stream")
    options = fields.object("stream_options")
    if options is not None and not stream:
        raise bad_request("'stream_options' needs 'stream': true", "stream_options")
    return Delivery(
        stream=stream,
        usage=options is not None and options.flag("include_usage"),
        progress=fields.flag("return_progress"),
    )


def _limit(fields: Fields, field: str) -> int | None:
    return fields.integer(field, least=1, most=MAX_TOKENS)


def _prompts(fields: Fields) -> list[str | list[int]]:
    """`prompt` as text, token ids, or a list of either."""
    prompt = fields.get("prompt")
    if isinstance(prompt, str):
        return [prompt]
    items = fields.array("prompt")
    wanted = "'prompt' must be a text, an array of token ids, or an array of either"
    if not items:
        raise bad_request(wanted + (" (it is empty)" if items is not None else " (it is missing)"), "prompt")
    if all(isinstance(item, int) and not isinstance(item, bool) for item in items):
        return [items]
    for i, item in enumerate(items):
        ids = isinstance(item, list) and all(isinstance(t, int) and not isinstance(t, bool) for t in item)
        if not isinstance(item, str) and not ids:
            raise bad_request(f"'prompt[{i}]' is {kind_of(item)}; {wanted}", f"prompt[{i}]")
    return items


def _tools(fields: Fields) -> tuple[list[dict[str, Any]], str, str | None]:
    """The tools in OpenAI's form, the choice (auto, none, required, named), and the name of a named one."""
    tools, names = [], set()
    for tool in fields.objects("tools"):
        if tool.text("type", "function") != "function":
            raise bad_request(f"'{tool.name('type')}' is not supported; use 'function'", tool.name("type"))
        function = tool.object("function")
        if function is None:
            raise tool.wrong("function", "an object")
        name = function.need_text("name")
        function.text("description")
        function.plain("parameters")
        names.add(name)
        tools.append({"type": "function", "function": dict(tool.plain("function") or {})})
    if len(tools) > MAX_TOOLS:
        raise bad_request(f"'tools' has {len(tools)} entries; give at most {MAX_TOOLS}", "tools")
    choice = fields.get("tool_choice")
    if choice is None:
        return tools, "auto", None
    if isinstance(choice, dict):
        given = Fields(choice, "tool_choice")
        function = given.object("function")
        if function is None:
            raise given.wrong("function", "an object with the name of a tool")
        only = function.need_text("name")
        if only not in names:
            raise bad_request("'tool_choice' names a tool that is not among 'tools'", "tool_choice")
        return tools, "named", only
    kind = fields.choice("tool_choice", among=("auto", "none", "required")) or "auto"
    if kind == "required" and not tools:
        raise bad_request("'tool_choice' is 'required', but there are no 'tools'", "tool_choice")
    return tools, kind, None


def _template_arguments(fields: Fields) -> dict[str, Any]:
    arguments = fields.plain("chat_template_kwargs") or {}
    for name in ("self", "messages", "tools", "add_generation_prompt"):
        if name in arguments:
            raise bad_request(f"'chat_template_kwargs.{name}' is set by the request itself", "chat_template_kwargs")
    effort = fields.text("reasoning_effort")
    if effort is not None:
        arguments = {"reasoning_effort": effort, **arguments}
    return arguments
