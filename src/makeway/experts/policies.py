"""Cache policies: which experts stay in slots, from which experts were routed.

Owns counts and decisions in numpy arrays [layers, experts]; never sees tensors, bytes, slots or devices, and
keeps no Python object per expert. A policy is one `Ranking` class in `RANKINGS`; `Policy` adds what all share:
the admission gate, the cap of uploads, the wanted bitmap and the order of a restore.
Hazard: it runs beside every decode step, so each call must cost a fraction of a millisecond; and it must be
deterministic, or byte counts would differ run to run (tokens never depend on it).
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from makeway.errors import UserError

Ints = NDArray[np.int32]
Floats = NDArray[np.float32]
Scores = NDArray[np.floating]
Mask = NDArray[np.bool_]
NONE = -1


@dataclass(frozen=True)
class Decision:
    """Fetched experts to keep: parallel arrays. `spares`: column in `fetched`; `victims`: the published
    expert whose slot is given up, -1 for a free slot. At most `uploads_per_layer` per layer."""

    layers: Ints
    spares: Ints
    experts: Ints
    victims: Ints


class Ranking(Protocol):
    """What makes one policy differ from another: how it ranks the experts of a layer.

    `must_win`: a fetched expert is kept only when it scores higher than its victim.
    """

    must_win: bool

    def observe(self, used: Mask, step: int) -> None:
        """`used` [layers, experts]: routed in step `step`."""
        ...

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """`counts` [layers, experts]: tail-weighted uses of a prompt that ran before step `step + 1`."""
        ...

    def scores(self) -> Scores:
        """[layers, experts], higher stays longer; compared within a layer. The caller changes nothing in it."""
        ...


class Lru:
    """Least recently used goes first. A prompt's experts count as used just before now, hotter later."""

    must_win = False

    def __init__(self, n_layers: int, n_experts: int, seed: int) -> None:
        self._last: NDArray[np.float64] = np.full((n_layers, n_experts), -1.0, dtype=np.float64)

    def observe(self, used: Mask, step: int) -> None:
        """Stamp with the step."""
        np.copyto(self._last, float(step), where=used)

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """Stamps between step - 1 and step, in order of heat."""
        heat = counts.astype(np.float64) / (counts.max(initial=0.0) + 1e-6)
        np.maximum(self._last, np.where(counts > 0, step - 1 + 0.999 * heat, -1.0), out=self._last)

    def scores(self) -> Scores:
        """The stamps."""
        return self._last


class LfuDecay:
    """Least frequently used goes first; a use counts half after `HALF_LIFE` steps."""

    must_win = True
    HALF_LIFE = 128

    def __init__(self, n_layers: int, n_experts: int, seed: int) -> None:
        self._uses: Floats = np.zeros((n_layers, n_experts), dtype=np.float32)
        self._unit = np.float32(1.0)  # weight of a use now: grows instead of decaying every count
        self._growth = np.float32(2.0 ** (1.0 / self.HALF_LIFE))

    def observe(self, used: Mask, step: int) -> None:
        """Add one use of today's weight."""
        self._unit *= self._growth
        if self._unit > 1e12:
            self._uses /= self._unit
            self._unit = np.float32(1.0)
        self._uses += used * self._unit

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """A prompt counts like `HALF_LIFE` / 4 steps of its hottest expert, spread by heat."""
        top = counts.max(axis=1, keepdims=True)
        self._uses += counts / np.maximum(top, np.float32(1e-6)) * (self._unit * np.float32(self.HALF_LIFE / 4))

    def scores(self) -> Scores:
        """Decayed uses, in units that grow."""
        return self._uses

    def decayed(self) -> Floats:
        """Decayed uses, in uses of now."""
        return self._uses / self._unit


class Lfru:
    """Least frequent among those not used recently: experts of the last `RECENT` steps are protected."""

    must_win = True
    RECENT = 8

    def __init__(self, n_layers: int, n_experts: int, seed: int) -> None:
        self._uses = LfuDecay(n_layers, n_experts, seed)
        self._last: Ints = np.full((n_layers, n_experts), -(10**6), dtype=np.int32)
        self._step = 0

    def observe(self, used: Mask, step: int) -> None:
        """Count and stamp."""
        self._step = step
        self._uses.observe(used, step)
        np.copyto(self._last, np.int32(step), where=used)

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """Counts only; a prompt protects nothing."""
        self._uses.observe_prompt(counts, step)

    def scores(self) -> Scores:
        """Decayed uses (at most 9000, so that f32 still tells them apart), lifted by 10000 when recent."""
        recent = self._last > self._step - self.RECENT
        return np.minimum(self._uses.decayed(), np.float32(9e3)) + recent * np.float32(1e4)


