"""When something breaks: every request is told, no token leaves, nothing is published, and `rebuild` serves again."""

import numpy as np
import pytest

from makeway import EngineFailed, SamplingParams, UserError
from makeway.engine.phases import Phase
from makeway.experts.slots import NONE
from makeway.experts.trace import TraceReader
from tests.devices import CpuDevice, FlakyDevice, LazyDevice
from tests.engine import rig

FILE = rig.QWEN3MOE


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


def check_failed(engine, events, ids):
    """Phase failed, the table empty, each request of `ids` told last of all and once."""
    table = engine.memory.swing.cache.table
    assert engine.phase is Phase.FAILED
    assert table.n_published == 0
    assert (table.slot_of == NONE).all()
    assert (table.holds == NONE).all()
    assert {e.request_id for e in events if e.kind == "error"} == set(ids)
    for i in ids:
        assert [e.kind for e in events if e.request_id == i].count("error") == 1
        assert [e.kind for e in events if e.request_id == i][-1] == "error"
    assert engine.step() == []
    assert not engine.busy
    assert engine.memory.kv.pool.n_free == engine.memory.kv.pool.n_blocks
    assert engine.memory.states.places.n_free == engine.memory.states.places.n_places
    with pytest.raises(EngineFailed, match="rebuild"):
        engine.add([1])
    with pytest.raises(EngineFailed, match="rebuild"):
        engine.logits([1])


def check_serves(engine, file=FILE):
    """A prompt that lends and one that does not, as computed alone."""
    for n, sampling in ((37, rig.greedy(3)), (5, rig.sampled(3, 2))):
        tokens = rig.prompt(file, n)
        request = engine.add(tokens, sampling)
        assert rig.said(rig.run(engine), request) == rig.alone(file, tokens, sampling)
    rig.check_idle(engine)


def fail_everywhere(engine, device, begin, *, stride=1, fault=RuntimeError):
    """For n = 1, 1 + stride, ... `begin()` gives requests to an engine whose device then fails at call n: until one is
    served without a fault. Returns how many faults there were."""
    n = 1
    while True:
        ids = begin()
        device.n_calls, device.fail_at = 0, n
        events = []
        try:
            rig.run(engine, events)
        except KeyboardInterrupt:
            assert fault is KeyboardInterrupt
            events += engine.step()
        device.fail_at = None
        if engine.phase is not Phase.FAILED:
            assert device.n_calls < n
            return (n - 1) // stride
        done = {e.request_id for e in events if e.kind == "finish"}
        check_failed(engine, events, set(ids) - done)
        assert f"call {n} " in engine.status()["failure"]
        engine.rebuild()
        assert engine.phase is Phase.IDLE
        n += stride


class Interrupting(FlakyDevice):
    """The user presses Ctrl-C at that call."""

    def _tick(self, what):
        try:
            super()._tick(what)
        except RuntimeError as fault:
            raise KeyboardInterrupt(str(fault)) from fault


@pytest.mark.parametrize(
    ("make", "fault", "stride"),
    [
        (FlakyDevice, RuntimeError, 6),
        (Interrupting, KeyboardInterrupt, 20),
        pytest.param(FlakyDevice, RuntimeError, 1, marks=pytest.mark.slow),
        pytest.param(Interrupting, KeyboardInterrupt, 1, marks=pytest.mark.slow),
    ],
)
def test_every_operation_of_a_handover_may_fail(make, fault, stride):
    device = make()
    with rig.open_engine(FILE, device=device, parallel=2, handover="always") as engine:
        table = engine.memory.swing.cache.table

        def begin():
            """Into a warm cache: a prompt that ends with its first token, one that goes on, one that finds no place."""
            engine.add(rig.prompt(FILE, 2), SamplingParams(max_tokens=1))
            rig.run(engine)
            assert engine.memory.swing.cache.table.n_published == table.n_slots * table.n_layers
            return [
                engine.add(rig.prompt(FILE, 6), SamplingParams(max_tokens=1, ignore_eos=True)),
                engine.add(rig.prompt(FILE, 3), SamplingParams(max_tokens=2, ignore_eos=True)),
                engine.add(rig.prompt(FILE, 2), SamplingParams(max_tokens=1, ignore_eos=True)),
            ]

        n_faults = fail_everywhere(engine, device, begin, stride=stride, fault=fault)
        assert n_faults > 200 // stride
        assert engine.status()["n_faults"] == n_faults
        check_serves(engine)


