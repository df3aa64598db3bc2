"""The policy of decode, one step behind: what the step before the last one fetched is kept or dropped.

Owns the step that waits for its decision, which spare set is filled next, and the wanted bitmap. Never copies.
Hazard: two spare sets take turns, so a set is filled again only after the policy has decided about it: `decide` must
come between two steps.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makeway.experts.cache import ExpertCache
from makeway.experts.slots import NONE


@dataclass(frozen=True)
class _Late:
    spare_set: int
    fetched: NDArray[np.int32]
    routed: NDArray[np.int64]


class Follower:
    """`wanted` bool [layers, experts]: misses that should take a spare, new with each of `n_decided` decisions.
    `spare_set`: the set that the next step fills."""

    def __init__(self, cache: ExpertCache) -> None:
        self._cache = cache
        self._late: _Late | None = None
        self.spare_set = 0
        self.n_decided = 0
        self.wanted = self._wish()

    def decide(self) -> None:
        """Show the late step to the policy, publish what it keeps, and take the next wanted bitmap."""
        if self._late is None:
            return
        late, self._late = self._late, None
        self.n_decided += 1
        policy, table = self._cache.policy, self._cache.table
        policy.observe(late.routed)
        kept = policy.decide(late.fetched, table.is_published(), n_free=table.n_free())
        table.keep(late.spare_set, kept.layers, kept.spares, victims=kept.victims)
        self._cache.count_uploads(kept.layers)
        self._cache.counters.evictions += int((kept.victims != NONE).sum())
        self.wanted = self._wish()

    def end_step(self, fetched: NDArray[np.int32], routed: NDArray[np.int64]) -> None:
        """The step is complete; its decision waits. fetched [layers, spares]: the experts in the spare set, -1 none;
        routed [layers, any]: ids, -1 none."""
        self.show(self.turn(), fetched, routed)

    def turn(self) -> int:
        """The spare set of the step that is complete: the next one fills the other."""
        filled, self.spare_set = self.spare_set, 1 - self.spare_set
        return filled

    def show(self, spare_set: int, fetched: NDArray[np.int32], routed: NDArray[np.int64]) -> None:
        """The second half of `end_step`, for the step that filled `spare_set`, whenever there is time for it."""
        assert self._late is None, "decide comes between two steps"
        self._late = _Late(spare_set, fetched, routed)

    def _wish(self) -> NDArray[np.bool_]:
        table = self._cache.table
        return self._cache.policy.wanted(table.is_published(), n_free=table.n_free())
