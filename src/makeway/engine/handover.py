"""The swing region and its hand-over between decode and prefill: release, run, restore, publish.

Owns the arena's layout, the expert cache and the two executors (one at a time). Never computes and never decides what
is lent (the plan does). Hazard: between `release` and the first published batch of `restore` no token may leave.
"""

import time
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makeway.device import Device
from makeway.engine.backend import Backend
from makeway.engine.phases import Phase, Phases
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.executors import StepExperts
from makeway.experts.policies import Policy
from makeway.experts.refill import Refill
from makeway.experts.store import ExpertStore
from makeway.experts.streamed import StreamedExperts
from makeway.memory.arena import Arena, View
from makeway.memory.plan import Lending, MemoryPlan, PrefillLayout

BATCH_BYTES = 128 << 20
"""Bytes of experts that are published together, for which the first token waits: 2.5 to 10 ms of a link."""
AHEAD_S = 0.03
"""Seconds for which the link has work while experts come back: copies are asked for between two decode steps, and a
step takes about so long. Not more, for the next prompt waits for what was asked for, and misses share the link."""


@dataclass(frozen=True)
class HandoverRecord:
    """What one hand-over did. Bytes over the link: `copied` by the sweeps, `restored` into slots (planned and moved);
    seconds: `release_s` to make way, `restore_s` until the first batch was back, `refill_s` until the last one was."""

    n_tokens: int
    n_lent: int
    copied_bytes: int
    restore_planned_bytes: int
    restored_bytes: int
    release_s: float
    sweep_s: float
    restore_s: float
    refill_s: float


