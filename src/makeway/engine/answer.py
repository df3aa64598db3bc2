"""From chosen tokens to the text a caller sees: detokenising, stop strings, the end of an answer.

Owns the text state of one request. Never samples. Hazard: text is emitted only when no later token can take it back.
"""

from makeway.engine.request import Event, FinishReason, Request, TokenLogprobs
from makeway.text import Detokenizer, StopMatcher, Tokenizer


class Answer:
    """Turns each token of a request into events."""

    def __init__(self, request: Request, tokenizer: Tokenizer) -> None:
        self._request = request
        self._eos = frozenset() if request.sampling.ignore_eos else tokenizer.eos_ids
        self._detokenizer = Detokenizer(tokenizer)
        self._stops = StopMatcher(request.sampling.stop)

    def push(self, token: int, logprobs: TokenLogprobs | None) -> list[Event]:
        """Events of the token just appended to the request; the last one may be its finish."""
        request = self._request
        ended = token in self._eos
        text = "" if ended else self._stops.push(self._detokenizer.push(token))
        events = [Event(request.id, "token", text=text, token=token, logprobs=logprobs)]
        if ended or self._stops.stopped is not None:
            events.append(self.finish("stop"))
        elif request.n_answer >= request.max_tokens:
            events.append(self.finish("length"))
        return events

    def finish(self, reason: FinishReason) -> Event:
        """The last event: held-back text, the reason and the timings."""
        request = self._request
        request.finished = True
        text = ""
        if self._stops.stopped is None:
            text = self._stops.push(self._detokenizer.flush()) + self._stops.flush()
        if self._stops.stopped is not None:
            reason = "stop"
        return Event(
            request.id,
            "finish",
            text=text,
            reason=reason,
            stop_string=self._stops.stopped,
            timings=request.timings(),
            n_done=request.n_read,
            n_prompt=request.n_prompt,
        )