def test_a_request_that_ends_in_a_prefill_keeps_the_engine_busy_until_its_token_is_out():
    with rig.open_engine(FILE, handover="always") as engine:
        tokens = rig.prompt(FILE, 6)
        events = list(engine.generate(tokens, rig.greedy(1)))
        assert rig.said(events, events[0].request_id) == rig.alone(FILE, tokens, rig.greedy(1))
        request = engine.add(tokens, rig.greedy(1))
        assert rig.said(rig.run(engine), request) == rig.alone(FILE, tokens, rig.greedy(1))
        assert engine.phase is Phase.IDLE


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=pytest.mark.slow)])
def test_decode_steps_and_the_background_refill_may_fail(stride):
    """A long answer after a prompt that lent everything: experts return, one a batch, while it decodes."""
    device = LateFlaky()
    with rig.open_engine(FILE, device=device, slots=8, handover="always") as engine:

        def begin():
            ids = [engine.add(rig.prompt(FILE, 4), rig.greedy(6)), engine.add(rig.prompt(FILE, 3), rig.greedy(3))]
            rig.run(engine, until=lambda events: any(e.kind == "token" for e in events))
            assert engine.memory.swing.is_refilling
            return ids

        assert fail_everywhere(engine, device, begin, stride=stride) > 60 // stride
        check_serves(engine)


class LateFlaky(FlakyDevice):
    """Fails as told, and a copy is done only when its event has been asked for twice."""

    def record_copies(self):
        self._tick("record copies")
        return _Late(self)


class _Late:
    def __init__(self, device):
        self.device, self.n_asked = device, 0

    def is_done(self):
        self.device._tick("is_done")
        self.n_asked += 1
        return self.n_asked > 2

    def wait(self):
        self.device._tick("wait")
        self.n_asked = 2


def test_an_interrupt_then_a_rebuild_at_once_loses_no_message():
    device = Interrupting()
    with rig.open_engine(FILE, device=device) as engine:
        ids = [engine.add(rig.prompt(FILE, 30), rig.greedy(2)) for _ in range(5)]
        engine.step()
        device.fail_at = device.n_calls + 1
        with pytest.raises(KeyboardInterrupt):
            rig.run(engine)
        assert engine.phase is Phase.FAILED
        engine.rebuild()
        assert engine.busy
        events = rig.run(engine)
        assert [(e.request_id, e.kind) for e in events] == [(i, "error") for i in ids]
        check_serves(engine)


def test_a_fault_while_cancelling_fails_the_engine():
    device = FlakyDevice()
    with rig.open_engine(FILE, device=device) as engine:
        gone, other = (engine.add(rig.prompt(FILE, 30), rig.greedy(2)) for _ in range(2))
        engine.step()
        engine.cancel(other)
        device.fail_at = device.n_calls + 1
        engine.cancel(gone)
        events = rig.run(engine)
        assert [(e.request_id, e.kind) for e in events] == [(other, "finish"), (gone, "finish")]
        check_failed(engine, events, [])
        engine.rebuild()
        check_serves(engine)


def test_a_rebuild_that_fails_can_be_tried_again():
    device = FlakyDevice()
    with rig.open_engine(FILE, device=device) as engine:
        with pytest.raises(UserError, match="phase idle"):
            engine.rebuild()
        engine.add(rig.prompt(FILE, 30), rig.greedy(2))
        device.fail_at = device.n_calls + 3
        assert [e.kind for e in rig.run(engine)][-1] == "error"
        device.fail_at = device.n_calls + 1
        with pytest.raises(RuntimeError, match="synchronize"):
            engine.rebuild()
        assert engine.phase is Phase.FAILED
        engine.rebuild()
        check_serves(engine)


