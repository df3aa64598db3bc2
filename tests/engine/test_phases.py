"""One table of transitions, one method that makes them, and totals that add up."""

import io
import itertools
import runpy
from contextlib import redirect_stdout

import pytest

from makeway import EngineFailed
from makeway.engine.phases import OWNERS, TRANSITIONS, Phase, Phases
from tests.conftest import ROOT


def at(phase, link_bytes=lambda: 0):
    """Phases that are in `phase`, by legal steps."""
    ways = {
        Phase.IDLE: (),
        Phase.PREFILL: (Phase.PREFILL,),
        Phase.RESTORING: (Phase.PREFILL, Phase.RESTORING),
        Phase.DECODE: (Phase.PREFILL, Phase.RESTORING, Phase.DECODE),
        Phase.FAILED: (Phase.FAILED,),
    }
    phases = Phases(link_bytes)
    for step in ways[phase]:
        phases.to(step)
    return phases


@pytest.mark.parametrize(("start", "end"), list(itertools.product(Phase, Phase)))
def test_a_change_is_made_or_refused_as_the_table_says(start, end):
    phases = at(start)
    n_entered = phases.totals[end].n_entered
    if end in TRANSITIONS[start]:
        phases.to(end)
        assert phases.now is end
        assert phases.totals[end].n_entered == n_entered + 1
    else:
        with pytest.raises(EngineFailed, match=f"no way from phase {start} to {end}"):
            phases.to(end)
        assert phases.now is start
        assert phases.totals[end].n_entered == n_entered


def test_every_phase_has_exits_an_owner_and_a_way_to_fail():
    assert set(TRANSITIONS) == set(OWNERS) == set(Phase)
    assert all(TRANSITIONS.values())
    assert all(Phase.FAILED in ends for start, ends in TRANSITIONS.items() if start is not Phase.FAILED)
    assert TRANSITIONS[Phase.FAILED] == {Phase.IDLE}
    assert not any(phase in ends for phase, ends in TRANSITIONS.items()), "no phase follows itself"


def test_bytes_and_seconds_belong_to_the_phase_they_fell_into(monkeypatch):
    moved, now = [100], [10.0]
    monkeypatch.setattr("makeway.engine.phases.time.perf_counter", lambda: now[0])
    phases = Phases(lambda: moved[0])
    for phase, n_bytes, seconds in ((Phase.PREFILL, 7, 1.5), (Phase.RESTORING, 20, 2.0), (Phase.DECODE, 3, 4.0)):
        moved[0] += n_bytes
        now[0] += seconds
        phases.to(phase)
    moved[0] += 1
    phases.count()
    phases.count()
    assert {p: t.link_bytes for p, t in phases.totals.items() if t.link_bytes} == {
        Phase.IDLE: 7,
        Phase.PREFILL: 20,
        Phase.RESTORING: 3,
        Phase.DECODE: 1,
    }
    assert [phases.totals[p].seconds for p in (Phase.IDLE, Phase.PREFILL, Phase.RESTORING)] == [1.5, 2.0, 4.0]


def test_the_document_is_what_the_code_says():
    out = io.StringIO()
    with redirect_stdout(out):
        runpy.run_path(str(ROOT / "scripts" / "docs_phases.py"), run_name="__main__")
    made = out.getvalue()
    assert (ROOT / "docs" / "phases.md").read_text(encoding="utf-8") == made
    for start, ends in TRANSITIONS.items():
        row = next(line for line in made.splitlines() if line.startswith(f"| {start} |"))
        assert all(f" {'yes' if end in ends else ''} " in row for end in Phase)
        assert row.count("yes") == len(ends)
