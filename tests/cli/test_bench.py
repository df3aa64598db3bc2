import json

from makeway.bench import decode, link
from makeway.errors import EngineFailed
from tests.cli.test_cli import run
from tests.flash_next import write_flash_next


def test_link_ends_with_json_and_leaves_it_in_the_folder(capsys, tmp_path, monkeypatch):
    code, out, err = run(capsys, "bench", "link", "--host-memory", "1MiB")
    assert (code, out) == (2, "")
    assert "512 MiB" in err
    monkeypatch.setattr(link, "MIN_HOST_BYTES", 1 << 20)
    arguments = ("--device", "cpu", "--repeats", 1, "--host-memory", "16MiB", "--results", tmp_path)
    code, out, err = run(capsys, "bench", "link", *arguments)
    assert (code, err) == (0, "")
    document = json.loads(out.splitlines()[-1])
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == document
    assert document["command"] == "makeway bench link --device cpu --repeats 1 --host-memory 16MiB"


def test_a_plan_predicts_with_measured_rates(capsys, tmp_path):
    model = write_flash_next(tmp_path / "flash-next.gguf")
    rates = dict.fromkeys(("hbm_bytes_per_s", "flops_per_s", "host_read_bytes_per_s", "fetch_bytes_per_s"), 10**15)
    path = tmp_path / "rates.json"
    for rate in (10**10, 10**11):
        path.write_text(json.dumps({"rates": {**rates, "link_bytes_per_s": rate}}))
        size = ("--vram", "24GiB", "--context", 32768)
        code, out, err = run(capsys, "plan", model, *size, "--rates", path, "--json")
        assert code == 0, err
        assert json.loads(out)["rates"]["link_bytes_per_s"] == rate


TINY = ("--shape", "tiny-qwen3", "--layers", 1, "--slots", 8, "--device", "cpu", "--skew", 0.5)


def test_reference_kernels_need_consent(capsys, tmp_path):
    arguments = ("--prompt", 16, "--handovers", 1, "--steps", 1, "--first", 1, "--results", tmp_path)
    code, out, err = run(capsys, "bench", "handover", *TINY, *arguments)
    assert (code, out) == (2, "")
    assert "--allow-reference" in err
    assert list(tmp_path.iterdir()) == []


def test_a_measurement_takes_shared_flags_and_says_its_command(capsys, tmp_path):
    rates = tmp_path / "rates.json"
    names = ("hbm_bytes_per_s", "flops_per_s", "host_read_bytes_per_s", "fetch_bytes_per_s", "link_bytes_per_s")
    rates.write_text(json.dumps(dict.fromkeys(names, 10**12)))
    own = ("--lengths", "8,24", "--repeats", 1, "--arms-at", "24", "--micro-batches", "8")
    shared = ("--allow-reference", "--rates", rates, "--results", tmp_path / "results")
    code, out, err = run(capsys, "bench", "prefill", *own, *TINY, *shared)
    assert (code, err) == (0, "")
    document = json.loads(out.splitlines()[-1])
    (path,) = (tmp_path / "results").iterdir()
    assert json.loads(path.read_text()) == document
    assert document["bound_rates"]["link_bytes_per_s"] == 10**12
    assert document["model"]["layers"] == 1
    words = document["command"].split()
    assert words[:3] == ["makeway", "bench", "prefill"]
    for flag, value in (("--lengths", "8,24"), ("--layers", "1"), ("--slots", "8"), ("--skew", "0.5")):
        assert words[words.index(flag) + 1] == value
    assert "--allow-reference" in words
    assert "--policy" not in words  # a default
    # The command that the report names measures the same.
    code, again, err = run(capsys, *words[1:])
    assert (code, err) == (0, "")
    same = json.loads(again.splitlines()[-1])
    assert [p["n_tokens"] for p in same["prompts"]] == [8, 24, 24, 24]
    assert same["command"] == document["command"]


def test_wrong_flags_are_named(capsys, tmp_path):
    for arguments, match in (
        (("decode", "--rows", "1,x"), "--rows 1,x"),
        (("decode", "--rows", ""), "--rows"),
        (("decode", "--shape", "huge"), "--shape huge"),
        (("decode", "--locality", "2"), "--locality"),
        (("prefill", "--rates", tmp_path / "none.json"), "none.json"),
        (("llama",), "nothing to do"),
        (("llama", "--earlier", "tiny-qwen3"), "--earlier tiny-qwen3"),
    ):
        code, out, err = run(capsys, "bench", *arguments)
        assert (code, out) == (2, ""), arguments
        assert match in err


def test_llama_prints_commands_or_a_table(capsys, tmp_path):
    code, out, err = run(capsys, "bench", "llama", "--model", "m.gguf", "--cache", "9GiB")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == ["llama-bench"] * 4
    assert "--moe-cache 9216" in out
    code, out, err = run(capsys, "bench", "llama", "--earlier", "flash-next", "--results", tmp_path)
    assert (code, err) == (0, "")
    assert "cache of 9 GiB" in out
    assert json.loads(out.splitlines()[-1])["figures"][0]["unit"] == "tokens/s"


def test_a_measurement_that_breaks_off_leaves_what_it_has(capsys, tmp_path, monkeypatch):
    def held(*args, **options):
        raise EngineFailed("the link is gone")

    monkeypatch.setattr(decode, "_held", held)
    arguments = ("--rows", 1, "--contexts", 8, "--first", 4, "--steps", 1, "--repeats", 1, "--results", tmp_path)
    code, out, err = run(capsys, "bench", "decode", *TINY, *arguments, "--allow-reference")
    assert code == 2
    assert "the link is gone" in err
    document = json.loads(out.splitlines()[-1])
    assert document["broke_off"] == "EngineFailed: the link is gone"
    assert [run["name"] for run in document["runs"]] == [figure["name"] for figure in document["figures"]]
    assert document["model"]["layers"] == 1
    assert len(list(tmp_path.iterdir())) == 1