class Static:
    """A fixed order from a profile (uses counted in a trace); state never changes."""

    must_win = True

    def __init__(self, n_layers: int, n_experts: int, seed: int) -> None:
        self._profile: Floats = np.zeros((n_layers, n_experts), dtype=np.float32)

    def load(self, profile: NDArray[np.generic]) -> None:
        """Take a profile [layers, experts]. Raises UserError on another shape."""
        if profile.shape != self._profile.shape:
            raise UserError(
                f"the profile is for {profile.shape} (layers, experts), this model has {self._profile.shape}; "
                "record a trace of this model"
            )
        self._profile = profile.astype(np.float32)

    def observe(self, used: Mask, step: int) -> None:
        """Nothing to learn."""

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """Nothing to learn."""

    def scores(self) -> Scores:
        """The profile."""
        return self._profile


class Random:
    """Any published expert may go, drawn with a seed: the floor that other policies must beat."""

    must_win = False

    def __init__(self, n_layers: int, n_experts: int, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._shape = (n_layers, n_experts)

    def observe(self, used: Mask, step: int) -> None:
        """Nothing to learn."""

    def observe_prompt(self, counts: Floats, step: int) -> None:
        """Nothing to learn."""

    def scores(self) -> Scores:
        """New random numbers at each call."""
        return self._random.random(self._shape, dtype=np.float32)


RANKINGS: dict[str, Callable[[int, int, int], Ranking]] = {
    "lru": Lru,
    "lfu-decay": LfuDecay,
    "lfru": Lfru,
    "static": Static,
    "random": Random,
}
"""Every policy by name; the one place to register a new one."""


@dataclass(frozen=True)
class Gate:
    """Admission: `n_uses` steps that routed the expert among the last `window` (1 in 1 admits all)."""

    n_uses: int = 3
    window: int = 16

    def __post_init__(self) -> None:
        """Refuse a gate that nothing passes. Raises UserError."""
        if not 1 <= self.n_uses <= self.window <= 255:
            raise UserError(f"gate of {self.n_uses} uses in {self.window} steps: need 1 <= uses <= window <= 255")


class Policy:
    """A ranking with gate and cap; call order per step: `observe`, then `decide`, then `wanted`.

    Deterministic for equal calls. All arrays are indexed by MoE layer in cache order.
    """

    def __init__(
        self,
        name: str,
        n_layers: int,
        *,
        n_experts: int,
        uploads_per_layer: int = 2,
        gate: Gate | None = None,
        seed: int = 0,
        profile: NDArray[np.generic] | None = None,
    ) -> None:
        """Raises UserError for an unknown name, or a profile missing, superfluous or of another shape."""
        if name not in RANKINGS:
            raise UserError(f"policy {name!r} is unknown; choose from {', '.join(RANKINGS)}")
        self.name = name
        self.n_layers = n_layers
        self.n_experts = n_experts
        self.uploads_per_layer = uploads_per_layer
        self.gate = gate or Gate()
        self.ranking = RANKINGS[name](n_layers, n_experts, seed)
        if isinstance(self.ranking, Static):
            if profile is None:
                raise UserError("policy 'static' needs a profile: counts [layers, experts] from a routing trace")
            self.ranking.load(profile)
        elif profile is not None:
            raise UserError(f"policy {name!r} takes no profile")
        self.step = 0
        self._cached_scores: Scores | None = None
        self._window: Mask = np.zeros((self.gate.window, n_layers, n_experts), dtype=np.bool_)
        self._uses: NDArray[np.uint8] = np.zeros((n_layers, n_experts), dtype=np.uint8)
        self._base: NDArray[np.int64] = np.arange(n_layers, dtype=np.int64)[:, None] * n_experts

    def observe(self, routed: NDArray[np.integer]) -> None:
        """One step's routing of all layers: ids [layers, rows, k], -1 where a row is padding."""
        self.step += 1
        used = self._window[self.step % self.gate.window]
        np.subtract(self._uses, used, out=self._uses, casting="unsafe")
        used[...] = False
        flat = (routed.reshape(self.n_layers, -1) + self._base).reshape(-1)
        negative = routed.reshape(-1) < 0
        if negative.any():
            flat = flat[~negative]
        used.reshape(-1)[flat] = True
        np.add(self._uses, used, out=self._uses, casting="unsafe")
        self.ranking.observe(used, self.step)
        self._cached_scores = None

    def observe_prompt(self, counts: NDArray[np.floating]) -> None:
        """A whole prompt's routing: tail-weighted counts [layers, experts], see `PromptCounts`."""
        self.ranking.observe_prompt(counts.astype(np.float32), self.step)
        self._cached_scores = None

    def _scores(self) -> Scores:
        """The ranking's scores, asked for once between two observations."""
        if self._cached_scores is None:
            self._cached_scores = self.ranking.scores()
        return self._cached_scores

    def decide(self, fetched: NDArray[np.integer], published: Mask, *, n_free: NDArray[np.integer]) -> Decision:
        """Which fetched experts to keep, and whose slots they take.

        fetched [layers, spares]: experts in the spare set this step filled, -1 none; published
        [layers, experts]; n_free [layers]: slots that are neither published nor spare. An expert is kept
        when it is not published, passes the gate, a slot is free or a victim found, and, if the ranking says
        so, scores higher than the victim. Fetched experts are tried hottest first.
        """
        n_spares = fetched.shape[1]
        rows = np.arange(self.n_layers)
        valid = fetched >= 0
        safe = np.where(valid, fetched, 0)
        at = rows[:, None]
        valid &= ~published[at, safe] & (self._uses[at, safe] >= self.gate.n_uses)
        empty = np.empty(0, dtype=np.int32)
        if not valid.any() or self.uploads_per_layer == 0:
            return Decision(empty, empty, empty, empty)
        scores = self._scores()
        own = np.where(valid, scores[at, safe], -np.inf)
        order = np.argsort(-own, axis=1, kind="stable")
        stays = np.where(published, scores, np.inf)
        free = n_free.astype(np.int64)
        parts: list[tuple[NDArray[np.generic], ...]] = []
        for turn in range(min(n_spares, self.uploads_per_layer)):
            column = order[:, turn]
            expert = safe[rows, column]
            victim = stays.argmin(axis=1)
            floor = stays[rows, victim]
            takes_free = free > 0
            beats = own[rows, column] > floor if self.ranking.must_win else np.isfinite(floor)
            keep = valid[rows, column] & (takes_free | beats)
            chosen = np.flatnonzero(keep)
            out = np.where(takes_free, NONE, victim)[chosen]
            parts.append((chosen, column[chosen], expert[chosen], out))
            taken = chosen[out != NONE]
            stays[taken, victim[taken]] = np.inf
            free[chosen[out == NONE]] -= 1
        columns = [np.concatenate(column).astype(np.int32) for column in zip(*parts, strict=True)]
        return Decision(columns[0], columns[1], columns[2], columns[3])

    def wanted(self, published: Mask, *, n_free: NDArray[np.integer]) -> Mask:
        """[layers, experts]: misses that should take a spare, since `decide` would keep them after one more use.

        They would pass the gate, and a slot of their layer is free or they outscore its coldest expert.
        """
        wanted = ~published & (self._uses >= self.gate.n_uses - 1)
        if self.ranking.must_win:
            scores = self._scores()
            floor = np.where(published, scores, np.inf).min(axis=1)
            floor[n_free > 0] = -np.inf
            wanted &= scores >= floor[:, None]
        return wanted

    def heat(self) -> Scores:
        """[layers, experts]: the ranking's scores, e.g. to choose what stays when slots are lent."""
        return self._scores()

    def restore_order(self, prompt_counts: NDArray[np.floating] | None = None) -> Ints:
        """[n, 2] (layer, expert), hottest first: what to put back after a prompt, all keys once.

        Prompt counts (tail-weighted) lead, the ranking's own order follows; `static` keeps its profile's.
        Layers take turns (the hottest of each, then the second of each, ...), since every layer has the
        same number of slots and a step needs all of them.
        """
        scores = self._scores()
        keys = [scores] if prompt_counts is None else [scores, prompt_counts.astype(np.float32)]
        if isinstance(self.ranking, Static):
            keys.reverse()
        order = np.empty((self.n_layers, self.n_experts), dtype=np.int32)
        for layer in range(self.n_layers):
            order[layer] = np.lexsort([-key[layer] for key in keys])
        layers = np.tile(np.arange(self.n_layers, dtype=np.int32), self.n_experts)
        return np.stack([layers, order.T.reshape(-1)], axis=1)


class PromptCounts:
    """Tail-weighted uses of a prompt: a token counts half for every `half_life_tokens` before the last one.

    The sweep adds each layer's routing, in any number of parts.
    """

    def __init__(self, n_layers: int, n_experts: int, *, n_tokens: int, half_life_tokens: int = 256) -> None:
        """For a prompt of `n_tokens`."""
        self.counts: Floats = np.zeros((n_layers, n_experts), dtype=np.float32)
        self._n_tokens = n_tokens
        self._half_life = half_life_tokens

    def add(self, layer: int, ids: NDArray[np.integer], *, first_token: int = 0) -> None:
        """Routing [n, k] of tokens `first_token` .. of one layer; -1 counts nothing."""
        age = self._n_tokens - 1 - np.arange(first_token, first_token + ids.shape[0])
        weights = np.repeat(np.exp2(-age / self._half_life), ids.shape[1])
        flat = ids.reshape(-1)
        known = flat >= 0
        self.counts[layer] += np.bincount(flat[known], weights[known], self.counts.shape[1]).astype(np.float32)
