"""GBNF, llama.cpp's grammar format, written as a Lark grammar for llguidance.

Owns the syntax of GBNF and its faults with their line. Never judges what a grammar means.
Hazard: in a recursive grammar, the rules without recursion become tokens of llguidance's lexer, which match as much as
they can; a grammar that counts on a shorter match there leads nowhere.
"""

import re
from dataclasses import dataclass

from makeway.errors import UserError

_NAME = re.compile(r"[A-Za-z0-9_-]+")
_SPACE = re.compile(r"(?:[ \t]|#[^\r\n]*)*")
_SPACE_AND_LINES = re.compile(r"(?:[ \t\r\n]|#[^\r\n]*)*")
_LITERAL = re.compile(r'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_CLASS = re.compile(r"\[((?:[^\]\\]|\\.)*)\]", re.DOTALL)
_COUNT = re.compile(r"\{\s*(\d{1,9})\s*(,\s*(\d{1,9})?)?\s*\}")
_CHARACTER = re.compile(
    r'\\x(?P<x>[0-9a-fA-F]{2})|\\u(?P<u>[0-9a-fA-F]{4})|\\U(?P<U>[0-9a-fA-F]{8})|\\(?P<escaped>["\\\[\]nrt])|(?P<c>[^\\])',
    re.DOTALL,
)
_REFERENCE = re.compile(r"<([A-Za-z0-9_-]+)>")  # in the text of a rule; other angle brackets are escaped there


@dataclass(frozen=True)
class _Rule:
    """Lark text with `<name>` for other rules, and where each of them is named."""

    text: str
    references: dict[str, int]


def gbnf_to_lark(source: str) -> str:
    """The Lark grammar of a GBNF grammar. Raises UserError with line and column for what is wrong or not supported."""
    try:
        rules = _Parser(source).rules()
    except RecursionError as error:
        raise UserError("the GBNF grammar has groups nested too deeply") from error
    if "root" not in rules:
        raise UserError("the GBNF grammar has no rule 'root', where an answer starts")
    for rule in rules.values():
        for name, at in rule.references.items():
            if name not in rules:
                raise _fault(source, at, f"there is no rule {name!r}")
    tokens = _tokens(rules)
    names = {name: f"r{i}_{re.sub('[^a-z0-9]', '_', name.lower())}" for i, name in enumerate(rules)}
    names = {name: lark.upper() if name in tokens else lark for name, lark in names.items()}
    lines = [f"{names[n]}: {_REFERENCE.sub(lambda m: names[m[1]], rule.text)}" for n, rule in rules.items()]
    return "\n".join([f"start: {names['root']}", *lines]) + "\n"


def _tokens(rules: dict[str, _Rule]) -> set[str]:
    """The rules that no recursion passes through: what llguidance's lexer can match. If that is the root, the whole
    grammar is one regular expression."""
    tokens: set[str] = set()
    while more := {n for n, rule in rules.items() if n not in tokens and rule.references.keys() <= tokens}:
        tokens |= more
    return tokens


def _fault(source: str, at: int, reason: str) -> UserError:
    line = source.count("\n", 0, at) + 1
    column = at - (source.rfind("\n", 0, at) + 1) + 1
    return UserError(f"the GBNF grammar is wrong or not supported at line {line}, column {column}: {reason}")


class _Parser:
    """Recursive descent over the text; `_at` is the place."""

    def __init__(self, source: str) -> None:
        self._source = source
        self._at = 0
        self._references: dict[str, int] = {}

    def rules(self) -> dict[str, _Rule]:
        rules: dict[str, _Rule] = {}
        self._take(_SPACE_AND_LINES)
        while self._at < len(self._source):
            start = self._at
            name = self._take(_NAME)
            self._take(_SPACE)
            if name is None or not self._skip("::="):
                raise self._fault("a rule is written NAME ::= ...")
            if name[0] in rules:
                raise _fault(self._source, start, f"the rule {name[0]!r} is there twice")
            self._take(_SPACE_AND_LINES)
            self._references = {}
            text = self._alternatives(is_nested=False)
            if self._at < len(self._source) and self._source[self._at] not in "\r\n":
                raise self._fault(f"unexpected {self._source[self._at]!r}")
            rules[name[0]] = _Rule(text, self._references)
            self._take(_SPACE_AND_LINES)
        return rules

    def _fault(self, reason: str) -> UserError:
        return _fault(self._source, self._at, reason)

    def _take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        match = pattern.match(self._source, self._at)
        if match is not None:
            self._at = match.end()
        return match

    def _skip(self, text: str) -> bool:
        found = self._source.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _alternatives(self, *, is_nested: bool) -> str:
        """Inside a group a line may end anywhere, outside only after `|`."""
        parts = [self._sequence(is_nested=is_nested)]
        while self._skip("|"):
            self._take(_SPACE_AND_LINES)
            parts.append(self._sequence(is_nested=is_nested))
        return " | ".join(parts)

    def _sequence(self, *, is_nested: bool) -> str:
        space = _SPACE_AND_LINES if is_nested else _SPACE
        parts = []
        while (item := self._item()) is not None:
            self._take(space)
            while (repeat := self._repeat()) is not None:
                item = f"({item}){repeat}"
                self._take(space)
            parts.append(item)
        return " ".join(parts) or '""'

    def _item(self) -> str | None:
        start = self._at
        if literal := self._take(_LITERAL):
            characters = self._characters(literal[1], start + 1)
            return f"/{''.join(_escaped(c) for c, _ in characters)}/" if characters else '""'
        if class_ := self._take(_CLASS):
            return f"/{self._class(class_[1], start + 1)}/"
        if self._skip("("):
            self._take(_SPACE_AND_LINES)
            text = self._alternatives(is_nested=True)
            if not self._skip(")"):
                raise self._fault("a group is not closed")
            return f"({text})"
        if self._skip("."):
            return "/(?s:.)/"
        if name := self._take(_NAME):
            self._references.setdefault(name[0], start)
            return f"<{name[0]}>"
        if self._at < len(self._source) and self._source[self._at] in '"[':
            raise self._fault("a text or a class of characters is not closed")
        return None

    def _repeat(self) -> str | None:
        for sign in "*+?":
            if self._skip(sign):
                return sign
        start = self._at
        count = self._take(_COUNT)
        if count is None:
            if self._skip("{"):
                raise _fault(self._source, start, "a repetition is written {N}, {N,} or {N,M}")
            return None
        low, comma, high = int(count[1]), count[2], count[3]
        if comma is None:
            return f"{{{low},{low}}}"
        if high is not None and int(high) < low:
            raise _fault(self._source, start, "a repetition must not end below its start")
        return f"{{{low},{high or ''}}}"

    def _characters(self, text: str, at: int) -> list[tuple[str, bool]]:
        """The characters of a text or class, and whether each was escaped; `at`: where they stand."""
        found, i = [], 0
        while i < len(text):
            match = _CHARACTER.match(text, i)
            if match is None:
                raise _fault(self._source, at + i, f"unknown escape {text[i : i + 2]!r}")
            hexadecimal = match["x"] or match["u"] or match["U"]
            if hexadecimal is not None:
                code = int(hexadecimal, 16)
                if code > 0x10FFFF or 0xD800 <= code < 0xE000:
                    raise _fault(self._source, at + i, f"{match[0]} is no character")
                found.append((chr(code), True))
            elif match["escaped"]:
                found.append(({"n": "\n", "r": "\r", "t": "\t"}.get(match["escaped"], match["escaped"]), True))
            else:
                found.append((match["c"], False))
            i = match.end()
        return found

    def _class(self, text: str, at: int) -> str:
        characters = self._characters(text, at)
        sign = "^" if characters[:1] == [("^", False)] else ""
        characters = characters[len(sign) :]
        if not characters:
            raise _fault(self._source, at, "a class of characters is empty")
        parts, i = [], 0
        while i < len(characters):
            first, i = characters[i][0], i + 1
            if characters[i : i + 1] == [("-", False)] and i + 1 < len(characters):
                last, i = characters[i + 1][0], i + 2
                if last < first:
                    raise _fault(self._source, at, f"the range {first}-{last} is empty")
                parts.append(f"{_escaped(first)}-{_escaped(last)}")
            else:
                parts.append(_escaped(first))
        return f"[{sign}{''.join(parts)}]"


def _escaped(character: str) -> str:
    """A character in a regular expression of Lark."""
    return character if character.isascii() and character.isalnum() else f"\\x{{{ord(character):x}}}"
