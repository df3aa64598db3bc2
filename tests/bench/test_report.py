"""Reports: medians beside bounds, the file, the last line, and the refusal of unintended kernels."""

import io
import json
import re

import pytest
from rich.console import Console

from makeway import UserError
from makeway.bench.report import Figure, Report, measure


def printed(report, folder):
    out = io.StringIO()
    path = report.finish(folder, Console(file=out, width=120))
    return path, out.getvalue()


def test_runs_are_warmed_up_and_repeated():
    calls = []
    clock = iter(range(10, 20))

    def timed(run):
        run()
        return next(clock)

    assert measure(lambda: calls.append(0), clock=timed, warmup=3, repeats=4) == [10, 11, 12, 13]
    assert len(calls) == 7
    for warmup, repeats in ((-1, 1), (0, 0)):
        with pytest.raises(UserError, match="repeats"):
            measure(list, warmup=warmup, repeats=repeats)


def test_shares_of_bounds_are_at_best_1_for_times_and_rates():
    time = Figure("step", "ms", (9.0, 8.0, 16.0), is_time=True, bound=4.5)
    assert time.median == 9.0
    assert time.share == 0.5
    rate = Figure.rate("link", 100.0, [4.0, 2.0, 1.0], unit="GB/s", bound=200.0)
    assert rate.samples == (25.0, 50.0, 100.0)
    assert rate.share == 0.25
    assert Figure("x", "s", (1.0,)).share is None


def test_the_last_line_and_the_file_say_the_same(tmp_path):
    report = Report("link", ["bench", "link", "--device", "a b"], kernels={"triton"})
    report.figures.append(Figure("step", "ms", (9.0, 8.0, 16.0), is_time=True, bound=4.5, note="four rows"))
    report.facts["rates"] = None
    report.remarks.append("a remark")
    path, text = printed(report, tmp_path / "new" / "results")
    assert re.fullmatch(r"link-\d{8}-\d{6}\.json", path.name)
    lines = text.splitlines()
    document = json.loads(lines[-1])
    assert document == json.loads(path.read_text())
    assert document["figures"][0] == {
        "name": "step", "unit": "ms", "median": 9.0, "min": 8.0, "max": 16.0, "n": 3, "bound": 4.5,
        "share_of_bound": 0.5, "note": "four rows",
    }  # fmt: skip
    assert document["command"] == "makeway bench link --device 'a b'"
    assert document["machine"]["n_cores"] >= 1
    assert document["versions"]["torch"]
    assert any(re.search(r"step +9 +8 +16 +ms +4\.5 +50 % +four rows", line) for line in lines)
    assert "kernels: triton" in lines
    assert "a remark" in lines


def test_numbers_of_reference_kernels_are_not_printed_unless_asked_for(tmp_path):
    def report(allow):
        made = Report("decode", ["bench", "decode"], kernels={"triton", "reference"}, allow_reference=allow)
        made.figures.append(Figure("step", "ms", (123.456,), is_time=True))
        return made

    out = io.StringIO()
    with pytest.raises(UserError, match="--allow-reference"):
        report(False).finish(tmp_path, Console(file=out))
    assert out.getvalue() == ""
    assert list(tmp_path.iterdir()) == []
    _, text = printed(report(True), None)
    assert "123.5" in text
    assert "kernels: reference, triton" in text


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"file.*--results"):
        printed(Report("link", []), tmp_path / "file")
