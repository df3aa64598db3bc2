"""The picture: rates over time, busy time, and a PNG of a real prompt."""

import importlib.util
import sys

import numpy as np
import pytest

from makeway import UserError
from makeway.bench.activity import COPY, Span
from makeway.bench.picture import bench_picture, draw, link_rate, union_s
from makeway.bench.report import Report
from makeway.bench.rig import Setup
from makeway.config import EngineConfig

SETUP = Setup(
    shape="tiny-flash-next",
    layers=4,
    config=EngineConfig(device="cpu", context=128, parallel=1, slots=8, prefix_ram=0, drafter="none"),
)
SPANS = [Span(COPY, 0.0, 1.0, 1000), Span("experts", 0.5, 2.0), Span(COPY, 2.5, 3.0, 2000), Span("experts", 1.0, 1.5)]


def test_the_link_s_rate_over_time_adds_up_to_the_bytes():
    rate = link_rate(SPANS, until=4.0, n_bins=8)
    assert rate.tolist() == [1000, 1000, 0, 0, 0, 4000, 0, 0]
    for n_bins in (1, 3, 7):
        assert link_rate(SPANS, until=4.0, n_bins=n_bins).sum() * 4.0 / n_bins == pytest.approx(3000)


def test_busy_time_counts_overlaps_once_and_ends_where_told():
    assert union_s([s for s in SPANS if s.what == "experts"], until=10) == pytest.approx(1.5)
    assert union_s(SPANS, until=10) == pytest.approx(2.5)
    assert union_s(SPANS, until=0.75) == pytest.approx(0.75)
    rng = np.random.default_rng(0)
    starts = rng.uniform(0, 5, 40)
    spans = [Span("x", float(a), float(a + d)) for a, d in zip(starts, rng.uniform(0, 0.3, 40), strict=True)]
    grid = np.linspace(0, 6, 60_001)
    covered = np.zeros(len(grid), bool)
    for s in spans:
        covered |= (grid >= s.begin_s) & (grid < s.end_s)
    assert union_s(spans, until=6) == pytest.approx(covered.mean() * 6, abs=5e-3)


@pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib")
def test_a_prompt_is_drawn(tmp_path):
    report = Report("picture", ["bench", "picture"], allow_reference=True)
    path = tmp_path / "new" / "prompt.png"
    bench_picture(report, SETUP, path, n_tokens=40)
    assert path.read_bytes().startswith(b"\x89PNG")
    busy = report.to_json()["busy"]
    assert 0 < busy["link"] < 1
    assert 0 < busy["compute"] < 1
    with pytest.raises(UserError, match=r"prompt\.xyz"):
        draw(SPANS, tmp_path / "prompt.xyz", title="", first_token_s=1.0)


def test_what_is_missing_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        bench_picture(Report("picture", []), SETUP, tmp_path / "p.png")
