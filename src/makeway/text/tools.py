"""Tool calls in an answer's text, as Qwen models write them, found while the text appears.

Owns the two formats and what is held back. Never raises for what a model writes and never loses any of it: what is no
well-formed call is content. Hazard: arguments are passed on before their call is complete; only `CallEnd` says that
they are whole.
"""

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from makeway.text.tool_calls import Arguments, Call, HermesForm, Started, XmlForm
from makeway.text.tool_schemas import functions

ToolFormat = Literal["hermes", "xml"]
OPEN, BARE = "<tool_call>", "<function="
_START = re.compile(rf"{OPEN}\s*{BARE}|{OPEN}|{BARE}")


@dataclass(frozen=True)
class Content:
    """Text that is no tool call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The `index`-th call of the answer began."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """More of the call's arguments: pieces of one JSON object's text. It closes with `CallEnd`, never before."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """The call is complete; its arguments joined are valid JSON."""

    index: int


@dataclass(frozen=True)
class CallBroken:
    """A call that had started is malformed or cut off. Its arguments joined are no JSON, and its whole text follows as
    content: who has not passed the call on can forget it."""

    index: int


Piece = Content | CallStart | CallArguments | CallEnd | CallBroken


def tool_format(template: str) -> ToolFormat | None:
    """The format that a chat template's text shows the model; None when it knows no tool calls (of ours)."""
    if "<function=" in template and "<parameter=" in template:
        return "xml"
    return "hermes" if OPEN in template else None


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class ToolParser:
    """`push` an answer's text as it appears, `flush` at its end. However the text is cut, the pieces join to the same.

    hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. xml: `<tool_call><function=NAME>
    <parameter=KEY>VALUE</parameter>...</function></tool_call>` (the first tag may be missing), values read by the
    types in the tool's schema; text where the schema does not know better. White space next to a call is dropped.
    Text is held back while it may be the start of a call, or white space before one.
    """

    def __init__(
        self, format: ToolFormat, tools: Sequence[Mapping[str, Any]] = (), *, new_id: Callable[[], str] = _new_id
    ) -> None:
        """`tools` as OpenAI writes them. Raises UserError, with the index, for a tool that is none."""
        self._format = format
        self._schemas = functions(tools)
        self._new_id = new_id
        self._markers = (OPEN, BARE) if format == "xml" else (OPEN,)
        self._held = ""  # outside a call: white space and what may be a marker; inside: the white space before it
        self._call: Call | None = None
        self._raw: list[str] = []  # the text of the call so far, its marker first
        self._has_started = False
        self._n_calls = 0
        self._after_call = False

    def push(self, text: str) -> list[Piece]:
        """The pieces that are certain now."""
        pieces: list[Piece] = []
        while text:
            text = self._inside(text, pieces) if self._call else self._outside(text, pieces)
        return _joined(pieces)

    def flush(self) -> list[Piece]:
        """The rest. A call whose last tag alone is missing counts."""
        pieces: list[Piece] = []
        if self._call is not None:
            if self._call.flush():
                self._relay(self._call.take(), pieces)
                self._end(pieces)
            else:  # its text is not looked through again: it is one call that was cut off
                raw = "".join(self._raw)
                self._break(pieces)
                pieces.append(Content(raw))
        elif not (self._after_call and self._held.isspace()):
            pieces.append(Content(self._held))
        self._held = ""
        return _joined(pieces)

    def _outside(self, text: str, pieces: list[Piece]) -> str:
        """Passes content on up to a marker; returns what is left to read."""
        text = self._held + text
        found = [(i, marker) for marker in self._markers if (i := text.find(marker)) >= 0]
        if found:
            start, marker = min(found)
            end = len(text[:start].rstrip())
            self._content(text[:end], pieces)
            self._held = text[end:start]
            self._call = self._new_call(marker)
            self._raw = [marker]
            self._has_started = False
            return text[start + len(marker) :]
        end = len(text[: len(text) - _n_begun(text, self._markers)].rstrip())
        self._content(text[:end], pieces)
        self._held = text[end:]
        return ""

    def _content(self, text: str, pieces: list[Piece]) -> None:
        if text:
            pieces.append(Content(text))
            self._after_call = False

    def _new_call(self, marker: str) -> Call:
        return Call(XmlForm(self._schemas, is_bare=marker == BARE) if self._format == "xml" else HermesForm())

    def _inside(self, text: str, pieces: list[Piece]) -> str:
        """Feeds the call; returns what is left to read after it, or to read again when it is broken."""
        assert self._call is not None
        self._raw.append(text)
        rest = self._call.push(text)
        self._relay(self._call.take(), pieces)
        if self._call.is_broken:
            raw = "".join(self._raw)
            start = _START.match(raw)
            assert start is not None
            self._break(pieces)
            self._content(start[0], pieces)
            return raw[start.end() :]  # another call may have begun inside
        if rest is None:
            return ""
        self._end(pieces)
        return rest

    def _relay(self, found: list[Started | Arguments], pieces: list[Piece]) -> None:
        for is_start, items in groupby(found, key=lambda item: isinstance(item, Started)):
            text = "".join(item.text for item in items)
            if is_start:
                self._has_started = True
                pieces.append(CallStart(self._n_calls, self._new_id(), text))
            else:
                pieces.append(CallArguments(self._n_calls, text))

    def _end(self, pieces: list[Piece]) -> None:
        pieces.append(CallEnd(self._n_calls))
        self._n_calls += 1
        self._call, self._raw, self._held = None, [], ""
        self._after_call = True

    def _break(self, pieces: list[Piece]) -> None:
        """Leaves the call: the white space before it is content after all."""
        if self._has_started:
            pieces.append(CallBroken(self._n_calls))
            self._n_calls += 1
        self._content(self._held, pieces)
        self._call, self._raw, self._held = None, [], ""


def _n_begun(text: str, markers: Sequence[str]) -> int:
    """Length of the longest end of the text that a marker may begin with."""
    lengths = range(max(map(len, markers)) - 1, 0, -1)
    return next((n for n in lengths if any(n < len(m) and text.endswith(m[:n]) for m in markers)), 0)


def _joined(pieces: list[Piece]) -> list[Piece]:
    """The pieces with neighbours of one kind made one, and empty ones left out."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if isinstance(piece, Content | CallArguments) and not piece.text:
            continue
        if isinstance(piece, Content) and isinstance(last, Content):
            out[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments) and last.index == piece.index:
            out[-1] = CallArguments(piece.index, last.text + piece.text)
        else:
            out.append(piece)
    return out
