"""How many drafts a step checks: fixed, or chosen from what was accepted lately and what a wider step costs.

Owns the decision and the measured costs. Never touches tensors, and never the tokens: a depth changes speed alone.
Hazard: `auto` follows the clock, so counts of bytes and steps differ from run to run; fix the depth to compare them.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Literal

from makeway.config import EngineConfig
from makeway.errors import UserError
from makeway.memory.sizes import MAX_ROWS

Source = Literal["mtp", "lookup"]

MTP_DEPTH = 3
"""Deepest `auto` with the MTP block alone: it learned to see one token ahead, and its own guesses blur after three."""
LOOKUP_DEPTH = MAX_ROWS - 1
"""Deepest `auto` where text is copied, which goes on for long once it has begun."""
HOPE: dict[Source, float] = {"mtp": 0.7, "lookup": 0.6}
HOPES = 4
"""Acceptance taken for granted before anything was seen; it counts as so many drafts."""
MEMORY = 1 / 12
"""Weight of the newest draft in an acceptance once there are more than twelve."""
PROBE_STEPS = (4, 64)
"""Steps without drafts before one is tried again: at first, and at most after doubling with each failure."""
PROFIT = 1.03
"""A depth is taken when it promises this much more than none: a tie would only add noise."""


@dataclass(frozen=True)
class Drafting:
    """What an engine drafts with. `depth`: drafts of one sequence and step at most; `is_auto`: fewer where it pays."""

    sources: tuple[Source, ...]
    depth: int
    is_auto: bool

    @classmethod
    def of(cls, config: EngineConfig, *, has_mtp: bool) -> "Drafting":
        """From the configuration and the file. Raises UserError when the file lacks what the configuration asks for."""
        name = config.drafter
        if name == "auto":
            name = "mtp" if has_mtp else "none"
        sources: tuple[Source, ...] = tuple(s for s in ("lookup", "mtp") if s in name.split("+"))
        if "mtp" in sources and not has_mtp:
            raise UserError(
                f"--drafter {name}: the model file has no MTP block; use --drafter lookup or none, or a file whose "
                "converter kept the block"
            )
        if config.draft_depth == "auto":
            deepest = LOOKUP_DEPTH if "lookup" in sources else MTP_DEPTH
            return cls(sources, deepest if sources else 0, is_auto=True)
        if not sources and config.draft_depth:
            if config.drafter == "auto":
                raise UserError(
                    f"--draft-depth {config.draft_depth}: the model file has no MTP block to draft with; "
                    "use --drafter lookup, or leave the flag out"
                )
            raise UserError(f"--draft-depth {config.draft_depth} needs a drafter; leave it out with --drafter none")
        return cls(sources if config.draft_depth else (), config.draft_depth, is_auto=False)

    @property
    def name(self) -> str:
        """As `--drafter` writes it."""
        return "+".join(sorted(self.sources, reverse=True)) or "none"


@dataclass
class Acceptance:
    """How often drafts of one source were right lately, by place: each given that those before it were."""

    hope: tuple[float, ...]
    n_seen: list[int] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.n_seen = [0] * len(self.hope)
        self.rates = list(self.hope)

    def observe(self, n_drafted: int, n_accepted: int) -> None:
        """A step's drafts, of which the first `n_accepted` were right and the next one, if any, was wrong."""
        for i in range(min(n_drafted, n_accepted + 1, len(self.rates))):
            self.n_seen[i] += 1
            weight = max(MEMORY, 1 / (self.n_seen[i] + HOPES))
            self.rates[i] += weight * (float(i < n_accepted) - self.rates[i])

    def survivals(self, depth: int) -> list[float]:
        """For drafts 1 .. depth: how likely all up to it are right."""
        out, product = [], 1.0
        for rate in self.rates[:depth]:
            product *= rate
            out.append(product)
        return out


