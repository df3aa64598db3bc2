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
        """The text that this token completes; the (at most three) bytes of an incomplete character are held back.

        Raises UserError for an id out of range.
        """
        if self._skip_special and self._tokenizer.is_special(token):
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        """What is held back; an incomplete character becomes U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopMatcher:
    """Finds the stop string that is complete first; of several complete at the same character, the longest.

    So of two that start together the shorter one hits, and a stop takes effect at once, without waiting for a longer
    one. `push` returns text that can no longer be part of a stop string. After a hit, `stopped` is the stop string,
    the text before it has been returned, and whatever comes later is dropped. The time for a character depends
    neither on how many stops there are nor on how long they are (Aho-Corasick).
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Raises UserError for an empty stop string and for anything that is not a list of texts."""
        if isinstance(stops, str) or not all(isinstance(stop, str) for stop in stops):
            raise UserError("stop must be a list of texts")
        if not all(stops):
            raise UserError("a stop string is empty; leave it out")
        self._automaton = _Automaton(stops)
        self._state = 0
        self._held = ""
        self.stopped: str | None = None

    def push(self, text: str) -> str:
        """The text that is certain now; "" after a hit."""
        if self.stopped is not None:
            return ""
        machine, state = self._automaton, self._state
        text = self._held + text
        for i in range(len(self._held), len(text)):
            state = machine.step(state, text[i])
            if (stop := machine.hits[state]) is not None:
                self.stopped, self._held = stop, ""
                return text[: i + 1 - len(stop)]
        self._state = state
        n_certain = len(text) - machine.depths[state]
        self._held = text[n_certain:]
        return text[:n_certain]

    def flush(self) -> str:
        """The text held back in case a stop string would follow."""
        held, self._held, self._state = self._held, "", 0
        return held


class _Automaton:
    """A state is the longest end of the text so far that a stop string starts with; `depths` is its length."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._next: list[dict[str, int]] = [{}]
        self._shorter = [0]  # the state of the next shorter such end
        self.depths = [0]
        self.hits: list[str | None] = [None]  # the longest stop string that is complete in this state
        for stop in stops:
            self._add(stop)
        states = list(self._next[0].values())
        for state in states:  # grows: level by level, so that shorter ends are ready
            for character, child in self._next[state].items():
                self._shorter[child] = self.step(self._shorter[state], character)
                self.hits[child] = self.hits[child] or self.hits[self._shorter[child]]
                states.append(child)

    def _add(self, stop: str) -> None:
        state = 0
        for depth, character in enumerate(stop, start=1):
            if character not in self._next[state]:
                self._next[state][character] = len(self._next)
                self._next.append({})
                self._shorter.append(0)
                self.depths.append(depth)
                self.hits.append(None)
            state = self._next[state][character]
        self.hits[state] = stop

    def step(self, state: int, character: str) -> int:
        """The state after one more character."""
        while character not in self._next[state]:
            if state == 0:
                return 0
            state = self._shorter[state]
        return self._next[state][character]
