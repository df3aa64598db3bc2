"""What crosses the link is what the plan says: each absent expert once a sweep, each free slot once a hand-over."""

import itertools

import numpy as np
import pytest

from makeway.engine.phases import Phase
from makeway.memory.sizes import SweepShape
from tests.devices import RecordingDevice
from tests.engine import rig


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


class Tally:
    """What a device copied since `reset`, by expert, from the addresses of the store alone."""

    def __init__(self, engine, device):
        self.device = device
        layers = engine.memory.store.layers
        self.keys = {
            layer.bytes_of(e).data_ptr(): (i, e) for i, layer in enumerate(layers) for e in range(layer.n_experts)
        }
        self.bytes_of = {key: layers[key[0]].expert_bytes for key in self.keys.values()}
        self.reset()

    def reset(self):
        self.device.sources.clear()
        self.start = self.device.tally

    def copied(self):
        """{(layer, expert): times}; every byte is of an expert."""
        times = {self.keys[address]: n for address, n in self.device.sources.items()}
        assert self.device.tally - self.start == self.n_bytes(times)
        return times

    def n_bytes(self, times):
        return sum(self.bytes_of[key] * n for key, n in times.items())


def published(engine):
    return {tuple(key) for key in np.argwhere(engine.memory.swing.cache.table.is_published()).tolist()}


def sweeps_of(lending, n_tokens):
    """Token ranges of a prompt's sweeps."""
    step = lending.sweep_tokens
    return [(i, min(i + step, n_tokens)) for i in range(0, n_tokens, step)]


def expected_copies(engine, file, tokens, kept):
    """What the sweeps of a prompt must copy when `kept` stays in slots: {(layer, expert): times}."""
    plan, routed, times = engine.plan, rig.routed_alone(file, tokens), {}
    n_layers, n_experts = len(plan.layers), plan.sizes.n_experts
    for start, end in sweeps_of(plan.lend_for(len(tokens)), len(tokens)):
        if end - start >= plan.copy_all_tokens:
            wanted = set(itertools.product(range(n_layers), range(n_experts)))
        else:
            wanted = {(i, int(e)) for i in range(n_layers) for e in np.unique(routed[start:end, i])}
        for key in wanted - kept:
            times[key] = times.get(key, 0) + 1
    return times


def read(engine, tally, tokens):
    """Reads a prompt; returns (slots kept, copies of its sweeps, copies of the restore)."""
    tally.reset()
    engine.add(tokens, rig.greedy(1))
    while engine.phase is not Phase.PREFILL:
        engine.step()
    kept, copies = published(engine), {}
    while engine.phase is Phase.PREFILL:
        copies = tally.copied()
        engine.step()
        if engine.phase is Phase.PREFILL:
            assert published(engine) == kept, "a sweep changes nothing in the cache"
    rig.run(engine)
    total = tally.copied()
    return kept, copies, {key: n - copies.get(key, 0) for key, n in total.items() if n > copies.get(key, 0)}


@pytest.mark.parametrize("file", rig.FILES)
@pytest.mark.parametrize(("handover", "slots"), [("auto", 3), ("always", 2), ("never", 2), ("auto", 0), ("auto", 99)])
def test_a_prompt_moves_what_its_sweeps_need_and_the_slots_it_borrowed(file, handover, slots):
    device = RecordingDevice()
    with rig.open_engine(file, device=device, handover=handover, slots=slots, context=192) as engine:
        plan, tally = engine.plan, Tally(engine, device)
        n_layers = len(plan.layers)
        for n in (1, 16, 17, 40, 23, 90, 16):
            tokens = rig.prompt(file, n)
            before = published(engine)
            kept, copies, restored = read(engine, tally, tokens)
            lending = plan.lend_for(n)
            assert kept <= before
            n_kept = min(lending.n_kept, plan.n_slots)
            assert len(kept) <= n_layers * n_kept
            assert copies == expected_copies(engine, file, tokens, kept)
            assert set(restored.values()) <= {1}
            assert not set(restored) & kept, "kept slots are not moved again"
            assert len(published(engine)) == n_layers * plan.n_slots
            assert len(restored) == n_layers * plan.n_slots - len(kept)
            last = engine.status()["handovers"]["last"]
            assert last["n_tokens"] == n
            assert last["n_lent"] == lending.n_lent
            assert last["copied_bytes"] == tally.n_bytes(copies)
            assert last["restore_planned_bytes"] == last["restored_bytes"] == tally.n_bytes(restored)
            if len(before) == n_layers * plan.n_slots:
                assert last["restored_bytes"] == lending.restored_bytes
                if all(end - start >= plan.copy_all_tokens for start, end in sweeps_of(lending, n)):
                    assert last["copied_bytes"] == lending.copied_bytes
        check_counters(engine, device)


