"""A request and its life as plain data: no torch, no device.

Owns what the scheduler and the caller need to know of a request. Never holds tensors.
Hazard: `tokens` holds prompt and answer; `n_prompt` is where the answer starts.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal

from makeway.config import SamplingParams
from makeway.text.grammar import GrammarState

FinishReason = Literal["stop", "length", "cancelled"]


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probability of the chosen token and of the best ones, before temperature and filters."""

    chosen: float
    best: tuple[tuple[int, float], ...]


@dataclass
class DraftCounts:
    """What was drafted and accepted. `by_place` [drafted, accepted]: of first drafts, second ones, and so on; `depths`:
    steps by the number of drafts chosen for them. A step of one answer counts as one."""

    n_steps: int = 0
    n_drafted: int = 0
    n_accepted: int = 0
    by_place: list[list[int]] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, n_drafted: int, n_accepted: int) -> None:
        """One step: its first `n_accepted` drafts were right."""
        self.n_steps += 1
        self.n_drafted += n_drafted
        self.n_accepted += n_accepted
        self.depths += [0] * (n_drafted + 1 - len(self.depths))
        self.depths[n_drafted] += 1
        self.by_place += [[0, 0] for _ in range(n_drafted - len(self.by_place))]
        for place in range(n_drafted):
            self.by_place[place][0] += 1
            self.by_place[place][1] += place < n_accepted

    @property
    def acceptance(self) -> float | None:
        """Accepted of all drafted; None when nothing was."""
        return self.n_accepted / self.n_drafted if self.n_drafted else None

    @property
    def tokens_per_step(self) -> float | None:
        """Mean accepted length: the tokens that a step brings, its own one and the drafts that were right."""
        return (self.n_steps + self.n_accepted) / self.n_steps if self.n_steps else None


@dataclass(frozen=True)
class Timings:
    """Counts and seconds of one request; `prompt_s` from the first prompt token computed to the first token out.

    `n_cached`: prompt tokens that an earlier request had read. `drafts`: of the answer so far.
    """

    n_prompt: int
    n_answer: int
    prompt_s: float
    answer_s: float
    n_cached: int = 0
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def prompt_tokens_per_s(self) -> float:
        return (self.n_prompt - self.n_cached) / self.prompt_s if self.prompt_s > 0 else 0.0

    @property
    def answer_tokens_per_s(self) -> float:
        """Rate of the tokens after the first, which belongs to the prompt's time."""
        return (self.n_answer - 1) / self.answer_s if self.answer_s > 0 and self.n_answer > 1 else 0.0


@dataclass(frozen=True)
class Event:
    """Something that happened to a request.

    kind "progress": `n_done` of `n_prompt` prompt tokens are read; `bytes_left` will cross the link until all waiting
    prompts are read (the plan's estimate), this one has `eta_s` to go at its pace so far (None at its start).
    kind "token": `token` was chosen and `text` became certain (possibly empty). kind "finish": `reason`, the last
    `text`, and `timings`. kind "error": the request broke off, or the engine failed (its phase says so); `text` says
    why and nothing follows.
    """

    request_id: int
    kind: Literal["progress", "token", "finish", "error"]
    text: str = ""
    token: int | None = None
    logprobs: TokenLogprobs | None = None
    reason: FinishReason | None = None
    stop_string: str | None = None
    timings: Timings | None = None
    n_done: int = 0
    n_prompt: int = 0
    bytes_left: int | None = None
    eta_s: float | None = None


def message_ends(tokens: Sequence[int], end_tokens: Collection[int]) -> tuple[int, ...]:
    """Tokens up to the end of the first message of a prompt (what other conversations begin with too) and of its last
    two (where this one goes on): behind an end token. States are large, so the ends between are left out."""
    ends = [i + 1 for i, token in enumerate(tokens) if token in end_tokens]
    return tuple(dict.fromkeys([*ends[:1], *ends[-2:]]))


@dataclass
class Request:
    """One prompt and its answer so far."""

    id: int
    tokens: list[int]
    n_prompt: int
    sampling: SamplingParams
    seed: int
    max_tokens: int
    grammar: GrammarState | None = None  # follows the answer token by token
    given: tuple[int, ...] = ()  # the answer's first tokens, whatever the model would choose
    n_read: int = 0  # tokens in memory; during an answer it follows the steps
    n_cached: int = 0  # of them, those that an earlier request had read
    message_ends: tuple[int, ...] = ()  # tokens of the prompt up to the first and the last messages' ends
    n_lost: int = 0  # times its memory was taken for others
    started_s: float = 0.0
    first_token_s: float = 0.0
    last_token_s: float = 0.0
    finished: bool = False
    counts: dict[int, int] = field(default_factory=dict)
    drafts: DraftCounts = field(default_factory=DraftCounts)

    @property
    def answer(self) -> list[int]:
        return self.tokens[self.n_prompt :]

    @property
    def n_answer(self) -> int:
        return len(self.tokens) - self.n_prompt

    @property
    def n_to_read(self) -> int:
        """Tokens that must have been read before the next one can be chosen by a step: the prompt, or, for a request
        that lost its memory in the middle of an answer, all but the last token, which is that step's input."""
        return max(self.n_prompt, len(self.tokens) - 1)

    @property
    def is_reading(self) -> bool:
        return self.n_read < self.n_to_read

    def timings(self) -> Timings:
        prompt_s = max(0.0, self.first_token_s - self.started_s)
        answer_s = max(0.0, self.last_token_s - self.first_token_s)
        return Timings(self.n_prompt, self.n_answer, prompt_s, answer_s, self.n_cached, self.drafts)