class Swing:
    """`decode` runs steps from slots; `release` makes way for a prompt, `restore` brings decode back.

    Every method raises EngineFailed when an invariant breaks, and lets the device's faults through: the caller then
    goes to phase `failed` and calls `abandon`.
    """

    def __init__(
        self,
        plan: MemoryPlan,
        store: ExpertStore,
        backend: Backend,
        *,
        arena: Arena,
        policy: Policy,
        device: Device,
        audits: bool = False,
        after: "Swing | None" = None,
    ) -> None:
        """Publishes the decode layout with empty slots. `audits`: compare every published slot with the store after
        each hand-over. `after`: the one that failed; its phases and totals go on."""
        self.plan, self.device = plan, device
        self._backend, self._arena, self._audits = backend, arena, audits
        slots, transient, _ = arena.layout(plan.decode.regions)
        self.cache = ExpertCache(store, plan, slots, policy=policy, device=device)
        self.decode: StepExperts | None = self._step_experts(transient)
        self.lending: Lending | None = None
        self.layout: PrefillLayout | None = None
        self.buffers: tuple[View, ...] = ()
        self.workspace: View | None = None
        self.last: HandoverRecord | None = None if after is None else after.last
        self.n_handovers: int = 0 if after is None else after.n_handovers
        self._ring: View | None = None
        self._refill: Refill | None = None
        self._release_s = self._sweep_began_s = self._restore_s = self._restore_began_s = self._sweep_s = 0.0
        self._bytes_before = self._copied_bytes = self._n_tokens = self._n_lent = 0
        self.phases: Phases = Phases(lambda: device.link_bytes) if after is None else after.phases
        if after is not None:
            self.cache.counters = after.cache.counters
            self.phases.to(Phase.IDLE)

    def release(self, lending: Lending) -> None:
        """Phase prefill: the ranks the plan lends leave the cache, the prefill layout is published.

        In phase prefill already: lend more of them, between two sweeps, for prompts that came later.
        """
        began = time.perf_counter()
        layout = self.plan.prefill_layout(lending)  # may refuse: nothing has changed yet
        if self.phases.now is not Phase.PREFILL:
            self.finish_refill()
            self.phases.to(Phase.PREFILL)
            assert self.decode is not None
            self.decode.make_way()
            self.decode = None
            self._bytes_before = self.device.link_bytes
            self._release_s, self._n_tokens = 0.0, 0
        # Nothing waits here: experts move behind the step that read them last, and whoever writes into lent slots comes
        # behind the moves (computation in its order, copies because a sweep's executor lets them wait for it).
        if lending.n_kept < self.cache.table.n_owned:
            self.cache.lend(lending.n_kept, self._backend.move_parts)
        kept, ring, workspace, *buffers = self._arena.layout(layout.regions)
        self.cache.attach(kept)
        self.lending, self.layout = lending, layout
        self._ring, self.workspace, self.buffers = ring, workspace, tuple(buffers)
        self._n_lent = lending.n_lent
        self._sweep_began_s = time.perf_counter()
        self._release_s += self._sweep_began_s - began

    def sweep_experts(self, n_tokens: int) -> StreamedExperts:
        """The executor of one sweep of `n_tokens`; all absent experts are copied from the plan's threshold on."""
        assert self.layout is not None
        assert self._ring is not None
        assert self.workspace is not None
        self._n_tokens += n_tokens
        return StreamedExperts(
            self.cache,
            self._backend.pieces(
                self.cache, self._arena, workspace=self.workspace, piece_experts=self.layout.piece_experts
            ),
            ring=self._ring,
            piece_experts=self.layout.piece_experts,
            copies_all=n_tokens >= self.plan.copy_all_tokens,
        )

    def restore(self, prompt_counts: NDArray[np.float32]) -> None:
        """Phase restoring: the decode layout is back; experts return hottest first; waits for the first batch.

        `prompt_counts` [layers, experts]: tail-weighted routing of what was read (policies.PromptCounts).
        """
        self.phases.to(Phase.RESTORING)
        began = time.perf_counter()
        self._sweep_s = began - self._sweep_began_s
        self.cache.policy.observe_prompt(prompt_counts)
        wishes = self.cache.policy.restore_order(prompt_counts)  # while the device ends the sweep
        self.device.synchronize()
        self._copied_bytes = self.device.link_bytes - self._bytes_before
        slots, transient, _ = self._arena.layout(self.plan.decode.regions)
        self.cache.attach(slots)
        self.cache.table.take_back()
        self.lending, self.layout, self.buffers, self.workspace, self._ring = None, None, (), None, None
        self._refill = Refill(
            self.cache,
            wishes,
            batch_bytes=BATCH_BYTES,
            ahead_bytes=int(AHEAD_S * self.plan.rates.link_bytes_per_s),
        )
        self._restore_began_s = began
        self._refill.wait()
        self.decode = self._step_experts(transient)
        self._restore_s = time.perf_counter() - began
        self.n_handovers += 1
        self._end_refill_if_done()

    def _step_experts(self, transient: View) -> StepExperts:
        return self._backend.step_experts(self.cache, self._arena, transient=transient, rows=self.plan.rows)

    @property
    def is_refilling(self) -> bool:
        """Experts of the last hand-over are still on their way."""
        return self._refill is not None

    def poll(self) -> None:
        """Between steps: publish what has arrived in the background."""
        if self._refill is not None:
            self._refill.poll()
            self._end_refill_if_done()

    def finish_refill(self) -> None:
        """Publish what is in flight and stop: another prompt needs the room."""
        if self._refill is not None:
            self._refill.stop()
            self._end_refill_if_done()

    def abandon(self) -> None:
        """After a fault: nothing is published, nothing runs. Only a new `Swing` serves again."""
        self._refill, self.decode, self.layout, self.lending, self.buffers = None, None, None, None, ()
        self.workspace = self._ring = None
        self.cache.table.clear()
        if self.phases.now is not Phase.FAILED:
            self.phases.to(Phase.FAILED)

    def _end_refill_if_done(self) -> None:
        refill = self._refill
        if refill is None or not refill.is_done:
            return
        published_bytes = refill.moved_bytes - refill.dropped_bytes
        if published_bytes > refill.planned_bytes:
            raise EngineFailed(f"restore published {published_bytes} bytes, planned were {refill.planned_bytes}")
        self._refill = None
        self.cache.table.audit_all()
        if self._audits:
            self.cache.audit()
        self.last = HandoverRecord(
            n_tokens=self._n_tokens,
            n_lent=self._n_lent,
            copied_bytes=self._copied_bytes,
            restore_planned_bytes=refill.planned_bytes,
            restored_bytes=refill.moved_bytes,
            release_s=self._release_s,
            sweep_s=self._sweep_s,
            restore_s=self._restore_s,
            refill_s=time.perf_counter() - self._restore_began_s,
        )
