"""Log-probabilities in OpenAI's two forms.

Owns their layout. Never computes them. Hazard: a token may be half a character, so its bytes go with its text.
"""

from typing import Any

from makeway.config import SamplingParams
from makeway.engine import Event
from makeway.text import Tokenizer


def ends_of(sampling: SamplingParams, tokenizer: Tokenizer) -> frozenset[int]:
    """Tokens that end an answer and are no part of it."""
    return frozenset() if sampling.ignore_eos else tokenizer.eos_ids


def chat_entry(event: Event, tokenizer: Tokenizer, ends: frozenset[int]) -> dict[str, Any] | None:
    """One token of a chat answer; None without log-probabilities, and for the token that ends an answer."""
    if event.logprobs is None or event.token is None or event.token in ends:
        return None
    best = [_token(token, value, tokenizer) for token, value in event.logprobs.best]
    return {**_token(event.token, event.logprobs.chosen, tokenizer), "top_logprobs": best}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    return {"token": data.decode("utf-8", errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


def _finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


class CompletionLogprobs:
    """The `logprobs` of one choice of /v1/completions, token by token."""

    def __init__(self, tokenizer: Tokenizer, ends: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._ends = ends
        self._offset = 0
        self._entries: list[tuple[str, float, dict[str, float], int]] = []

    def push(self, event: Event) -> None:
        if event.logprobs is None or event.token is None or event.token in self._ends:
            return
        text = self._tokenizer.decode([event.token])
        best: dict[str, float] = {}
        for token, value in event.logprobs.best:
            best.setdefault(self._tokenizer.decode([token]), _finite(value))
        self._entries.append((text, _finite(event.logprobs.chosen), best, self._offset))
        self._offset += len(text)

    def take(self) -> dict[str, Any]:
        """What was pushed since the last time."""
        entries, self._entries = self._entries, []
        return {
            "tokens": [e[0] for e in entries],
            "token_logprobs": [e[1] for e in entries],
            "top_logprobs": [e[2] for e in entries],
            "text_offset": [e[3] for e in entries],
        }
