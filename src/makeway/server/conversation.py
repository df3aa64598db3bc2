"""From a conversation to a prompt: the chat template, tools, reasoning, the beginning of an answer, the grammar.

Owns the template of a model and its compiled grammars. Never generates. Hazard: it is used by several worker threads.
"""

import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from makeway.server.errors import bad_request
from makeway.server.openai_requests import ChatRequest
from makeway.server.output import ChatOutput
from makeway.text import ChatTemplate, Tokenizer
from makeway.text.grammar import CompiledGrammar, Grammar, GrammarVocabulary, Reasoning
from makeway.text.messages import normalize_messages
from makeway.text.reasoning import CLOSE, OPEN, ReasoningSplitter, opens_reasoning
from makeway.text.tool_grammar import tool_grammar
from makeway.text.tools import ToolFormat, ToolParser, tool_format

MAX_GRAMMARS = 64  # compiled ones that are kept


@dataclass(frozen=True)
class Rendered:
    """A prompt's text and how its answer is to be read; `output` makes a reader for one answer."""

    text: str
    grammar: Grammar | None
    tools: list[dict[str, Any]]
    format: ToolFormat | None
    has_reasoning: bool
    is_open: bool

    def output(self) -> ChatOutput:
        """Raises UserError, with the index, for a tool that is none."""
        reasoning = ReasoningSplitter(opened=self.is_open) if self.has_reasoning else None
        tools = ToolParser(self.format, self.tools) if self.tools and self.format is not None else None
        return ChatOutput(reasoning, tools, opened=self.is_open)


class Conversations:
    """One model's way to talk."""

    def __init__(self, tokenizer: Tokenizer, *, n_vocab: int, template: str | None) -> None:
        """`template`: the source of one to use instead of the model's own. `n_vocab`: width of the model's logits."""
        self._tokenizer = tokenizer
        self._n_vocab = n_vocab
        self._sources = dict(tokenizer.chat_templates) if template is None else {"default": template}
        self._templates: dict[str, ChatTemplate] = {}
        self._vocabulary: GrammarVocabulary | None = None
        self._grammars: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
        self._lock = threading.Lock()

    def render(self, asked: ChatRequest) -> Rendered:
        """The prompt; raises UserError or ApiError (400) for what the template or the tools' format refuses."""
        tools = asked.tools if asked.tool_choice != "none" else []
        name = "tool_use" if tools and "tool_use" in self._sources else "default"
        if name not in self._sources:
            raise bad_request("the model has no chat template; use /v1/completions, or start with --chat-template")
        source = self._sources[name]
        format = tool_format(source)
        if tools and format is None:
            raise bad_request("the model's chat template knows no tools", "tools")
        messages = normalize_messages(asked.messages, format=format)
        text = self._template(name).render(messages, tools=tools or None, **asked.template_arguments)
        if asked.prefill is not None:
            # The answer has begun, so the reasoning is over.
            text = (text.rstrip() + f"\n\n{CLOSE}\n\n" if opens_reasoning(text) else text) + asked.prefill
        has_reasoning = OPEN in source and asked.prefill is None
        is_open = has_reasoning and opens_reasoning(text)
        may_think: Reasoning = "open" if is_open else "none"
        if has_reasoning and not is_open and not text.rstrip().endswith(CLOSE):
            may_think = "optional"
        grammar = None if asked.grammar is None else replace(asked.grammar, reasoning=may_think)
        if asked.tool_choice in ("required", "named"):
            assert format is not None
            grammar = tool_grammar(
                tools, _choice(asked), format, parallel=asked.parallel_tool_calls, reasoning=may_think
            )
        return Rendered(text, grammar, tools, format=format, has_reasoning=has_reasoning, is_open=is_open)

    def compile(self, grammar: Grammar) -> CompiledGrammar:
        """The grammar ready for use (agents send the same again and again). Raises UserError saying where it fails."""
        with self._lock:
            known = self._grammars.get(grammar)
            if known is not None:
                self._grammars.move_to_end(grammar)
                return known
            if self._vocabulary is None:
                self._vocabulary = GrammarVocabulary(self._tokenizer, n_vocab=self._n_vocab)
        compiled = grammar.compile(self._vocabulary)
        with self._lock:
            self._grammars[grammar] = compiled
            while len(self._grammars) > MAX_GRAMMARS:
                self._grammars.popitem(last=False)
        return compiled

    def _template(self, name: str) -> ChatTemplate:
        template = self._templates.get(name)
        if template is None:
            tokenizer = self._tokenizer
            template = ChatTemplate(
                self._sources[name],
                bos_token=tokenizer.bos_token,
                eos_token=tokenizer.eos_token,
                name="the chat template",
            )
            self._templates[name] = template
        return template

    def starts_with_bos(self, text: str) -> bool:
        """Whether a rendered prompt has its BOS already."""
        return bool(self._tokenizer.bos_token) and text.startswith(self._tokenizer.bos_token)


def _choice(asked: ChatRequest) -> str | Mapping[str, Any]:
    if asked.only_tool is None:
        return "required"
    return {"type": "function", "function": {"name": asked.only_tool}}
