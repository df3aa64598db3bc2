"""The phases of an engine and the only way from one to another.

Owns the phase, and for each phase how often it was entered, how long it lasted and what crossed the link in it. Never
moves bytes: who changes the layout of memory says so here first.
Hazard: `failed` is left by `rebuild` alone, so no code may catch a fault and go on in the phase it was in.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from makeway.errors import EngineFailed


class Phase(StrEnum):
    """What the swing region is used for."""

    IDLE = "idle"
    PREFILL = "prefill"
    RESTORING = "restoring"
    DECODE = "decode"
    FAILED = "failed"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.IDLE: frozenset({Phase.PREFILL, Phase.FAILED}),
    Phase.PREFILL: frozenset({Phase.RESTORING, Phase.FAILED}),
    Phase.RESTORING: frozenset({Phase.PREFILL, Phase.DECODE, Phase.IDLE, Phase.FAILED}),
    Phase.DECODE: frozenset({Phase.PREFILL, Phase.IDLE, Phase.FAILED}),
    Phase.FAILED: frozenset({Phase.IDLE}),
}
"""Every change of phase there is."""

OWNERS: dict[Phase, str] = {
    Phase.IDLE: "slots (published, or refilling), transient region, decode workspace",
    Phase.PREFILL: "kept slots, staging ring, prefill workspace, hidden states of the sweep",
    Phase.RESTORING: "slots (the lent ones empty, first batch on its way), transient region, decode workspace",
    Phase.DECODE: "slots (published, or refilling), transient region, decode workspace",
    Phase.FAILED: "nobody: no slot is published until `rebuild`",
}
"""Who the swing region belongs to, by phase; weights, KV cache and recurrent state keep their place in all of them."""


@dataclass
class PhaseTotals:
    """Totals of one phase. `link_bytes`: everything that crossed the link while it lasted."""

    n_entered: int = 0
    seconds: float = 0.0
    link_bytes: int = 0


class Phases:
    """The phase, its history in numbers, and `to`, the one method that changes it."""

    def __init__(self, link_bytes: Callable[[], int]) -> None:
        """`link_bytes`: what crossed the link so far."""
        self.now = Phase.IDLE
        self.totals = {phase: PhaseTotals() for phase in Phase}
        self.totals[Phase.IDLE].n_entered = 1
        self._link_bytes = link_bytes
        self._since_s = time.perf_counter()
        self._since_bytes = link_bytes()

    def to(self, phase: Phase) -> None:
        """Change the phase. Raises EngineFailed when there is no such transition."""
        if phase not in TRANSITIONS[self.now]:
            raise EngineFailed(f"there is no way from phase {self.now} to {phase}")
        self.count()
        self.now = phase
        self.totals[phase].n_entered += 1

    def count(self) -> None:
        """Bring the totals of the present phase up to now."""
        now_s, now_bytes = time.perf_counter(), self._link_bytes()
        totals = self.totals[self.now]
        totals.seconds += now_s - self._since_s
        totals.link_bytes += now_bytes - self._since_bytes
        self._since_s, self._since_bytes = now_s, now_bytes
