"""The offline replay: Belady against brute force, policies under their bound, the output, the plot."""

import importlib.util
import itertools
import json
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.experts.policies import RANKINGS, Gate
from makeway.experts.trace import TraceHeader
from tests.conftest import ROOT
from tests.experts.synthetic import records_of, synthetic_routing, write_trace

SPEC = importlib.util.spec_from_file_location("policy_replay", ROOT / "bench" / "policy_replay.py")
assert SPEC is not None
bench = importlib.util.module_from_spec(SPEC)
sys.modules["policy_replay"] = bench
SPEC.loader.exec_module(bench)


def best_hits(steps: list[frozenset[int]], n_slots: int) -> int:
    """Most hits of one layer over every way to fill the cache after each step (subsets of cached + routed)."""
    best = {frozenset(): 0}
    for routed in steps:
        following: dict[frozenset[int], int] = {}
        for cached, hits in best.items():
            now = hits + len(cached & routed)
            pool = sorted(cached | routed)
            for size in range(min(n_slots, len(pool)) + 1):
                for kept in itertools.combinations(pool, size):
                    key = frozenset(kept)
                    following[key] = max(following.get(key, -1), now)
        best = following
    return max(best.values())


@given(
    st.lists(
        st.lists(st.lists(st.integers(-1, 4), min_size=2, max_size=2), min_size=2, max_size=2), min_size=1, max_size=7
    ),
    st.integers(0, 4),
)
@settings(max_examples=50, deadline=None)
def test_belady_is_the_optimum(steps, n_slots):
    header = TraceHeader(2, 5, 2, "tiny")
    ids = np.array(steps)[:, None]  # [steps, rows 1, layers, k]
    result = bench.belady(header, records_of(ids), n_slots=n_slots)
    expected = sum(
        best_hits([frozenset(x for x in step[layer] if x >= 0) for step in steps], n_slots) for layer in range(2)
    )
    assert result.n_hits == expected
    one_layer = bench.belady(header, records_of(ids), n_slots=n_slots, block=0)
    assert one_layer == result, "the size of a block changes nothing"


@pytest.fixture(scope="module")
def routing():
    header = TraceHeader(3, 32, 4, "synthetic", expert_bytes=(100, 100, 300))
    return header, synthetic_routing(250, n_layers=3, n_experts=32, top_k=4, rows=2, seed=3)


@pytest.mark.parametrize("name", list(RANKINGS))
def test_no_policy_beats_belady_and_counts_agree(routing, name):
    header, ids = routing
    records = records_of(ids)
    for n_slots in (0, 4, 16, 32):
        bound = bench.belady(header, records, n_slots=n_slots)
        result = bench.replay(header, records, name=name, n_slots=n_slots, gate=Gate(2, 8))
        assert (
            result.n_lookups
            == bound.n_lookups
            == sum(len(np.unique(step[:, layer])) for step in ids for layer in range(3))
        )
        assert result.n_hits <= bound.n_hits
        assert result.n_uploads <= 250 * 3 * 2
        if n_slots == 0:
            assert (result.n_hits, result.n_uploads) == (0, 0)
        if n_slots == 32:
            assert result.n_uploads <= 3 * 32, "nothing is evicted when all fit"
            assert result.hit_rate > 0.8
    again = bench.replay(header, records, name=name, n_slots=4, gate=Gate(2, 8))
    first = bench.replay(header, records, name=name, n_slots=4, gate=Gate(2, 8))
    assert (again.n_hits, again.n_uploads) == (first.n_hits, first.n_uploads)


def test_learning_policies_beat_random_on_skewed_routing(routing):
    header, ids = routing
    hits = {
        name: bench.replay(header, records_of(ids), name=name, n_slots=8, gate=Gate(1, 1)).hit_rate for name in RANKINGS
    }
    for name in ("lfu-decay", "lfru", "static"):
        assert hits[name] > hits["random"], hits


