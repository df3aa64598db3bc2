"""How many tokens a request used, and how fast, as clients of OpenAI's interface expect it.

Owns the sums over the answers of a request. Never measures. Hazard: a prompt counts once however many answers it has.
"""

from collections.abc import Sequence
from typing import Any

from makeway.engine import Timings


class Usage:
    """Filled from the timings of finished answers. The lengths of the prompts are known from the start."""

    def __init__(self, n_prompts: Sequence[int]) -> None:
        """`n_prompts`: the tokens of each prompt."""
        self.n_prompt = sum(n_prompts)
        self.n_answer = self.n_reasoning = self.n_accepted = self.n_rejected = 0
        self._cached: dict[int, int] = {}
        self._last: Timings | None = None

    def add(self, timings: Timings, prompt: int = 0) -> None:
        """One more finished answer, to the prompt of this number."""
        self.n_answer += timings.n_answer
        self.n_accepted += timings.drafts.n_accepted
        self.n_rejected += timings.drafts.n_drafted - timings.drafts.n_accepted
        # Later answers to a prompt find it read by the first one; what the request saved is what the first found.
        self._cached[prompt] = min(timings.n_cached, self._cached.get(prompt, timings.n_cached))
        self._last = timings

    @property
    def n_cached(self) -> int:
        """Prompt tokens that earlier requests had read."""
        return sum(self._cached.values())

    def openai(self) -> dict[str, Any]:
        return {
            "prompt_tokens": self.n_prompt,
            "completion_tokens": self.n_answer,
            "total_tokens": self.n_prompt + self.n_answer,
            "prompt_tokens_details": {"cached_tokens": self.n_cached},
            "completion_tokens_details": {
                "reasoning_tokens": self.n_reasoning,
                "accepted_prediction_tokens": self.n_accepted,
                "rejected_prediction_tokens": self.n_rejected,
            },
        }

    def anthropic(self) -> dict[str, Any]:
        return {
            "input_tokens": self.n_prompt - self.n_cached,
            "output_tokens": self.n_answer,
            "cache_read_input_tokens": self.n_cached,
            "cache_creation_input_tokens": 0,
        }

    def speed(self) -> dict[str, Any] | None:
        """Rates of the last answer, under llama-server's names."""
        t = self._last
        if t is None:
            return None
        return {
            "prompt_n": t.n_prompt - t.n_cached,
            "cache_n": t.n_cached,
            "prompt_ms": round(1000 * t.prompt_s, 3),
            "prompt_per_second": round(t.prompt_tokens_per_s, 3),
            "predicted_n": t.n_answer,
            "predicted_ms": round(1000 * t.answer_s, 3),
            "predicted_per_second": round(t.answer_tokens_per_s, 3),
            "draft_n": t.drafts.n_drafted,
            "draft_n_accepted": t.drafts.n_accepted,
        }
