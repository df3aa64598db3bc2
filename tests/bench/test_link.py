"""Rates of the machine: what can be measured without a GPU, and how figures become rates."""

import numpy as np
import pytest

from makeway import UserError
from makeway.bench import link
from makeway.bench.report import Figure, Report


def test_without_a_gpu_only_the_host_is_measured_and_that_is_said(monkeypatch):
    report = Report("link", [])
    with pytest.raises(UserError, match="512 MiB"):
        link.bench_link(report, device="cpu", host_bytes=1 << 20)
    monkeypatch.setattr(link, "MIN_HOST_BYTES", 1 << 20)
    link.bench_link(report, device="cpu", repeats=1, host_bytes=16 << 20)
    assert report.figures
    assert all(f.name.startswith("host memory read, ") for f in report.figures)
    assert report.facts["rates"] is None
    assert "no GPU" in report.remarks[0]


def test_every_byte_is_read(monkeypatch):
    """By each number of threads: a sum over what the reading saw is the sum of all words."""
    words = np.arange((20 << 20) // 8, dtype=np.int64)
    seen = []
    slices = np.array_split

    def recorded(array, n):
        parts = slices(array, n)
        seen.append(sum(int(p.sum()) for p in parts))
        return parts

    monkeypatch.setattr(link.np, "array_split", recorded)
    figures = link.host_read(words, repeats=1)
    assert seen == [int(words.sum())] * len(figures)
    assert all(f.median > 0 for f in figures)


def test_rates_come_from_the_figures_they_name():
    figures = [
        Figure("copy host to device, 64 MiB, queued", "GB/s", (54.0, 55.0, 56.0)),
        Figure("copy host to device, 64 MiB, each waited for", "GB/s", (99.0,)),
        Figure("copy host to device, 256 MiB, queued", "GB/s", (98.0,)),
        Figure("kernel reads host memory, 3 MiB", "GB/s", (97.0,)),
        Figure("kernel reads host memory, 30 MiB", "GB/s", (50.0,)),
        Figure("device memory copied", "GB/s", (4300.0,)),
        Figure("device memory read", "GB/s", (3900.0,)),
        Figure("bf16 product, 8192^3", "TFLOP/s", (790.0,)),
        Figure("bf16 products, 64 experts", "TFLOP/s", (344.5,)),
        Figure("host memory read, 1 thread", "GB/s", (12.0,)),
        Figure("host memory read, 16 threads", "GB/s", (86.0,)),
    ]
    assert link.rates_of(figures) == {
        "link_bytes_per_s": 55 * 10**9,
        "fetch_bytes_per_s": 50 * 10**9,
        "hbm_bytes_per_s": 4300 * 10**9,
        "flops_per_s": 344_500 * 10**9,
        "host_read_bytes_per_s": 86 * 10**9,
    }
    assert link.rates_of([f for f in figures if not f.name.startswith("kernel")]) is None
