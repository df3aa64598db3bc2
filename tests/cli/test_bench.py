import json

from makeway.bench import link
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
