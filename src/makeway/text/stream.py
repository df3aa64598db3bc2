"""Text that appears token by token: never half a character, never part of a stop string.

Owns what is held back. Never changes text: the pieces add up to the whole. Hazard: call `flush` at the end.
"""

import codecs
from collections.abc import Sequence

from makeway.errors import UserError
from makeway.text.tokenizer import Tokenizer


class Detokenizer:
    """`push` each token, `flush` at the end; the pieces add up to `tokenizer.decode(ids, skip_special=...)`."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        """The text that this token completes; bytes of an incomplete character are held back."""
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is held back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the stop string that is complete first; of several complete at the same character, the longest.

    `push` returns text that can no longer be part of a stop string. After a hit, `stopped` is the stop string, the text
    before it has been returned, and whatever comes later is dropped.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise UserError("a stop string is empty; leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """Text that is certain now; raises nothing, also after a hit."""
        if self.stopped is not None:
            return ""
        out = []
        for character in text:
            certain, stop = self._push_one(character)
            out.append(certain)
            if stop is not None:
                self.stopped = stop
                break
        return "".join(out)

    def _push_one(self, character: str) -> tuple[str, str | None]:
        """One character at a time, so that where the text was cut into pieces cannot change what is found."""
        self._held += character
        hits = [s for s in self._stops if self._held.endswith(s)]
        if hits:
            stop = max(hits, key=len)
            before, self._held = self._held[: -len(stop)], ""
            return before, stop
        for start in range(len(self._held)):
            if any(s.startswith(self._held[start:]) for s in self._stops):
                certain, self._held = self._held[:start], self._held[start:]
                return certain, None
        certain, self._held = self._held, ""
        return certain, None

    def flush(self) -> str:
        """The text held back in case a stop string would follow."""
        held, self._held = self._held, ""
        return held
