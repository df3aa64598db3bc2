"""The swing region changes hands and back: what is lent, when tokens leave, who waits for whom."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from makeway import EngineFailed, OutOfPlan, UserError
from makeway.engine.backend import ReferenceBackend
from makeway.engine.phases import Phase
from makeway.experts.trace import TraceReader
from tests.devices import LazyDevice, OrderedDevice
from tests.engine import rig

FILE = rig.QWEN3MOE


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


def test_tokens_leave_when_decode_is_back_and_experts_go_on_coming():
    """The first token comes with the first published batch; the rest of the cache fills between steps."""
    with rig.open_engine(FILE, device=LazyDevice(), slots=6, handover="always") as engine:
        swing, tokens = engine.memory.swing, rig.prompt(FILE, 8)
        request = engine.add(tokens, rig.greedy(12))
        n_published = []
        events = []
        while engine.busy:
            new = engine.step()
            if any(e.kind == "token" for e in new):
                assert engine.phase in (Phase.DECODE, Phase.IDLE)
                n_published.append(swing.cache.table.n_published)
            events += new
        assert n_published[0] == 1, "one batch is one expert here"
        assert n_published == sorted(n_published)
        assert 1 < n_published[3] < 18
        assert swing.cache.table.n_published == 18
        assert rig.said(events, request) == rig.alone(FILE, tokens, rig.greedy(12))
        rig.check_idle(engine)


def test_the_next_prompt_stops_the_refill():
    with rig.open_engine(FILE, device=LazyDevice(), slots=6, handover="always") as engine:
        one = engine.add(rig.prompt(FILE, 8), rig.greedy(6))
        events = rig.run(engine, until=lambda events: rig.said(events, one))
        assert engine.memory.swing.is_refilling
        two = engine.add(rig.prompt(FILE, 9), rig.greedy(2))
        while engine.phase is not Phase.PREFILL:
            events += engine.step()
        assert not engine.memory.swing.is_refilling
        first = engine.status()["handovers"]["last"]
        assert 0 < first["restored_bytes"] < first["restore_planned_bytes"]
        rig.run(engine, events)
        assert rig.said(events, one) == rig.alone(FILE, rig.prompt(FILE, 8), rig.greedy(6))
        assert rig.said(events, two) == rig.alone(FILE, rig.prompt(FILE, 9), rig.greedy(2))
        last = engine.status()["handovers"]["last"]
        assert last["restore_planned_bytes"] == 18 * engine.plan.layers[0].expert_bytes
        assert last["restored_bytes"] <= last["restore_planned_bytes"], "what decode keeps needs no refill"
        assert engine.memory.swing.cache.table.n_published == 18
        rig.check_idle(engine)


def test_the_policy_sees_every_step_also_the_last_before_a_prompt():
    with rig.open_engine(FILE, device=LazyDevice(), slots=4) as engine:
        for n_answer in (5, 3):
            engine.add(rig.prompt(FILE, 9), rig.greedy(n_answer))
            rig.run(engine)
        engine.add(rig.prompt(FILE, 9), rig.greedy(1))
        rig.run(engine)
        assert engine.memory.swing.cache.policy.step == engine.status()["n_steps"] == 4 + 2


def test_a_prompt_that_comes_during_a_sweep_joins_the_next_and_borrows_more():
    with rig.open_engine(FILE, device=LazyDevice(), slots=12, context=192) as engine:
        few, many = rig.prompt(FILE, 12), rig.prompt(FILE, 120)
        assert engine.plan.lend_for(12).n_lent == 0 < engine.plan.lend_for(120).n_lent
        warm = engine.add(few, rig.greedy(1))
        rig.run(engine)
        ids = [engine.add(few, rig.greedy(3))]
        events = engine.step()
        assert engine.memory.swing.lending.n_lent == 0
        ids.append(engine.add(many, rig.greedy(3)))
        lent = set()
        while engine.busy:
            events += engine.step()
            if engine.phase is Phase.PREFILL:
                lent.add(engine.memory.swing.lending.n_lent)
        assert lent == {0, engine.plan.lend_for(120).n_lent}
        assert engine.status()["handovers"]["n"] == 2, "one hand-over for both"
        for i, tokens in zip(ids, (few, many), strict=True):
            assert rig.said(events, i) == rig.alone(FILE, tokens, rig.greedy(3))
        assert warm not in ids
        rig.check_idle(engine)


def test_many_prompts_are_read_in_one_stay_and_answers_go_on_in_between():
    """With `max_prefill_s` at its least a stay is one sweep, and every answer gets a token before the next."""
    prompts = [rig.prompt(FILE, 30, i) for i in range(4)]
    stays = {}
    for max_prefill_s in (60.0, 1e-9):
        with rig.open_engine(
            FILE, device=LazyDevice(), parallel=5, context=256, max_prefill_s=max_prefill_s, sweep_tokens=40
        ) as engine:
            answering = engine.add(rig.prompt(FILE, 7), rig.greedy(12))
            events = rig.run(engine, until=lambda events, i=answering: rig.said(events, i))
            before = engine.status()["handovers"]["n"]
            ids = [engine.add(tokens, rig.greedy(3)) for tokens in prompts]
            n_first, order = len(rig.said(events, answering)), []
            while engine.busy:
                new = engine.step()
                order += [e.request_id for e in new if e.kind == "token"]
                events += new
            assert rig.said(events, answering) == rig.alone(FILE, rig.prompt(FILE, 7), rig.greedy(12))
            for i, tokens in zip(ids, prompts, strict=True):
                assert rig.said(events, i) == rig.alone(FILE, tokens, rig.greedy(3))
            stays[max_prefill_s] = engine.status()["handovers"]["n"] - before
            at = [order.index(i) for i in ids]
            between = [order[a:b].count(answering) for a, b in pairwise(at)]
            assert (sum(between) >= 2) == (max_prefill_s < 1)
            assert n_first == 1
            rig.check_idle(engine)
    assert stays == {60.0: 1, 1e-9: 3}, "120 tokens in sweeps of 40"


@pytest.mark.parametrize("handover", ["auto", "always", "never"])
def test_nothing_is_read_before_it_is_there_nor_overwritten_before_it_was_read(handover):
    device = OrderedDevice()
    backend = ReferenceBackend(device)
    backend.ops = device.watched(backend.ops)
    with rig.open_engine(FILE, device=device, backend=backend, slots=4, handover=handover, context=192) as engine:
        ids = [engine.add(rig.prompt(FILE, n), rig.greedy(5)) for n in (40, 9)]
        events = rig.run(engine, until=lambda events: len(rig.said(events, ids[0])) == 2)
        ids.append(engine.add(rig.prompt(FILE, 70), rig.greedy(5)))
        rig.run(engine, events)
        assert not any(e.kind == "error" for e in events)
        for i, n in zip(ids, (40, 9, 70), strict=True):
            assert rig.said(events, i) == rig.alone(FILE, rig.prompt(FILE, n), rig.greedy(5))


def test_logits_go_through_the_same_hand_over():
    with rig.open_engine(FILE, device=LazyDevice(), handover="always", slots=3) as engine:
        tokens = rig.prompt(FILE, 40)
        want = rig.logits_alone(FILE, tokens)
        assert engine.logits(tokens).equal(want)
        assert engine.phase is Phase.IDLE
        assert engine.status()["handovers"]["n"] == 1
        engine.add(tokens, rig.greedy(1))
        events = []
        while engine.phase is not Phase.PREFILL:
            events += engine.step()
        with pytest.raises(UserError, match="without requests"):
            engine.logits(tokens)
        while not engine.memory.swing.cache.table.n_published and engine._loop.scheduler.busy:
            events += engine.step()
        with pytest.raises(UserError, match="without requests"):
            engine.logits(tokens)  # its only request has ended, but its token is still held back
        rig.run(engine, events)
        assert engine.logits(tokens).equal(want)
        rig.run(engine)
        rig.check_idle(engine)


def test_the_trace_holds_what_was_routed(tmp_path):
    with rig.open_engine(FILE, device=LazyDevice(), trace=tmp_path / "trace", chunk=5, sweep_tokens=13) as engine:
        prompts = [rig.prompt(FILE, n) for n in (29, 8)]
        ids = [engine.add(tokens, rig.sampled(6, 3)) for tokens in prompts]
        events = rig.run(engine)
        engine.close()
        with TraceReader(tmp_path / "trace") as trace:
            assert trace.header.n_layers == len(engine.plan.layers)
            records = list(trace)
        for i, tokens in zip(ids, prompts, strict=True):
            mine = [record for record in records if record.sequence == i]
            whole = (*tokens, *(token for token, _ in rig.said(events, i)[:-1]))
            assert np.array_equal(np.concatenate([r.ids for r in mine]), rig.routed_alone(FILE, whole))
            assert sum(len(r.ids) for r in mine if r.phase == "prefill") == len(tokens)


def test_a_layout_that_does_not_fit_is_refused_before_anything_changes():
    with rig.open_engine(FILE, slots=3) as engine:
        rig.run(engine, [], until=lambda _: not engine.busy)
        engine.add(rig.prompt(FILE, 8), rig.greedy(1))
        rig.run(engine)
        swing, table = engine.memory.swing, engine.memory.swing.cache.table
        before, epoch = table.slot_of.copy(), table.epoch
        lending = engine.plan.lend_for(100)
        impossible = replace(lending, n_kept=engine.plan.decode.n_ranks, sweep_tokens=4000)
        with pytest.raises(OutOfPlan, match="does not fit"):
            swing.release(impossible)
        assert (engine.phase, table.epoch) == (Phase.IDLE, epoch)
        assert (table.slot_of == before).all()
        engine.add(rig.prompt(FILE, 8), rig.greedy(1))
        rig.run(engine)
        rig.check_idle(engine)


def test_views_of_the_other_layout_raise():
    with rig.open_engine(FILE, handover="always") as engine:
        swing = engine.memory.swing
        swing.release(engine.plan.lend_for(20))
        ring, buffers = swing._ring, swing.buffers
        swing.restore(np.zeros((3, 12), dtype=np.float32))
        for view in (ring, *buffers):
            with pytest.raises(EngineFailed, match="layout"):
                _ = view.tensor
        swing.phases.to(Phase.IDLE)