class StepCosts:
    """What steps cost by their rows, and a pass of the drafter: medians of the last few.

    Kept as multiples of `unit`, the pace of the last steps whatever their rows, so that sizes measured at different
    times can be compared although contexts grow and machines are shared. What was not measured for `STALE` steps is
    forgotten, so that a size that was slow once is tried again.
    """

    EXTRA_ROW = 0.15
    EXTRA_PASS = 0.1
    """A row more, and a pass of the drafter, cost so much of a step until they are measured."""
    LEAST_ROW = 0.02
    """A row more costs at least so much of a step, whatever a noisy clock says."""
    STALE = 128

    def __init__(self) -> None:
        self._n_steps = 0
        self._pace: deque[float] = deque(maxlen=5)
        self._ratios: dict[int, deque[float]] = {}
        self._measured_at: dict[int, int] = {}
        self._passes: deque[float] = deque(maxlen=9)

    def observe(self, rows: int, *, step_s: float, n_passes: int, draft_s: float) -> None:
        """One step: `step_s` without the `draft_s` that `n_passes` of the drafter took."""
        self._n_steps += 1
        if rows in self._ratios or not self._pace:  # what a new size takes says nothing about the pace
            self._pace.append(step_s / self.ratio(rows))
        unit = median(self._pace)
        self._ratios.setdefault(rows, deque(maxlen=9)).append(step_s / unit)
        self._measured_at[rows] = self._n_steps
        if n_passes:
            self._passes.append(draft_s / n_passes / unit)
        for stale in [r for r, at in self._measured_at.items() if self._n_steps - at > self.STALE]:
            del self._ratios[stale], self._measured_at[stale]

    def knows(self, rows: int) -> bool:
        """Whether a step of so many rows was measured, or nothing at all yet."""
        return rows in self._ratios or self._n_steps < 3

    @property
    def per_pass(self) -> float:
        """One pass of the drafter, in units."""
        return median(self._passes) if self._passes else self.EXTRA_PASS * self.ratio(1)

    def ratio(self, rows: int, *, least: int | None = None) -> float:
        """A step of so many rows, in units; at least `LEAST_ROW` a row more than one of `least` rows."""
        ratio = self._ratio(rows)
        return ratio if least is None else max(ratio, self._ratio(least) * (1.0 + self.LEAST_ROW * (rows - least)))

    def _ratio(self, rows: int) -> float:
        """Between two measured sizes on a line; beyond them by `EXTRA_ROW`."""
        if rows in self._ratios:
            return median(self._ratios[rows])
        below = max((r for r in self._ratios if r < rows), default=None)
        above = min((r for r in self._ratios if r > rows), default=None)
        if below is not None and above is not None:
            low, high = median(self._ratios[below]), median(self._ratios[above])
            return low + (rows - below) / (above - below) * (high - low)
        nearest = below if below is not None else above
        if nearest is None:
            return self._relative(rows)
        return median(self._ratios[nearest]) * self._relative(rows) / self._relative(nearest)

    def _relative(self, rows: int) -> float:
        return 1.0 + self.EXTRA_ROW * (rows - 1)


@dataclass
class Track:
    """What drafts were worth for one sequence, by source, and when to try again where they are not worth it."""

    acceptance: dict[Source, Acceptance]
    n_idle: int = 0
    patience: int = PROBE_STEPS[0]

    @property
    def is_due(self) -> bool:
        """One draft is tried although it is not expected to pay."""
        return self.n_idle >= self.patience

    def observe(self, source: Source | None, n_drafted: int, *, n_accepted: int, was_due: bool) -> None:
        """One step of the sequence."""
        if n_drafted == 0:
            self.n_idle += 1
            return
        assert source is not None
        self.acceptance[source].observe(n_drafted, n_accepted)
        if not was_due:
            self.n_idle, self.patience = 0, PROBE_STEPS[0]
        elif n_accepted == 0:  # else it stays due: a text that has become easy is found within a few steps
            self.n_idle, self.patience = 0, min(2 * self.patience, PROBE_STEPS[1])


@dataclass(frozen=True)
class Wish:
    """One sequence's side of the choice: where its drafts come from now, and how many there can be at most."""

    source: Source
    most: int
    track: Track

    @property
    def chances(self) -> list[float]:
        return self.track.acceptance[self.source].survivals(self.most)


class DepthChooser:
    """Chooses the depths of a step for all its sequences together."""

    def __init__(self, drafting: Drafting, costs: StepCosts) -> None:
        self._drafting, self._costs = drafting, costs

    def choose(self, wishes: Sequence[Wish | None], *, n_rows: int) -> list[int]:
        """Drafts for each sequence (None: it has no source) in a step of at most `n_rows` rows, one of which each
        sequence has for itself.

        Fixed: as deep as wished; the deepest shrink first. Auto: drafts are added in order of their chance, up to the
        number that promises most tokens a second.
        """
        depths = [0] * len(wishes)
        free = max(0, n_rows - len(wishes))
        if not self._drafting.is_auto:
            for place in range(max((w.most for w in wishes if w is not None), default=0)):
                for i, wish in enumerate(wishes):
                    if wish is not None and place < wish.most and free:
                        depths[i], free = place + 1, free - 1
            return depths
        if self._costs.knows(len(wishes)):  # else a step without drafts is due, to know what they are compared with
            depths = self._best(wishes, free)
        free -= sum(depths)
        for i, wish in enumerate(wishes):
            if wish is not None and wish.most and depths[i] == 0 and wish.track.is_due and free > 0:
                depths[i], free = 1, free - 1
        return depths

    def _best(self, wishes: Sequence[Wish | None], free: int) -> list[int]:
        n, costs = len(wishes), self._costs
        drafts = [
            (-chance, place + 1, i, wish.source)
            for i, wish in enumerate(wishes)
            if wish is not None
            for place, chance in enumerate(wish.chances)
        ]
        drafts.sort()
        best: list[tuple[float, int, int, Source]] = []
        best_rate = n / costs.ratio(n) * PROFIT
        # a pass serves all sequences, so a draft of a lesser chance may be worth more than one that takes another pass
        for passes in sorted({place if source == "mtp" else 0 for _, place, _, source in drafts}):
            within = [draft for draft in drafts if draft[3] != "mtp" or draft[1] <= passes][:free]
            tokens = float(n)
            for m, draft in enumerate(within, start=1):
                tokens -= draft[0]
                rate = tokens / (costs.ratio(n + m, least=n) + passes * costs.per_pass)
                if rate > best_rate:
                    best, best_rate = within[:m], rate
        depths = [0] * n
        for _, place, i, _ in best:
            depths[i] = max(depths[i], place)
        return depths
