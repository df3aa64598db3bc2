"""What the server needs of an engine, and what it tells about one to threads that may not touch it.

Owns no engine. Never calls one. Hazard: `Ready` may be used by any thread, so it holds only what never changes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from makeway.config import EngineConfig, SamplingParams
from makeway.engine import Event
from makeway.engine.phases import Phase
from makeway.models import Model
from makeway.text import Tokenizer
from makeway.text.grammar import CompiledGrammar

State = Literal["loading", "ok", "failed", "stopping"]
Progress = Callable[[int, int], None]


class ServedEngine(Protocol):
    """What the server needs of an engine. `step` tells a fault with "error" events and phase `failed`; `rebuild` is
    for after that."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def context(self) -> int: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def model(self) -> Model: ...
    @property
    def phase(self) -> Phase: ...
    @property
    def busy(self) -> bool: ...
    def encode(self, prompt: str | Sequence[int]) -> list[int]: ...
    def add(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        grammar: CompiledGrammar | None = None,
    ) -> int: ...
    def step(self) -> list[Event]: ...
    def cancel(self, request_id: int) -> None: ...
    def rebuild(self) -> None: ...
    def status(self) -> dict[str, Any]: ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class Ready:
    """What of a loaded engine any thread may use."""

    tokenizer: Tokenizer
    encode: Callable[[str | Sequence[int]], list[int]]
    context: int
    n_vocab: int


@dataclass(frozen=True)
class Health:
    """`since_s`: when the state began, on the monotonic clock. `loaded`: the share of the model's bytes read."""

    state: State
    reason: str = ""
    since_s: float = 0.0
    n_restarts: int = 0
    loaded: float = 0.0
