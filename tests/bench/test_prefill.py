"""Prompts: what a report shows, the bound, and the other ways, which must say the same and copy more."""

import dataclasses

import pytest

from makeway import UserError
from makeway.bench.activity import Span
from makeway.bench.prefill import bench_prefill, bound_s, busy_s, drop_everything, read
from makeway.bench.report import Report
from makeway.bench.rig import Setup, opened
from makeway.config import EngineConfig
from makeway.memory.rates import Rates

SETUP = Setup(
    shape="tiny-qwen3",
    layers=2,
    config=EngineConfig(device="cpu", context=256, parallel=1, slots=8, prefix_ram=0, drafter="none"),
    rates=Rates(10**9, 10**9, 10**10, 10**10, 10**9),
)


def test_a_report_shows_full_and_cold_cache_parts_and_arms():
    report = Report("prefill", ["bench", "prefill"], allow_reference=True)
    bench_prefill(report, SETUP, lengths=(20, 60), repeats=2, arms_at=(60,), micro_batches=(25, 100))
    document = report.to_json()
    names = [figure["name"] for figure in document["figures"]]
    assert [n for n in names if not n.startswith(" ")] == [
        "20 tokens, full cache", "20 tokens, cold cache", "60 tokens, full cache", "60 tokens, cold cache",
        "60 tokens, micro-batches of 25, everything dropped", "60 tokens, one sweep, everything dropped",
    ]  # fmt: skip
    for part in ("  release", "  sweep", "  restore until the first token", "    copy", "    mixer: attention"):
        assert names.count(part) == 2, part
    (fixed, _) = [f for f in document["figures"] if f["name"] == "  fixed cost: without the sweep"]
    assert 0 < fixed["median"] < document["prompts"][0]["ttft_s"][0]
    short, long, micro, one = document["prompts"]
    expert_bytes = document["model"]["expert_bytes"]
    for prompt in (short, long):
        assert len(prompt["ttft_s"]) == 2
        assert 0 < prompt["handovers"][0]["copied_bytes"] < prompt["cold"]["copied_bytes"] <= expert_bytes
        copied = prompt["handovers"][-1]["copied_bytes"]
        assert prompt["bound_s"] == pytest.approx(max(copied / 1e9, prompt["flops"] / 1e10))
    assert micro["n_sweeps"] == 3
    assert micro["copied_bytes"] == 3 * expert_bytes
    assert one["copied_bytes"] == expert_bytes
    assert one["restored_bytes"] == micro["restored_bytes"] == expert_bytes * 8 // 32
    assert micro["first_token"] == one["first_token"] == one["engine_first_token"]


def test_a_prompt_after_the_other_ways_is_as_before():
    with opened(SETUP) as rig:
        tokens = rig.tokens(50)
        before = read(rig, tokens)
        other = drop_everything(rig, tokens, micro_batch=7)
        after = read(rig, tokens)
    assert before.first_token == other["first_token"] == after.first_token
    assert other["n_sweeps"] == 8
    assert after.handover.n_tokens == 50
    assert after.ttft_s > 0


def test_the_bound_is_the_longer_of_link_and_products():
    with opened(SETUP) as rig:
        by_flops = bound_s(rig, 100, 0)
        assert bound_s(rig, 200, 0) > 2 * by_flops * 0.99  # attention grows faster than the prompt
        assert bound_s(rig, 100, 10**12) == pytest.approx(1000)
        slow = dataclasses.replace(rig.rates, flops_per_s=10**9)
        rig.rates = slow
        assert bound_s(rig, 100, 0) == pytest.approx(10 * by_flops)


def test_busy_time_is_summed_by_what_ran():
    spans = [Span("a", 0.0, 1.0), Span("b", 0.5, 0.75), Span("a", 2.0, 2.5)]
    assert busy_s(spans) == {"a": 1.5, "b": 0.25}


@pytest.mark.parametrize(
    "change", [{"lengths": ()}, {"lengths": (0,)}, {"arms_at": (0,)}, {"micro_batches": (0,)}, {"repeats": 0}]
)
def test_what_cannot_be_measured_is_refused(change):
    with pytest.raises(UserError, match="use 1 or more"):
        bench_prefill(Report("prefill", []), SETUP, **{"lengths": (8,)} | change)
