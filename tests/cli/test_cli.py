import json
import os
import signal
import subprocess
import sys
import time

import pytest

from makeway.cli import main
from tests.conftest import golden_path

MODEL = "qwen4exp-k96-UD-Q4_K_XL.gguf"


def run(capsys, *arguments):
    """Exit code, stdout and stderr of a command in this process."""
    with pytest.raises(SystemExit) as end:
        main([str(a) for a in arguments])
    out = capsys.readouterr()
    return end.value.code or 0, out.out, out.err


def test_run_writes_the_answer_and_nothing_else_to_stdout(capsys):
    path = golden_path(MODEL)
    code, out, err = run(capsys, "run", path, "-p", "The router", "-n", 5, "--json")
    assert code == 0
    document = json.loads(out)
    assert len(document["tokens"]) == 5
    assert document["finish_reason"] == "length"
    assert document["status"]["device"] in ("cpu", "cuda:0")
    assert "answer tokens" in err
    code, plain, err = run(capsys, "run", path, "-p", "The router", "-n", 5, "-q")
    assert code == 0
    assert plain.rstrip("\n") == document["text"].rstrip("\n")
    assert err == ""


def test_drafts_are_in_the_summary_and_change_nothing(capsys):
    arguments = ("run", golden_path("qwen35moe-base-bf16.gguf"), "-p", "The router", "-n", 6, "--ignore-eos", "--json")
    documents, summaries = [], []
    for drafter, *more in (("none",), ("mtp", "--draft-depth", 2), ("mtp+lookup",)):
        code, out, err = run(capsys, *arguments, "--drafter", drafter, *more)
        assert code == 0
        documents.append(json.loads(out))
        summaries.append(err)
    assert documents[0]["tokens"] == documents[1]["tokens"] == documents[2]["tokens"]
    assert documents[1]["timings"]["drafts"]["n_drafted"] > 0
    assert documents[1]["status"]["drafts"]["drafter"] == "mtp"
    assert "drafts accepted" not in summaries[0]
    assert "drafts accepted" in summaries[1]


def test_chat_uses_the_template_of_the_file(capsys):
    path = golden_path(MODEL)
    code, chat, _ = run(capsys, "run", path, "-p", "hi", "-n", 3, "--chat", "--system", "x", "--json", "-q")
    assert code == 0
    assert json.loads(chat)["timings"]["n_prompt"] > 20


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "nothing.gguf", "-p", "a"], "no such file"),
        (["run", "MODEL", "-q", "-p", ""], "empty"),
        (["run", "MODEL", "-p", "a", "-n", "0"], "at least 1"),
        (["run", "MODEL", "-p", "a", "-t", "-1"], "temperature"),
        (["run", "MODEL", "-p", "a", "-t", "nan"], "temperature"),
        (["run", "MODEL", "-p", "a", "-c", "99999"], "longest context is 4096"),
        (["run", "MODEL", "-p", "a", "--device", "tpu"], "auto, cpu or cuda"),
        (["run", "MODEL", "-p", "a", "--drafter", "mtp"], "has no MTP block"),
        (["run", "MODEL", "-p", "a", "--draft-depth", "-1"], "use auto, or a number"),
        (["run", "MODEL", "-p", "a", "--system", "b"], "--chat"),
        (["run", "FOLDER", "-p", "a"], "directory"),
        (["run", "TEXT", "-p", "a"], "not a GGUF"),
        (["run", "OTHER", "-p", "a"], "makeway runs qwen35moe, qwen3moe, qwen3next, qwen4exp"),
        (["inspect", "nothing.gguf"], "no such file"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, tmp_path, arguments, message):
    text = tmp_path / "text.gguf"
    text.write_text("no model in here, but some text that is long enough")
    other = tmp_path / "other.gguf"
    other.write_bytes(
        golden_path(MODEL).read_bytes().replace(b"\x08\0\0\0\0\0\0\0qwen4exp", b"\x08\0\0\0\0\0\0\0qwenqwen")
    )
    names = {"MODEL": golden_path(MODEL), "FOLDER": tmp_path, "TEXT": text, "OTHER": other}
    code, out, err = run(capsys, *(names.get(a, a) for a in arguments))
    assert code == 2
    assert out == ""
    assert message in err
    assert err.startswith("makeway: ")
    assert err.count("\n") == 1


def test_a_ratio_of_0_on_a_sparse_layer_is_refused(capsys, tmp_path):
    """The known converter fault: indexer tensors, but compress_ratios 0. Written over the ratios of a golden file."""
    data = bytearray(golden_path(MODEL).read_bytes())
    key = b"qwen4exp.attention.compress_ratios"
    at = data.index(key) + len(key) + 4 + 4 + 8
    assert data[at : at + 8] == b"\0\0\0\0\x04\0\0\0"
    data[at : at + 8] = bytes(8)
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(data)
    code, _, err = run(capsys, "run", broken, "-p", "a")
    assert code == 2
    assert "compress_ratios' is 0 for layer 1" in err


def test_inspect_for_people_and_programs(capsys):
    code, out, _ = run(capsys, "inspect", golden_path(MODEL), "--json")
    assert code == 0
    data = json.loads(out)
    assert data["architecture"] == "qwen4exp"
    assert data["unsupported"] == []
    assert data["parts"]["experts"]["bytes"] == 368_640
    assert data["parts"]["experts"]["types"] == {"Q4_K": 4, "Q5_1": 2}
    code, out, _ = run(capsys, "inspect", golden_path("qwen35moe-base-bf16.gguf"))
    assert code == 0
    assert "MTP block" in out
    assert "everything in it is supported" in out


def process(*arguments, **kwargs):
    return subprocess.Popen(
        [sys.executable, "-c", "from makeway.cli import main; main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        **kwargs,
    )


def test_prompt_from_a_pipe_and_a_reader_that_leaves():
    p = process("run", golden_path(MODEL), "-n", 2000, "--ignore-eos", stdin=subprocess.PIPE)
    p.stdin.write("The router")
    p.stdin.close()
    assert p.stdout.read(1)
    p.stdout.close()
    err = p.stderr.read()
    p.stderr.close()
    assert p.wait(60) == 0
    assert "Traceback" not in err
    assert "Broken pipe" not in err


def test_ctrl_c_is_clean():
    p = process("run", golden_path(MODEL), "-p", "The router", "-n", 4000, "--ignore-eos")
    assert p.stdout.read(1)
    time.sleep(0.2)
    os.kill(p.pid, signal.SIGINT)
    _, err = p.communicate(timeout=60)
    assert p.returncode == 130
    assert "Traceback" not in err
    assert "interrupted" in err
