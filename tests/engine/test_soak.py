"""Hand-over after hand-over, every slot compared with the store each time, and nothing wears off."""

import numpy as np
import pytest

from tests.devices import LazyDevice
from tests.engine import rig

FILE = rig.QWEN3MOE


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


@pytest.mark.parametrize("n_handovers", [20, pytest.param(500, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])])
def test_hand_overs_with_every_slot_compared(n_handovers):
    """Prompts of all lengths, alone and in pairs, some cancelled; `audit` compares after each refill."""
    device, random = LazyDevice(), np.random.default_rng(n_handovers)
    with rig.open_engine(FILE, device=device, slots=5, context=192, audit=True) as engine:
        audits, audit = [], engine.memory.swing.cache.audit

        def counted():
            audit()
            audits.append(engine.memory.swing.n_handovers)

        engine.memory.swing.cache.audit = counted
        lent = set()
        while engine.status()["handovers"]["n"] < n_handovers:
            parts = []
            for _ in range(random.integers(1, 3)):
                tokens = rig.prompt(FILE, int(random.choice((3, 17, 40, 90))), int(random.integers(0, 2)))
                sampling = rig.greedy(int(random.integers(1, 4)))
                parts.append((engine.add(tokens, sampling), tokens, sampling))
            cancelled = None
            if random.random() < 0.2:
                engine.step()
                cancelled = parts[0][0]
                engine.cancel(cancelled)
            events = rig.run(engine)
            for request, tokens, sampling in parts:
                if request != cancelled:
                    assert rig.said(events, request) == rig.alone(FILE, tokens, sampling)
            lent.add(engine.status()["handovers"]["last"]["n_lent"])
            assert device.tally == device.link_bytes
        assert len(set(audits)) >= n_handovers - 1
        assert len(lent) >= 3
        rig.check_idle(engine)


def test_an_audit_finds_a_flipped_bit():
    with rig.open_engine(FILE, slots=3, audit=True) as engine:
        engine.add(rig.prompt(FILE, 8), rig.greedy(1))
        rig.run(engine)
        cache = engine.memory.swing.cache
        layer, expert = (int(i) for i in np.argwhere(cache.table.is_published())[0])
        cache.slot_bytes(layer, int(cache.table.slot_of[layer, expert]))[7] ^= 4
        request = engine.add(rig.prompt(FILE, 8), rig.greedy(1))
        events = rig.run(engine)
        assert [e.text for e in events if e.request_id == request and e.kind == "error"] == [engine.status()["failure"]]
        assert "not expert" in engine.status()["failure"]
        assert cache.table.n_published == 0