def check_counters(engine, device):
    """Phases and loading add up to all that crossed the link, by the device's count and by the recorder's."""
    status = engine.status()
    by_phase = sum(phase["link_bytes"] for phase in status["phases"].values())
    assert status["link"]["bytes"] == device.link_bytes == device.tally
    assert by_phase == status["experts"]["link_bytes"] == device.tally - status["link"]["loaded_bytes"]
    assert status["phases"]["prefill"]["n_entered"] == status["phases"]["restoring"]["n_entered"]
    assert status["phases"]["prefill"]["n_entered"] == status["handovers"]["n"]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_chunk_ring_and_piece_move_no_other_bytes(every, monkeypatch):
    """The same prompts with other chunks, and rings of other pieces and buffers: the same copies, one by one."""
    file, seen = rig.QWEN3MOE, []
    ladders = [
        None,
        (SweepShape(16, 1, 2),),
        (SweepShape(5, 5, 2),),
        (SweepShape(64, 7, 1), SweepShape(16, 1, 2)),
    ]
    some = [(None, 3), *((ladder, None) for ladder in ladders)]
    for ladder, chunk in itertools.product(ladders, (None, 3)) if every else some:
        if ladder is not None:
            monkeypatch.setattr("makeway.memory.sizes.LADDER", ladder)
        device = RecordingDevice()
        with rig.open_engine(file, device=device, chunk=chunk, vram=2_300_000, slots=5, context=192) as engine:
            tally, record = Tally(engine, device), []
            for n in (90, 12, 17, 60):
                tokens = rig.prompt(file, n)
                kept, copies, _ = read(engine, tally, tokens)
                assert copies == expected_copies(engine, file, tokens, kept)
                record.append((engine.plan.lend_for(n).shape, sorted(copies.items())))
            seen.append(record)
    shapes = {tuple(shape for shape, _ in record) for record in seen}
    assert len(shapes) >= 4


def test_a_short_follow_up_lends_nothing_and_leaves_the_cache_as_it_was():
    file, device = rig.QWEN35MOE, RecordingDevice()
    with rig.open_engine(file, device=device, slots=3, context=192) as engine:
        plan, tally = engine.plan, Tally(engine, device)
        assert plan.copy_all_tokens > 1
        assert plan.lend_from_tokens is not None
        read(engine, tally, rig.prompt(file, 100))
        edges = {
            plan.short_sweep_tokens,
            plan.lend_from_tokens - 1,
            plan.copy_all_tokens - 1,
            plan.copy_all_tokens,
            1,
            5,
        }
        for n in sorted(n for n in edges if n < plan.lend_from_tokens):
            table = engine.memory.swing.cache.table
            before, slots = published(engine), table.slot_of.copy()
            n_published = table.epochs.sum()
            tokens = rig.prompt(file, n, 7)
            kept, copies, restored = read(engine, tally, tokens)
            assert plan.lend_for(n).n_lent == 0
            assert kept == before
            assert restored == {}
            assert (table.slot_of == slots).all()
            assert table.epochs.sum() == n_published, "no slot was touched"
            if n < plan.copy_all_tokens:
                routed = rig.routed_alone(file, tokens)
                used = {(i, int(e)) for i in range(len(plan.layers)) for e in np.unique(routed[:, i])}
                assert copies == dict.fromkeys(used - before, 1)
            else:
                assert len(copies) == len(plan.layers) * plan.sizes.n_experts - len(before)
        lent = [n for n in range(plan.lend_from_tokens, 120) if plan.lend_for(n).n_lent > plan.n_spares]
        _, _, restored = read(engine, tally, rig.prompt(file, lent[0]))
        assert len(restored) == len(plan.layers) * (plan.lend_for(lent[0]).n_lent - plan.n_spares)
        check_counters(engine, device)


def test_several_prompts_in_one_sweep_copy_each_expert_once():
    file, device = rig.QWEN3MOE, RecordingDevice()
    with rig.open_engine(file, device=device, slots=2, parallel=4, context=192) as engine:
        tally = Tally(engine, device)
        parts = [rig.prompt(file, n, 3) for n in (20, 31, 11)]
        for tokens in parts:
            engine.add(tokens, rig.greedy(1))
        rig.run(engine)
        assert engine.plan.lend_for(62).n_sweeps == 1
        assert engine.plan.copy_all_tokens <= 62
        last = engine.status()["handovers"]["last"]
        assert last["n_tokens"] == 62
        assert set(tally.copied()) == set(tally.bytes_of)
        assert last["copied_bytes"] == sum(tally.bytes_of.values())
        assert engine.status()["handovers"]["n"] == 1


def test_decode_moves_its_misses_and_nothing_else():
    file, device = rig.QWEN3MOE, RecordingDevice()
    with rig.open_engine(file, device=device, slots=4, policy="lru") as engine:
        tally = Tally(engine, device)
        request = engine.add(rig.prompt(file, 12), rig.greedy(10))
        events = rig.run(engine, until=lambda events: rig.said(events, request))
        rig.run(engine, events, until=lambda _: not engine.memory.swing.is_refilling)
        before = engine.status()["experts"]
        tally.reset()
        rig.run(engine, events)
        after, copied = engine.status()["experts"], tally.copied()
        assert sum(copied.values()) == after["misses"] - before["misses"] > 0
        assert after["hits"] > before["hits"]
        assert after["link_bytes"] - before["link_bytes"] == tally.n_bytes(copied)
        check_counters(engine, device)


def test_resident_weights_cross_once_while_loading():
    device = RecordingDevice()
    with rig.open_engine(rig.QWEN4EXP, device=device) as engine:
        loaded = engine.memory.loaded_bytes
        planned = sum(r.n_bytes for r in engine.plan.regions if r.name.startswith("weights: "))
        assert loaded == device.tally <= planned
        assert planned - loaded < 256 * 200
