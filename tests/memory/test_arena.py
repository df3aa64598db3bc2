"""One allocation; a view of a layout that is no longer published cannot be used."""

import pytest

from makeway.device import CpuDevice
from makeway.errors import EngineFailed
from makeway.memory.arena import Arena
from makeway.memory.plan import Region, plan_memory
from makeway.memory.sizes import PlanRequest
from tests.memory.example import small_facts


def test_views_share_one_allocation():
    arena = Arena(1024, CpuDevice())
    fixed = arena.fixed(Region("weights", 0, 256))
    slots, ring = arena.layout([Region("slots", 256, 512), Region("ring", 768, 256)])
    fixed.tensor.fill_(1)
    slots.tensor.fill_(2)
    ring.tensor.fill_(3)
    (whole,) = arena.layout([Region("all", 256, 768)])
    assert whole.tensor.tolist() == [2] * 512 + [3] * 256
    assert whole.tensor.data_ptr() == fixed.tensor.data_ptr() + 256
    assert fixed.tensor.tolist() == [1] * 256, "fixed regions outlive layouts"


def test_a_stale_view_raises():
    arena = Arena(512, CpuDevice())
    (first,) = arena.layout([Region("slots", 0, 512)])
    assert first.tensor.numel() == 512
    epoch = arena.epoch
    arena.layout([Region("ring", 0, 512)])
    assert arena.epoch == epoch + 1
    with pytest.raises(EngineFailed, match="'slots' is of layout 1, published is 2"):
        _ = first.tensor


@pytest.mark.parametrize(
    "regions",
    [
        [Region("a", 256, 256), Region("b", 256, 256)],
        [Region("a", 512, 256), Region("b", 256, 257)],
        [Region("a", 768, 257)],
        [Region("a", 0, 256)],  # over the fixed region
        [Region("a", 256, -1)],
    ],
)
def test_a_wrong_layout_publishes_nothing(regions):
    arena = Arena(1024, CpuDevice())
    arena.fixed(Region("weights", 0, 256))
    (kept,) = arena.layout([Region("slots", 256, 256)])
    with pytest.raises(EngineFailed, match="overlaps"):
        arena.layout(regions)
    assert kept.tensor.numel() == 256


def test_close_gives_back():
    arena = Arena(512, CpuDevice())
    views = arena.fixed(Region("weights", 0, 256)), *arena.layout([Region("slots", 256, 256)])
    assert arena.nbytes == 512
    arena.close()
    assert arena.nbytes == 0
    for view in views:
        with pytest.raises(EngineFailed, match="after close"):
            _ = view.tensor


def test_every_layout_of_a_plan_fits_its_arena():
    facts = small_facts()
    plan = plan_memory(facts, PlanRequest(vram_bytes=1 << 26, context=min(512, facts.context_length), reserve_bytes=0))
    arena = Arena(plan.arena_bytes, CpuDevice())
    for region in plan.regions:
        arena.fixed(region)
    decode = arena.layout(plan.decode.regions)
    assert sum(view.tensor.numel() for view in decode) == plan.swing.n_bytes
    prefill = arena.layout(plan.prefill_layout(plan.lend_for(300)).regions)
    assert sum(view.tensor.numel() for view in prefill) == plan.swing.n_bytes
