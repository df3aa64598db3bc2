"""Policies on what a trained model really routed: the recorded trace of the demo model on held-out text."""

import pytest
from bench.policy_replay import belady, replay

from makeway.experts.policies import RANKINGS, Gate
from makeway.experts.trace import TraceReader
from tests.conftest import DATA


@pytest.fixture(scope="module")
def trace():
    with TraceReader(DATA / "demo-routing.trace") as reader:
        records = list(reader)
        assert not reader.truncated
        return reader.header, records


def hit_rate(result):
    return result.n_hits / result.n_lookups


def test_it_is_the_demo_model_reading_and_writing(trace):
    header, records = trace
    assert (header.n_layers, header.n_experts, header.top_k) == (8, 32, 4)
    assert {record.phase for record in records} == {"prefill", "decode"}
    assert sum(len(r.ids) for r in records if r.phase == "prefill") == 8 * 256
    assert all((record.ids >= 0).all() for record in records), "every layer of every token"


def test_order_of_the_policies(trace):
    header, records = trace
    tail = records[: len(records) // 2]
    rates = {name: hit_rate(replay(header, tail, name=name, n_slots=8, gate=Gate())) for name in RANKINGS}
    best = hit_rate(belady(header, tail, n_slots=8))
    assert all(rate < best for rate in rates.values()), "nobody beats the optimum"
    assert rates["lfru"] == max(rates.values()), "the default is the best one here"
    assert rates["static"] == min(rates.values()), "routing has no static skew worth a fixed choice"
    more = hit_rate(replay(header, tail, name="lfru", n_slots=16, gate=Gate()))
    assert more > rates["lfru"] + 0.15
