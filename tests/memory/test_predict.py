"""Predictions: their parts by hand, their directions, and bounds measured elsewhere."""

from dataclasses import replace

import pytest

from makeway.errors import UserError
from makeway.memory import predict
from makeway.memory.plan import plan_memory
from makeway.memory.rates import DEFAULT_RATES, RATES, rates_of
from makeway.memory.sizes import PlanRequest
from tests.memory.example import GIB, example_flash_next, small_facts


@pytest.fixture(scope="module")
def flash():
    return plan_memory(example_flash_next(), PlanRequest(24 * GIB, 262_144, drafts=3), rates=RATES["h200"])


def test_copied_bytes_are_exact_when_all_is_copied():
    layers = small_facts().layers_with_experts(False)  # 8 experts of 1000 and 1300 bytes
    assert predict.copied_bytes(layers, 0, 5, copies_all=True) == 8 * 2300
    assert predict.copied_bytes(layers, 3, 5, copies_all=True) == 5 * 2300
    assert predict.copied_bytes(layers, 99, 5, copies_all=True) == 0
    assert predict.copied_bytes(layers, 0, 1, copies_all=False) == 2 * 2300
    assert predict.copied_bytes(layers, 0, 10**6, copies_all=False) == 8 * 2300


def test_distinct_share_against_counting():
    assert predict.distinct_share(8, 2, 1) == pytest.approx(0.25)
    assert predict.distinct_share(4, 1, 2) == pytest.approx(7 / 16)  # 16 pairs: 4 equal, 12 different
    assert predict.distinct_share(8, 8, 1) == 1.0


def test_all_experts_cross_the_link_in_one_and_a_half_seconds(flash):
    """1.43 s for all experts of the trunk, minus what is resident; a sweep needs none of the MTP block."""
    ttft = flash.predict_ttft(8192)
    assert ttft.lending.copies_all
    assert 1.1 < ttft.link_s < 1.43
    assert ttft.total_s >= max(ttft.link_s, ttft.flops_s)
    kept = min(ttft.lending.n_kept, flash.n_slots)
    assert ttft.link_bytes == sum((512 - kept) * layer.expert_bytes for layer in flash.sizes.sweep_layers)
    assert ttft.restore_s * RATES["h200"].link_bytes_per_s == pytest.approx(ttft.lending.restored_bytes)


def test_a_longer_prompt_takes_longer_and_several_sweeps_cost_several_crossings(flash):
    lengths = (1, 8, 64, 256, 1024, 8192, 32_768, 262_144)
    times = [flash.predict_ttft(n).total_s for n in lengths]
    assert times == sorted(times)
    cut = replace(flash.request, sweep_tokens=4096)
    short = plan_memory(flash.facts, cut, rates=flash.rates)
    lending = short.lend_for(32_768)
    assert lending.n_sweeps == 8
    assert lending.copied_bytes == 8 * sum(
        (512 - min(lending.n_kept, short.n_slots)) * layer.expert_bytes for layer in short.sizes.sweep_layers
    )


def test_short_prompts_copy_only_what_they_route(flash):
    assert 8 < flash.copy_all_tokens <= 1024
    assert not flash.lend_for(8).copies_all
    forced = plan_memory(flash.facts, replace(flash.request, copy_all_tokens=0), rates=flash.rates)
    assert forced.lend_for(1).copies_all
    late = plan_memory(flash.facts, replace(flash.request, copy_all_tokens=10**9), rates=flash.rates)
    assert not late.lend_for(262_144).copies_all


def test_decode_by_its_parts(flash):
    """facts.md: a token with 15 % misses takes about 4.3 ms of link at 55 GB/s, 4.7 at the fetch rate."""
    step = flash.predict_decode(0.85, 1)
    assert step.link_s == pytest.approx(4.7e-3, rel=0.05)
    compute_s = max(step.hbm_s, step.flops_s) + step.overhead_s
    assert step.step_s == pytest.approx(step.link_s + compute_s)
    guessing = plan_memory(flash.facts, replace(flash.request, guesses=4), rates=flash.rates)
    hidden_s = 0.4 * min(step.link_s, compute_s)
    assert guessing.predict_decode(0.85, 1).step_s == pytest.approx(step.step_s - hidden_s)
    assert flash.predict_decode(1.0, 1).link_bytes == 0
    steps = [flash.predict_decode(hits, 4).step_s for hits in (0.0, 0.5, 0.9, 1.0)]
    assert steps == sorted(steps, reverse=True)
    rows = [flash.predict_decode(0.8, n).step_s for n in (1, 2, 4, 8)]
    assert rows == sorted(rows)
    near, far = (flash.predict_decode(1.0, 1, context_tokens=n).hbm_bytes for n in (0, 100_000))
    assert far - near == 2051 * 24 * 1024 + 100_000 * 768
    for bad in (-0.1, 1.1):
        with pytest.raises(ValueError, match="hit_rate"):
            flash.predict_decode(bad, 1)
    with pytest.raises(ValueError, match="one token"):
        flash.lend_for(0)


def test_attention_pairs_by_brute_force():
    facts = replace(small_facts(), attention_flops_per_pair=7, attention_budget_tokens=5, indexer_flops_per_pair=3)
    plan = plan_memory(facts, PlanRequest(10**6, 64, reserve_bytes=0))
    for n_tokens in (1, 4, 5, 6, 50):
        seen = sum(min(position + 1, 5) for position in range(n_tokens))
        pairs = sum(position + 1 for position in range(n_tokens))
        dense, routed = predict.sweep_flops(plan, n_tokens)
        assert dense == n_tokens * facts.dense_flops_per_token + 7 * seen + 3 * pairs
        assert routed == n_tokens * 2 * (2 * 3 * 32 * 16 * 2)


def test_break_even_lends_only_when_it_pays():
    """Lending starts with the first prompt that two small rooms would hold, because a crossing costs more."""
    plan = plan_memory(example_flash_next(), PlanRequest(24 * GIB, 65_536), rates=RATES["rtx3090"])
    first = plan.lend_from_tokens
    assert first is not None
    assert first > plan.short_sweep_tokens >= 256
    lend = plan.lend_for(first)
    stay = plan.lending(first, plan.short_sweep_tokens, plan.stay_shape, n_kept=plan.decode.n_ranks)
    assert predict.lending_cost_s(plan, lend) <= predict.lending_cost_s(plan, stay)


def test_rates_must_be_positive():
    for field in ("link_bytes_per_s", "flops_per_s", "layer_overhead_s"):
        with pytest.raises(UserError, match=field):
            replace(RATES["cpu"], **{field: -1})
    with pytest.raises(UserError, match="hbm"):
        replace(RATES["cpu"], hbm_bytes_per_s=0)
    assert replace(RATES["cpu"], layer_overhead_s=0.0).layer_overhead_s == 0.0


def test_a_card_is_known_by_its_name():
    assert rates_of("NVIDIA H200") is RATES["h200"]
    assert rates_of("NVIDIA GeForce RTX 4090 D") is RATES["rtx4090"]
    assert rates_of("Unknown 9000") is DEFAULT_RATES
