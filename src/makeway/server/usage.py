"""How many tokens a request used, and how fast, as clients of OpenAI's interface expect it.

Owns the sums over the answers of a request. Never measures. Hazard: a prompt counts once however many answers it has.
"""

from dataclasses import dataclass
from typing import Any

from makeway.engine import Timings


@dataclass
class Usage:
    """Filled from the timings of finished answers. Prompt tokens are known from the start."""

    n_prompt: int
    n_answer: int = 0
    n_reasoning: int = 0
    n_cached: int = 0
    n_accepted: int = 0
    n_rejected: int = 0
    timings: Timings | None = None

    def add(self, timings: Timings) -> None:
        """One more finished answer."""
        self.n_answer += timings.n_answer
        self.timings = timings

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
        t = self.timings
        if t is None:
            return None
        return {
            "prompt_n": t.n_prompt,
            "prompt_ms": round(1000 * t.prompt_s, 3),
            "prompt_per_second": round(t.prompt_tokens_per_s, 3),
            "predicted_n": t.n_answer,
            "predicted_ms": round(1000 * t.answer_s, 3),
            "predicted_per_second": round(t.answer_tokens_per_s, 3),
            "draft_n": t.drafts.n_drafted,
            "draft_n_accepted": t.drafts.n_accepted,
        }
