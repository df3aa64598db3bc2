"""Hand-overs in the middle of an answer: what the report shows, with and without slots that are lent."""

import pytest

from makeway import UserError
from makeway.bench.activity import COPY, Span
from makeway.bench.handover import Fetch, bench_handover, crossed, needed_context
from makeway.bench.report import Report
from makeway.bench.rig import Setup
from makeway.config import EngineConfig


def setup(context, *, parallel=2, **config):
    made = EngineConfig(
        device="cpu", context=context, parallel=parallel, slots=8, prefix_ram=0, drafter="none", **config
    )
    return Setup(shape="tiny-qwen3", layers=1, config=made)


@pytest.mark.parametrize("handover", ["always", "never"])
def test_an_answer_is_interrupted_and_goes_on(handover):
    report = Report("handover", ["bench", "handover"], allow_reference=True)
    context = needed_context(24, n_handovers=2, steps=2, first=3)
    bench_handover(report, setup(context, handover=handover), n_tokens=24, n_handovers=2, steps=2, first=3)
    document = report.to_json()
    figures = {figure["name"]: figure for figure in document["figures"]}
    lends = handover == "always"
    assert ("refill beside decode" in figures) == lends
    copies = figures["  its copies"]  # on a CPU those of steps too
    assert copies["median"] > 0
    assert copies["bound"] > 0
    assert figures["  the link meanwhile"]["median"] == copies["median"], "no step fetches beside the copies"
    assert any("nothing was lent" in remark for remark in document["remarks"]) != lends
    pause = figures["pause of an answer, prompt of 24 tokens"]
    assert pause["n"] == 2
    fixed = figures["  fixed cost: pause without the sweep"]
    assert fixed["median"] < pause["median"]
    steps = [figures[name] for name in figures if name.startswith("step")]
    assert len(steps) == 3
    assert all(step["bound"] > 0 for step in steps)
    records = document["handovers"]
    assert [record["n_tokens"] for record in records] == [24, 24]
    for record in records:
        assert (record["n_lent"] > 0) == lends
        assert record["restored_bytes"] == record["restore_planned_bytes"]
        assert (record["restored_bytes"] > 0) == lends
        assert record["pause_s"] > record["release_s"] + record["sweep_s"] + record["restore_s"]


def test_steps_fetch_while_experts_come_back():
    copies = [Span(COPY, 2.0, 4.0, 100), Span(COPY, 3.0, 5.0, 60)]
    fetches = [Fetch(0.0, 1.0, 8), Fetch(1.0, 3.0, 10), Fetch(3.0, 4.0, 7), Fetch(4.0, 8.0, 40)]
    assert crossed(copies, fetches) == (160, 5 + 7 + 10, 3.0)


def test_what_cannot_be_measured_is_refused():
    for change in ({"n_tokens": 0}, {"n_handovers": 0}, {"steps": 0}, {"first": 0}):
        with pytest.raises(UserError, match="use 1 or more"):
            bench_handover(Report("handover", []), setup(100), **change)
    with pytest.raises(UserError, match="--parallel 1"):
        bench_handover(Report("handover", []), setup(100, parallel=1), n_tokens=8)