def test_the_gate_raises_the_yield(routing):
    header, ids = routing
    opened, gated = (
        bench.replay(header, records_of(ids), name="lru", n_slots=8, gate=gate) for gate in (Gate(1, 1), Gate(3, 16))
    )
    assert gated.n_uploads < opened.n_uploads
    assert gated.bytes_yield > opened.bytes_yield


def test_uploads_stay_under_the_cap_and_bytes_follow_the_layers(routing):
    header, ids = routing
    result = bench.replay(header, records_of(ids), name="lru", n_slots=8, gate=Gate(1, 1), uploads_per_layer=1)
    assert result.n_uploads <= 250 * 3
    assert 100 * result.n_uploads <= result.uploaded_bytes <= 300 * result.n_uploads
    off = bench.replay(header, records_of(ids), name="lru", n_slots=8, gate=Gate(1, 1), uploads_per_layer=0)
    assert (off.n_uploads, off.n_hits) == (0, 0)


def test_a_restored_prompt_warms_the_cache(routing, tmp_path):
    header, ids = routing
    prompt = ids[:100, 0]
    write_trace(tmp_path / "t", header, ids[100:120], prompt=prompt)
    from makeway.experts.trace import TraceReader

    with TraceReader(tmp_path / "t") as reader:
        records = list(reader)
    cold = bench.replay(header, records, name="lfu-decay", n_slots=12, gate=Gate(3, 16))
    warm = bench.replay(header, records, name="lfu-decay", n_slots=12, gate=Gate(3, 16), lend_all=True)
    assert warm.n_restored == 3 * 12
    assert warm.hit_rate > cold.hit_rate
    assert warm.uploaded_bytes >= 12 * 500


def test_the_command_prints_a_table_and_one_json_line_last(routing, tmp_path, capsys):
    header, ids = routing
    write_trace(tmp_path / "t", header, ids[:40])
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole[:-3])
    assert bench.main([str(tmp_path / "t"), "--slots", "8,4", "--policies", "lru,static", "--gate", "1,1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    made = json.loads(lines[-1])
    assert made["truncated"] is True
    assert "middle of a record" in lines[1]
    order = [(row["policy"], row["n_slots"]) for row in made["results"]]
    assert order == [(name, n) for n in (4, 8) for name in ("lru", "static", "belady")]
    assert all(0 <= row["hit_rate"] <= 1 and row["n_steps"] == 39 for row in made["results"])


def test_bad_input_is_told(tmp_path, capsys):
    (tmp_path / "t").write_bytes(b"nonsense")
    assert bench.main([str(tmp_path / "t")]) == 2
    assert "not a makeway routing trace" in capsys.readouterr().err
    for wrong in (["--slots", "4,x"], ["--policies", "best"], ["--slots", "-4"]):
        with pytest.raises(SystemExit):
            bench.main([str(tmp_path / "t"), *wrong])
    capsys.readouterr()


def test_a_trace_without_decode_steps(tmp_path, capsys):
    header = TraceHeader(1, 8, 2, "prompt only")
    write_trace(tmp_path / "t", header, np.zeros((0, 1, 1, 2), int), prompt=np.array([[[0, 1]]]))
    assert bench.main([str(tmp_path / "t"), "--slots", "2", "--policies", "lru"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["results"][0]["n_lookups"] == 0


def test_the_plot_is_a_png_or_says_what_is_missing(routing, tmp_path, monkeypatch):
    header, ids = routing
    results = [bench.replay(header, records_of(ids[:20]), name="lru", n_slots=n, gate=Gate(1, 1)) for n in (4, 8)]
    results.append(bench.belady(header, records_of(ids[:20]), n_slots=4))
    if importlib.util.find_spec("matplotlib") is not None:
        bench.plot(results, tmp_path / "p.png", title="test")
        assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match="matplotlib"):
        bench.plot(results, tmp_path / "q.png", title="test")
