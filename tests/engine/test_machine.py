"""Anything in any order: prompts, cancels, faults, rebuilds, several requests at once; checked after every step."""

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from makeway import EngineFailed
from makeway.engine.phases import TRANSITIONS, Phase
from tests.engine import rig

MODELS = ((rig.QWEN3MOE, "none"), (rig.QWEN3MOE, "lookup"), (rig.QWEN35MOE, "mtp"), (rig.QWEN35MOE, "mtp+lookup"))
LENGTHS = (1, 5, 16, 17, 30, 62)  # around what lends nothing, and one that grows into a second KV block
SAMPLINGS = (rig.greedy(1), rig.greedy(4), rig.sampled(4, 1))


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


class EngineMachine(RuleBasedStateMachine):
    """`asked`: what each request wants; `heard`: its events so far; `told`: those that got their last event."""

    def __init__(self):
        super().__init__()
        self.device = rig.LateFlaky()
        self.engine = self.file = None
        self.asked, self.heard, self.told = {}, {}, set()

    @initialize(
        model=st.sampled_from(MODELS),
        slots=st.sampled_from((0, 1, 3, 12)),
        handover=st.sampled_from(("auto", "always", "never")),
        policy=st.sampled_from(("lru", "lfru", "random")),
        max_prefill_s=st.sampled_from((60.0, 1e-9)),
        prefix_ram=st.sampled_from((0, None, 100_000)),
    )
    def open(self, model, **config):
        self.file, drafter = model
        self.engine = rig.open_engine(self.file, device=self.device, drafter=drafter, **config)
        self.watch()

    def watch(self):
        """Every change of phase from now on is compared with the table."""
        phases, change = self.engine.memory.swing.phases, self.engine.memory.swing.phases.to

        def to(phase):
            assert phase in TRANSITIONS[phases.now]
            change(phase)

        phases.to = to

    @precondition(lambda self: len(self.asked) - len(self.told) < 5)
    @rule(n=st.sampled_from(LENGTHS), start=st.integers(0, 1), sampling=st.sampled_from(SAMPLINGS))
    def add(self, n, start, sampling):
        tokens = rig.prompt(self.file, n, start)
        if self.engine.phase is Phase.FAILED:
            with pytest.raises(EngineFailed, match="rebuild"):
                self.engine.add(tokens, sampling)
            return
        request = self.engine.add(tokens, sampling)
        self.asked[request], self.heard[request] = (tokens, sampling), []

    @rule(n=st.integers(1, 12))
    def steps(self, n):
        for _ in range(n):
            self.step()

    def step(self):
        events = self.engine.step()
        if any(e.kind == "token" for e in events):
            assert self.engine.phase in (Phase.DECODE, Phase.IDLE), "a token left while the cache was away"
        for event in events:
            assert event.request_id not in self.told, "a last event is the last"
            self.heard[event.request_id].append(event)
            if event.kind in ("finish", "error"):
                self.told.add(event.request_id)
                self.check_answer(event)
        self.engine.memory.swing.cache.audit()

    def check_answer(self, last):
        tokens, sampling = self.asked[last.request_id]
        said = rig.said(self.heard[last.request_id], last.request_id)
        want = rig.alone(self.file, tokens, sampling)
        assert said == want[: len(said)]
        if last.reason == "length":
            assert said == want
        else:
            assert last.kind == "error" or last.reason == "cancelled"

    @precondition(lambda self: self.asked)
    @rule(data=st.data())
    def cancel(self, data):
        self.engine.cancel(data.draw(st.sampled_from(sorted(self.asked))))

    @rule(n=st.integers(1, 60))
    def arm(self, n):
        self.device.arm(n)

    @precondition(lambda self: self.engine.phase is Phase.FAILED)
    @rule()
    def rebuild(self):
        self.device.arm(None)
        self.engine.rebuild()

    @rule()
    def drain(self):
        """Without new faults everything comes to an end, and nothing is left behind."""
        self.device.arm(None)
        for _ in range(3000):
            if not self.engine.busy:
                break
            self.step()
        assert self.told == set(self.asked)
        rig.check_idle(self.engine)
        assert self.engine.phase in (Phase.IDLE, Phase.FAILED)

    @invariant()
    def the_books_are_right(self):
        if self.engine is None:
            return
        memory = self.engine.memory
        swing, table = memory.swing, memory.swing.cache.table
        table.audit_all()
        assert (swing.lending is not None) == (self.engine.phase is Phase.PREFILL)
        assert (swing.decode is not None) == (self.engine.phase in (Phase.IDLE, Phase.DECODE))
        if self.engine.phase is Phase.FAILED:
            assert table.n_published == 0
        if set(self.asked) == self.told:
            assert memory.kv.pool.n_free == memory.kv.pool.n_blocks
            assert memory.states.places.n_free == memory.states.places.n_places

    def teardown(self):
        if self.engine is not None:
            self.drain()
            self.engine.close()


def run(n_examples, n_steps, *, derandomize):
    run_state_machine_as_test(
        EngineMachine,
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=n_steps,
            deadline=None,
            derandomize=derandomize,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        ),
    )


def test_a_short_walk():
    run(12, 20, derandomize=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_long_walks():
    run(300, 60, derandomize=False)