def test_totals_go_on_after_a_rebuild():
    device = FlakyDevice()
    with rig.open_engine(FILE, device=device) as engine:
        check_serves(engine)
        before = engine.status()
        engine.add(rig.prompt(FILE, 30), rig.greedy(2))
        device.fail_at = device.n_calls + 30
        rig.run(engine)
        engine.rebuild()
        after = engine.status()
        assert after["n_faults"] == 1
        assert after["phases"]["failed"]["n_entered"] == 1
        assert after["phases"]["prefill"]["n_entered"] == before["phases"]["prefill"]["n_entered"] + 1
        assert after["experts"]["uploads"] >= before["experts"]["uploads"] > 0
        assert after["handovers"]["n"] == before["handovers"]["n"] == 2
        counted = sum(phase["link_bytes"] for phase in after["phases"].values())
        assert counted + after["link"]["loaded_bytes"] == after["link"]["bytes"] == device.link_bytes


def test_cancel_at_every_unit_leaves_the_others_unharmed(tmp_path):
    """One of two prompts of a sweep is cancelled after n units of work, while a third request answers; the trace holds
    what was routed for the others, and no more."""
    with rig.open_engine(FILE, device=LazyDevice(), slots=3, context=256, chunk=16, trace=tmp_path / "trace") as engine:
        n, n_units, whole = 0, None, {}
        while n_units is None or n <= n_units:
            answering, kept, gone = (rig.prompt(FILE, k, start) for k, start in ((7, 0), (23, 1), (20, 2)))
            ids = [engine.add(answering, rig.greedy(5))]
            events = rig.run(engine, until=lambda events, i=ids[0]: rig.said(events, i))
            if n % 2:  # the cancelled one first
                ids += [engine.add(gone, rig.greedy(2)), engine.add(kept, rig.greedy(2))][::-1]
            else:
                ids += [engine.add(kept, rig.greedy(2)), engine.add(gone, rig.greedy(2))]
            units = 0
            while units < n and engine.busy:
                events += engine.step()
                units += 1
            if units < n:
                n_units = units
            engine.cancel(ids[2])
            rig.run(engine, events)
            assert rig.said(events, ids[0]) == rig.alone(FILE, answering, rig.greedy(5))
            assert rig.said(events, ids[1]) == rig.alone(FILE, kept, rig.greedy(2))
            said = rig.said(events, ids[2])
            assert said == rig.alone(FILE, gone, rig.greedy(2))[: len(said)]
            assert [e.reason for e in events if e.request_id == ids[2]][-1] == (
                "length" if len(said) == 2 else "cancelled"
            )
            assert not any(e.kind == "error" for e in events)
            rig.check_idle(engine)
            whole[ids[0]] = [*answering, *(token for token, _ in rig.said(events, ids[0])[:-1])]
            whole[ids[1]] = [*kept, *(token for token, _ in rig.said(events, ids[1])[:-1])]
            n += 1
        assert n > 15
    with TraceReader(tmp_path / "trace") as trace:
        records = list(trace)
    for i, tokens in whole.items():
        routed = np.concatenate([record.ids for record in records if record.sequence == i])
        assert np.array_equal(routed, rig.routed_alone(FILE, tuple(tokens)))


def test_cancel_of_the_only_prompt_brings_the_cache_back():
    with rig.open_engine(FILE, device=LazyDevice(), handover="always") as engine:
        check_serves(engine)
        for n in range(3 * 3):  # layers x (chunks + experts)
            request = engine.add(rig.prompt(FILE, 30), rig.greedy(2))
            for _ in range(n):
                assert not any(e.kind == "token" for e in engine.step())
            engine.cancel(request)
            events = rig.run(engine)
            assert [(e.kind, e.reason) for e in events if e.request_id == request] == [("finish", "cancelled")]
            rig.check_idle(engine)
            assert engine.memory.swing.cache.table.n_published == 2 * 3
        check_serves(engine)


def test_a_host_that_cannot_give_memory():
    """What fails while loading leaves nothing taken from the device."""
    for n in range(1, 4):
        device = FlakyDevice(fail_at=n)
        free = device.free_bytes()
        with pytest.raises(RuntimeError, match=f"call {n} "):
            rig.open_engine(FILE, device=device)
        assert device.free_bytes() == free
    assert CpuDevice().free_bytes() == free
