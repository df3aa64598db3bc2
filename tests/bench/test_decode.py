"""Decode: rows and hit rates are those asked for, bytes are what the counters say, the bound follows from them."""

import dataclasses

import pytest

from makeway import UserError
from makeway.bench.decode import Lengths, StepBytes, bench_decode, bound_s, needed_context, step_bytes
from makeway.bench.report import Report
from makeway.bench.rig import Counts, Setup, opened
from makeway.config import EngineConfig
from makeway.memory.rates import Rates

LENGTHS = Lengths(first=4, most=24, warm=2, settle=4, steps=2, repeats=2)
RATES = Rates(10**9, 10**9, 10**10, 10**12, 10**9)


def setup(context, **config):
    made = EngineConfig(device="cpu", context=context, parallel=2, slots=24, prefix_ram=0, drafter="none", **config)
    return Setup(shape="tiny-qwen3", layers=1, config=made, rates=RATES)


def test_a_run_shows_rows_contexts_and_held_hit_rates():
    report = Report("decode", ["bench", "decode"], allow_reference=True)
    context = needed_context((1, 2), (16, 40), lengths=LENGTHS, levels=3)
    bench_decode(report, setup(context), rows=(1, 2), contexts=(16, 40), hit_rates=(0.5, 1.0, 0.0), lengths=LENGTHS)
    document = report.to_json()
    names = [figure["name"] for figure in document["figures"]]
    assert names == [
        "1 row, context 16, first 4", "1 row, context 16, warm",
        "2 rows, context 16, first 4", "2 rows, context 16, warm",
        "1 row, context 40, first 4", "1 row, context 40, warm",
        "1 row, context 16, 100 % held", "1 row, context 16, 50 % held", "1 row, context 16, 0 % held",
        "2 rows, context 16, 100 % held", "2 rows, context 16, 50 % held", "2 rows, context 16, 0 % held",
    ]  # fmt: skip
    assert "reference: attend" in document["kernels"]
    assert "reference" in document["kernels"]
    held = [run for run in document["runs"] if "wanted_hit_rate" in run]
    for run in held:
        moved = run["bytes"]
        assert run["hit_rate"] == pytest.approx(run["wanted_hit_rate"], abs=0.25)
        device = moved["weights"] + moved["hits"] + moved["kv"] + moved["indexer"] + moved["states"]
        assert run["bound_s"] == pytest.approx(moved["link"] / 1e9 + device / 1e10)
        assert run["tokens_per_s"] == pytest.approx(run["rows"] / run["median_s"])
    # The same routing at every level, so hits and misses share the same bytes.
    assert held[2]["hit_rate"] == 0.0
    assert held[2]["bytes"]["hits"] == 0
    assert held[0]["hit_rate"] > held[1]["hit_rate"] > 0
    assert held[0]["bytes"]["hits"] == pytest.approx(held[2]["bytes"]["link"], rel=0.2)
    assert held[5]["bytes"]["link"] > held[2]["bytes"]["link"]


def test_numbers_of_the_reference_need_consent():
    report = Report("decode", ["bench", "decode"])
    few = dataclasses.replace(LENGTHS, most=8)
    bench_decode(report, setup(256), rows=(1,), contexts=(8,), hit_rates=(), lengths=few, shows_launches=True)
    assert sum(launch["n"] for launch in report.facts["launches"]) > 10
    assert any("a step of one row launches" in remark for remark in report.remarks)
    with pytest.raises(UserError, match="--allow-reference"):
        report.to_json()


def test_bytes_of_a_step_are_those_of_the_model():
    with opened(setup(256)) as rig:
        counts = Counts(hits=30, misses=6, hit_bytes=3000, guesses=4, right_guesses=3, expert_bytes=100.0)
        moved = step_bytes(rig, counts, n_steps=3, rows=2, context=50)
        facts = rig.plan.facts
        # 1 layer, 2 KV heads of 64 values, keys and values, in float32.
        assert moved == StepBytes(
            link=200.0, weights=facts.resident_bytes(on_host=False, is_mtp=False), hits=1000.0,
            kv=2 * 50 * 2 * 2 * 64 * 4, indexer=0, states=0,
        )  # fmt: skip
        assert bound_s(rig, moved) == pytest.approx(200 / 1e9 + moved.device / 1e10)
        assert counts.hit_rate == pytest.approx(30 / 36)
        later = Counts(hits=31, misses=8, hit_bytes=3100, guesses=6, right_guesses=4, expert_bytes=100.0).since(counts)
        assert (later.guesses, later.right_guesses) == (2, 1)
        assert (later.hits, later.misses, later.miss_bytes) == (1, 2, 200)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"rows": ()}, "--rows"),
        ({"rows": (0,)}, "--rows"),
        ({"contexts": (0,)}, "--contexts"),
        ({"hit_rates": (1.5,)}, "--hits"),
        ({"rows": (3,)}, "at most 2 rows"),
        ({"lengths": Lengths(steps=0)}, "--steps"),
    ],
)
def test_what_cannot_be_measured_is_refused(change, match):
    with pytest.raises(UserError, match=match):
        bench_decode(Report("decode", []), setup(256), **{"rows": (1,), "contexts": (8,), "lengths": LENGTHS} | change)
