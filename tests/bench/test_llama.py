"""llama.cpp beside makeway: its commands, its results, and what may not be compared."""

import json
import shlex

import pytest

from makeway import UserError
from makeway.bench.llama import commands, earlier, read_results, side_by_side
from makeway.bench.report import Report

# Two results as `llama-bench -o json` prints them (tools/llama-bench/README.md), with numbers of no machine.
LINE = {
    "build_commit": "0", "build_number": 11549, "cpu_info": "cpu", "gpu_info": "A GPU", "backends": "CUDA",
    "model_filename": "m.gguf", "n_batch": 2048, "n_ubatch": 512, "n_threads": 8, "type_k": "f16", "type_v": "f16",
    "n_gpu_layers": 99, "n_cpu_moe": 99, "moe_cache": "off", "load_mode": "none", "n_prompt": 256, "n_gen": 0,
    "n_depth": 0, "avg_ts": 101.0, "stddev_ts": 1.0, "samples_ts": [100.0, 102.0],
}  # fmt: skip
GENERATED = LINE | {"n_prompt": 0, "n_gen": 128, "n_depth": 512, "samples_ts": [40.0, 41.0, 45.0]}


def write(path, document):
    path.write_text(json.dumps(document))
    return path


def own(bench, gpu, **facts):
    return {"bench": bench, "machine": {"gpu": gpu}, **facts}


def test_commands_are_shell_lines_with_one_result_file_each(tmp_path):
    lines = commands(tmp_path / "a model.gguf", ubatches=(512, 8192), cache_mib=9216, out="at home/llama")
    parsed = [shlex.split(line) for line in lines]
    assert [p[2] for p in parsed] == [str(tmp_path / "a model.gguf")] * 3
    assert [p[-1] for p in parsed] == [f"at home/llama-{n}.json" for n in ("512", "8192", "cache")]
    for p in parsed:
        assert p[p.index("-ncmoe") + 1] == "99"
        assert int(p[p.index("-b") + 1]) >= int(p[p.index("-ub") + 1])
    assert [p[p.index("--moe-cache") + 1] for p in parsed] == ["off", "off", "9216"]
    assert len(commands(tmp_path, ubatches=(512,))) == 1


def test_results_of_both_stand_in_one_table(tmp_path):
    theirs = write(tmp_path / "llama.json", [LINE, GENERATED])
    decode = write(
        tmp_path / "decode.json",
        own("decode", "A GPU", runs=[{"name": "1 row, warm", "tokens_per_s": 90.0, "hit_rate": 0.5}]),
    )
    prompts = [{"n_tokens": 256, "ttft_s": [2.0, 1.0], "handovers": []}, {"n_tokens": 256, "arm": "x", "ttft_s": 9.0}]
    prefill = write(tmp_path / "prefill.json", own("prefill", "A GPU", prompts=prompts))
    report = Report("llama", ["bench", "llama"])
    side_by_side(report, [theirs], [decode, prefill])
    figures = {figure.name: figure for figure in report.figures}
    assert figures["llama.cpp b11549: prompt of 256, ub 512"].samples == (100.0, 102.0)
    assert "moe_cache off" in figures["llama.cpp b11549: prompt of 256, ub 512"].note
    assert figures["llama.cpp b11549: decode, 128 tokens behind 512, ub 512"].median == 41.0
    assert figures["makeway: 1 row, warm"].note == "50.0 % hits"
    assert figures["makeway: prompt of 256"].samples == (128.0, 256.0)
    assert len(figures) == 4


def test_results_of_two_gpus_are_refused(tmp_path):
    theirs = write(tmp_path / "llama.json", [LINE])
    mine = write(tmp_path / "decode.json", own("decode", "another GPU", runs=[]))
    with pytest.raises(UserError, match=r"A GPU.*another GPU|another GPU.*A GPU"):
        side_by_side(Report("llama", []), [theirs], [write(tmp_path / "x.json", own("decode", "another GPU", runs=[]))])
    side_by_side(Report("llama", []), [], [mine])


@pytest.mark.parametrize(
    "document",
    [{}, [], [1], [LINE | {"samples_ts": [0.0]}], [{k: v for k, v in LINE.items() if k != "n_ubatch"}],
     [LINE | {"n_prompt": "many"}]],
)  # fmt: skip
def test_what_is_no_result_is_named(tmp_path, document):
    path = write(tmp_path / "wrong.json", document)
    with pytest.raises(UserError, match=r"wrong\.json.*llama-bench"):
        read_results(path)


def test_files_that_are_none_are_named(tmp_path):
    with pytest.raises(UserError, match=r"none\.json"):
        read_results(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("{")
    with pytest.raises(UserError, match="not a JSON"):
        read_results(tmp_path / "text.json")
    for document in ({"bench": "decode"}, [], own("link", None), own("decode", None, runs=[{"name": "x"}])):
        with pytest.raises(UserError, match=r"own\.json"):
            side_by_side(Report("llama", []), [], [write(tmp_path / "own.json", document)])
    with pytest.raises(UserError, match=r"gone\.json"):
        side_by_side(Report("llama", []), [], [tmp_path / "gone.json"])


def test_earlier_numbers_say_that_they_are_earlier():
    figures = earlier("flash-next")
    assert all("not this run" in figure.note and "earlier" in figure.name for figure in figures)
    assert any(figure.samples == (125.0, 129.0) for figure in figures)
    assert earlier("tiny-qwen3") == []
