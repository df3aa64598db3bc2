"""An answer's text taken apart while it appears: reasoning, content, tool calls.

Owns the order: first the reasoning is split off, then calls are looked for in the rest. Never formats anything.
Hazard: `finish` must be called once at the end, or held-back text is lost.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, assert_never

from makeway.text import tools as t
from makeway.text.reasoning import ReasoningSplitter, Split


@dataclass(frozen=True)
class Piece:
    """A piece of the answer; `index`, `id` and `name` belong to calls. kind "broken": the call was none after all."""

    kind: Literal["content", "reasoning", "call", "arguments", "end", "broken"]
    text: str = ""
    index: int = 0
    id: str = ""
    name: str = ""


class ChatOutput:
    """`push` text as it comes, `finish` at the end."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: t.ToolParser | None, *, opened: bool) -> None:
        """Either part may be missing. `opened`: the prompt ended inside `<think>`."""
        self._reasoning = reasoning
        self._tools = tools
        self.is_reasoning = opened
        self.n_calls = 0

    def push(self, text: str) -> list[Piece]:
        if self._reasoning is None:
            return self._answer(text)
        return self._split(self._reasoning.push(text))

    def finish(self) -> list[Piece]:
        """What was held back."""
        pieces = [] if self._reasoning is None else self._split(self._reasoning.flush())
        if self._tools is not None:
            pieces += self._calls(self._tools.flush())
        return pieces

    def _split(self, split: Split) -> list[Piece]:
        pieces = []
        if split.reasoning:
            self.is_reasoning = True
            pieces.append(Piece("reasoning", split.reasoning))
        if split.content:
            self.is_reasoning = False
            pieces += self._answer(split.content)
        return pieces

    def _answer(self, text: str) -> list[Piece]:
        if self._tools is None:
            return [Piece("content", text)] if text else []
        return self._calls(self._tools.push(text))

    def _calls(self, found: Sequence[t.Piece]) -> list[Piece]:
        pieces = []
        for item in found:
            match item:
                case t.Content(text):
                    pieces.append(Piece("content", text))
                case t.CallStart(index, id, name):
                    pieces.append(Piece("call", index=index, id=id, name=name))
                case t.CallArguments(index, text):
                    pieces.append(Piece("arguments", text, index))
                case t.CallEnd(index):
                    self.n_calls += 1
                    pieces.append(Piece("end", index=index))
                case t.CallBroken(index):
                    pieces.append(Piece("broken", index=index))
                case _:
                    assert_never(item)
        return pieces
