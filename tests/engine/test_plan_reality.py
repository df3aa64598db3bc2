"""The plan is what happens: the engine takes the planned bytes, in the planned regions, and no others."""

import random
from itertools import pairwise

import pytest

from makeway import EngineFailed, OutOfPlan, UserError
from makeway.bench.shapes import Qwen3MoeShape, Qwen4ExpShape
from makeway.bench.synth import synthesize, write_model
from makeway.gguf import GGMLType as T
from makeway.memory.arena import Arena
from makeway.memory.facts import align_up
from makeway.memory.plan import minimum_vram
from tests.devices import RecordingDevice
from tests.engine import rig

PLE_CONV = (
    "blk.1.ple_conv1d.weight"  # f16: a vector that is decoded when it is loaded, so not kept where it was planned
)


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


def shape(draw, kind):
    """A tiny model with odd sizes, and expert types of its own."""
    top_k = draw.randint(1, 4)
    common = {
        "hidden": 256,
        "n_vocab": draw.choice((260, 300, 512)),
        "n_experts": draw.randint(top_k, 9),
        "top_k": top_k,
        "expert_ff": draw.choice((32, 64, 96)),
        "context": 512,
        "gate_up": draw.choice((T.Q4_K, T.Q8_0, T.F16)),
        "down": draw.choice((T.Q5_1, T.Q8_0, T.Q5_0, T.F32)),
        "attention": T.Q8_0,
        "attention_out": T.Q8_0,
        "head": T.Q8_0,
    }
    if kind is Qwen3MoeShape:
        return kind(n_layers=draw.randint(1, 4), n_heads=4, n_kv=2, head_dim=32, **common)
    return kind(
        n_layers=draw.choice((2, 4)),
        n_streams=draw.choice((2, 4)),
        low_rank=32,
        n_heads=4,
        n_kv=2,
        head_dim=32,
        n_rot=12,
        shared_ff=32,
        k_heads=2,
        v_heads=4,
        delta_dim=32,
        interval=2,
        index_heads=2,
        index_dim=32,
        budget=16,
        ple_rows=draw.choice((0, 4001)),
        ple_row=32,
        heads_per_ngram=2,
        table=T.Q8_0,
        **common,
    )


def settings(draw):
    """A budget and what else a user may ask for."""
    return {
        "context": draw.choice((96, 130, 256)),
        "parallel": draw.randint(1, 3),
        "slots": draw.choice((None, 0, 1, 2, 5)),
        "uploads_per_layer": draw.randint(0, 2),
        "kv_type": draw.choice((None, "f16", "f32")),
        "chunk": draw.choice((None, 9, 33)),
        "sweep_tokens": draw.choice((None, None, 21)),
        "handover": draw.choice(("auto", "auto", "always", "never")),
    }


@pytest.mark.parametrize("seed", [*range(10), *(pytest.param(i, marks=pytest.mark.slow) for i in range(10, 20))])
def test_what_is_taken_is_what_was_planned(seed, tmp_path, monkeypatch):
    draw = random.Random(seed)
    path = tmp_path / "model.gguf"
    write_model(synthesize(shape(draw, (Qwen3MoeShape, Qwen4ExpShape)[seed % 2])), path)
    config = settings(draw)
    with rig.open_engine(path, **config) as engine:
        least = minimum_vram(engine.plan.facts, engine.plan.request)
    with pytest.raises(OutOfPlan, match=rf"(?s)does not fit.*--vram {least} \(bytes\)"):
        rig.open_engine(path, vram=least - 1, **config)

    layouts, layout = [], Arena.layout
    monkeypatch.setattr(Arena, "layout", lambda self, regions: layouts.append(tuple(regions)) or layout(self, regions))
    vram = least + draw.choice((0, 0, 255, 70_001, 400_000))
    device = RecordingDevice(vram)
    with rig.open_engine(path, device=device, vram=vram, **config) as engine:
        plan, memory = engine.plan, engine.memory
        assert device.allocated == [plan.arena_bytes]
        assert vram - 256 < plan.arena_bytes <= vram
        assert (
            [m.nbytes for m in device.host_memories] == [dict(plan.host)["experts (pinned)"]] == [memory.store.nbytes]
        )
        check_fixed(engine, device)
        lengths = (5, 17, 80)
        for n in lengths:
            request = engine.add(rig.prompt(path, n), rig.greedy(2))
            events = rig.run(engine)
            if config["kv_type"] != "f16" and seed % 4 < 2:  # both architectures
                assert rig.said(events, request) == rig.alone(path, rig.prompt(path, n), rig.greedy(2))
        assert device.allocated == [plan.arena_bytes]
        assert len(device.host_memories) == 1
        decode = plan.decode.regions
        want = [decode]
        for n in lengths:
            want += [plan.prefill_layout(plan.lend_for(n)).regions, decode]
        assert layouts == want
        check_swing(plan, layouts)
        rig.check_idle(engine)
    assert device.free_bytes() == vram
    assert device.host_memories[0].nbytes == 0


def check_fixed(engine, device):
    """Every fixed region is in use to its last byte, and no byte of a layout is another's."""
    plan, memory = engine.plan, engine.memory
    assert memory.arena._fixed == list(plan.regions)
    ends = [0, *(region.end for region in plan.regions)]
    assert [region.offset for region in plan.regions] == ends[:-1]
    assert plan.swing.offset == ends[-1]
    assert plan.swing.end == plan.arena_bytes
    for region in plan.regions:
        if region.name.startswith("weights: "):
            part = region.name.removeprefix("weights: ")
            decoded = align_up(engine._file.get_tensor(PLE_CONV).n_bytes) if part == "PLE" else 0
            assert memory._placer._used[part] + decoded == region.n_bytes
    sizes = {region.name: region.n_bytes for region in plan.regions}
    kv = sizes.get("KV cache", 0) + sizes.get("indexer keys", 0)
    assert memory.kv.nbytes <= kv < memory.kv.nbytes + 512
    assert align_up(memory.states.nbytes) == sizes.get("recurrent state", 0) + sizes.get("replay rows", 0)
    assert device.tally <= sum(n for name, n in sizes.items() if name.startswith("weights: "))


def check_swing(plan, layouts):
    """Every layout fills the swing region without a gap."""
    for regions in layouts:
        assert regions[0].offset == plan.swing.offset
        assert regions[-1].end <= plan.swing.end
        for one, two in pairwise(regions):
            assert one.end == two.offset


def test_a_configuration_that_fails_late_gives_everything_back():
    """The policy's profile is read last of all; by then weights and experts are loaded."""
    device = RecordingDevice()
    free = device.free_bytes()
    with pytest.raises(UserError, match="profile"):
        rig.open_engine(device=device, policy="static")
    assert device.free_bytes() == free
    assert [memory.nbytes for memory in device.host_memories] == [0]


def test_more_memory_than_the_device_has_is_refused_by_the_device():
    with rig.open_engine() as engine:
        vram = engine.plan.request.vram_bytes
    with pytest.raises(EngineFailed, match="device memory asked for"):
        rig.open_engine(device=RecordingDevice(vram - 256))
    rig.open_engine(device=RecordingDevice(vram)).close()
