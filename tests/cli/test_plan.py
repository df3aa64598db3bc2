import json

import pytest

from tests.cli.test_cli import run
from tests.conftest import golden_path
from tests.flash_next import write_flash_next

SMALL = "qwen4exp-k96-UD-Q4_K_XL.gguf"


@pytest.fixture(scope="module")
def flash_next(tmp_path_factory):
    return write_flash_next(tmp_path_factory.mktemp("plan") / "flash-next.gguf")


def plan(capsys, path, *arguments):
    arguments = ("--vram", "24GiB", "--ram", "128GiB", "--parallel", "1", *arguments)
    code, out, err = run(capsys, "plan", path, *arguments, "--json")
    assert code == 0, err
    return json.loads(out)


def test_a_full_flash_next_from_its_header_alone(capsys, flash_next):
    data = plan(capsys, flash_next, "--context", "262144", "--prompt", "8192", "--drafter", "none")
    assert 60 <= data["decode"]["n_slots"] <= 110  # the house's estimate by hand: about 82
    assert data["vram"]["total_bytes"] == 24 << 30
    regions = data["vram"]["regions"]
    end = max(r["offset"] + r["n_bytes"] for r in [*regions, data["vram"]["swing"]])
    assert end <= data["vram"]["arena_bytes"]
    assert data["vram"]["arena_bytes"] + data["vram"]["reserve_bytes"] <= 24 << 30
    kv = next(r["n_bytes"] for r in regions if r["name"] == "KV cache")
    assert kv == (262_144 + 64) * 24 * 1024  # one block of 64 tokens for rounding
    shorter = plan(capsys, flash_next, "--context", "32768", "--drafter", "none")
    assert shorter["decode"]["n_slots"] > data["decode"]["n_slots"]
    drafting = plan(capsys, flash_next, "--context", "262144", "--draft-depth", "3")
    assert drafting["decode"]["n_slots"] < data["decode"]["n_slots"]
    assert plan(capsys, flash_next, "--context", "262144") == drafting
    copying = plan(capsys, flash_next, "--context", "262144", "--drafter", "lookup", "--draft-depth", "3")
    assert drafting["decode"]["n_slots"] < copying["decode"]["n_slots"] <= data["decode"]["n_slots"]


def test_the_table_for_people(capsys, flash_next):
    code, out, _ = run(
        capsys, "plan", flash_next, "--vram", "24GiB", "-c", "262144", "--prompt", "8192", "--prompt", "119000"
    )
    assert code == 0
    for text in ("KV cache", "slots:", "experts (pinned)", "8192", "119000", "first token"):
        assert text in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vram", "6GiB"], "--context"),
        (["--vram", "24GiB", "--ram", "64GiB"], "--ram"),
        (["--vram", "24GiB", "--vram", "24GiB"], "not supported yet"),
        (["--vram", "24 apples"], "not a size"),
        (["--vram", "24GiB", "--context", "300000"], "262144"),
        (["--vram", "24GiB", "--prompt", "0"], "--prompt 0"),
        (["--vram", "24GiB", "--machine", "abacus"], "choose from"),
        (["--vram", "24GiB", "--slots", "500"], "--slots"),
        (["--vram", "24GiB", "--draft-depth", "many"], "use auto"),
        (["--vram", "24GiB", "--draft-depth", "8"], "a step has 8"),
        (["--vram", "24GiB", "--drafter", "guess"], "use auto, none"),
        (["--vram", "24GiB", "--kv-type", "q3"], "--kv-type"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_way_out(capsys, flash_next, arguments, message):
    code, out, err = run(capsys, "plan", flash_next, *arguments)
    assert code == 2
    assert out == ""
    assert message in err


def test_every_golden_architecture_can_be_planned(capsys):
    for file in (SMALL, "qwen35moe-base-bf16.gguf", "qwen3next-base-bf16.gguf", "qwen3moe-base-bf16.gguf"):
        data = plan(capsys, golden_path(file), "--context", "4096")
        assert data["decode"]["n_slots"] > 0
