"""Plans for people and for programs say the numbers that are executed."""

import json

import pytest

from makeway.memory import table
from makeway.memory.plan import plan_memory, render_plan
from makeway.memory.sizes import PlanRequest
from tests.memory.example import GIB, example_flash_next, small_facts


@pytest.fixture(scope="module")
def flash():
    return plan_memory(example_flash_next(), PlanRequest(24 * GIB, 262_144, ram_bytes=96 * GIB, sequences=2, drafts=3))


def test_json_is_plain_and_adds_up(flash):
    made = json.loads(json.dumps(flash.to_json()))
    vram = made["vram"]
    parts = sum(region["n_bytes"] for region in vram["regions"]) + vram["swing"]["n_bytes"]
    assert parts == vram["arena_bytes"]
    assert vram["arena_bytes"] + vram["reserve_bytes"] == vram["total_bytes"] == 24 * GIB
    assert sum(region["n_bytes"] for region in made["decode"]["regions"]) == vram["swing"]["n_bytes"]
    assert made["decode"]["n_slots"] == flash.n_slots
    assert made["host"]["total_bytes"] == flash.host_bytes
    assert made["host"]["ple_in_ram"] is False, "96 GiB hold the experts, not the n-gram table"


def test_text_holds_every_region_and_the_prompts_asked_for(flash):
    text = render_plan(flash, prompts=(300, 8192))
    for region in flash.regions:
        assert region.name in text
    assert f"slots: {flash.n_slots} a layer + {flash.n_spares} spares" in text
    assert "n-gram table (mapped)" in text
    lines = text.splitlines()
    assert any(line.startswith("8192 ") and f"{flash.lend_for(8192).n_lent} of" in line for line in lines)
    assert any(line.startswith("300 ") for line in lines)
    assert not any(line.startswith("32768 ") for line in lines)
    assert all(len(line) < 130 for line in lines)


def test_default_prompts_end_with_the_context():
    plan = plan_memory(small_facts(), PlanRequest(10**6, 300, reserve_bytes=0))
    assert [row[0] for row in table.prompt_rows(plan)[1:]] == ["256", "300"]
    assert "small" in render_plan(plan)


@pytest.mark.parametrize(
    ("n_bytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.50 KiB"), (3 << 20, "3.00 MiB"), (24 << 30, "24.00 GiB")],
)
def test_sizes_for_people(n_bytes, text):
    assert table.size(n_bytes) == text


def test_grid_aligns():
    assert table.grid([("a", "b"), ("long", "1")]) == "a     b\nlong  1"
