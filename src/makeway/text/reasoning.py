"""The `<think>...</think>` before an answer, told apart from the answer while the text appears.

Owns where reasoning ends. Never looks for it anywhere but at the start. Hazard: whether the prompt's template has
opened it already decides everything; ask `opens_reasoning`.
"""

from dataclasses import dataclass

OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Split:
    """Text that became certain: reasoning comes before content."""

    reasoning: str = ""
    content: str = ""


def opens_reasoning(prompt: str) -> bool:
    """Whether a rendered prompt ends inside `<think>`, so that the answer starts with reasoning."""
    return prompt.rstrip().endswith(OPEN)


class ReasoningSplitter:
    """`push` an answer's text as it appears, `flush` at its end. However the text is cut, the parts join to the same.

    White space next to the tags belongs to neither part, as templates write it themselves. A second `<think>` and a
    `</think>` that closes nothing are content.
    """

    def __init__(self, *, opened: bool) -> None:
        """`opened`: the prompt ends inside `<think>`; else the answer may open it itself."""
        self._state = "inside" if opened else "before"
        self._held = ""
        self._at_edge = True  # white space that comes now follows a tag (or starts the answer)

    def push(self, text: str) -> Split:
        """What is certain now; a possible tag and white space that may stand before one are held back."""
        text, self._held = self._held + text, ""
        reasoning = ""
        if self._state == "before":
            start = text.lstrip()
            if start.startswith(OPEN):
                self._state, text = "inside", start[len(OPEN) :]
            elif OPEN.startswith(start):
                self._held = text
                return Split()
            else:
                self._state, self._at_edge = "after", False
        if self._state == "inside":
            reasoning, text = self._inside(text)
        return Split(reasoning, self._trimmed(text) if self._state == "after" else "")

    def _inside(self, text: str) -> tuple[str, str]:
        """The reasoning that is certain, and the text after its end."""
        text = self._trimmed(text)
        end = text.find(CLOSE)
        if end >= 0:
            self._state, self._at_edge = "after", True
            return text[:end].rstrip(), text[end + len(CLOSE) :]
        n_begun = next((n for n in range(len(CLOSE) - 1, 0, -1) if text.endswith(CLOSE[:n])), 0)
        certain = text[: len(text) - n_begun].rstrip()
        self._held = text[len(certain) :]
        return certain, ""

    def _trimmed(self, text: str) -> str:
        """The text without white space that follows a tag."""
        if self._at_edge:
            text = text.lstrip()
            self._at_edge = not text
        return text

    def flush(self) -> Split:
        """What was held back: part of the reasoning when that never ended."""
        held, self._held = self._held, ""
        return Split(reasoning=held) if self._state == "inside" else Split(content=held)
