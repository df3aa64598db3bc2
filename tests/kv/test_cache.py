"""Planned bytes are executed bytes, and a cache in the arena's regions serves like one of its own."""

import pytest
import torch

from makeway.device import CpuDevice
from makeway.kv import BLOCK_TOKENS, KV_TYPES, KVCache, KVRoom, KVShape, StatePool, StateShapes
from makeway.memory.arena import Arena
from makeway.memory.plan import minimum_vram, plan_memory
from makeway.memory.sizes import PlanRequest
from makeway.models.plan_facts import plan_facts
from tests.conftest import golden_arrays, golden_path
from tests.models.runner import CPU, Runner

FILES = {
    "qwen3moe-base": "qwen3moe-base-bf16.gguf",
    "qwen3next-base": "qwen3next-base-bf16.gguf",
    "qwen35moe-base": "qwen35moe-base-bf16.gguf",
    "qwen4exp-base": "qwen4exp-base-bf16.gguf",
    "qwen4exp-k96": "qwen4exp-k96-UD-Q4_K_XL.gguf",
}


def planned(runner, *, kv_type="f32", drafts=0):
    """The runner's caches in the regions of a plan; every byte of the arena is garbage before."""
    facts = plan_facts(runner.file, runner.facts)
    request = {"context": 192, "sequences": 2, "drafts": drafts, "kv_type": kv_type, "reserve_bytes": 0}
    least = minimum_vram(facts, PlanRequest(vram_bytes=0, **request))
    plan = plan_memory(facts, PlanRequest(vram_bytes=least, **request))
    arena = Arena(plan.arena_bytes, CpuDevice())
    views = {r.name: arena.fixed(r).tensor.fill_(0xFF) for r in plan.regions}
    trunk = [i for i in runner.facts.kv_shapes if i < runner.facts.n_layers]
    rooms = [KVRoom(trunk, views["KV cache"], views.get("indexer keys"))]
    if drafts:
        draft = [i for i in runner.facts.kv_shapes if i >= runner.facts.n_layers]
        rooms.append(KVRoom(draft, views["MTP KV cache"], views.get("MTP indexer keys")))
    shapes = {i: runner.facts.kv_shapes[i] for room in rooms for i in room.layers}
    n_blocks = plan.sizes.kv_tokens // BLOCK_TOKENS
    cache = KVCache(shapes, n_blocks, device=CPU, item_type=KV_TYPES[kv_type], rooms=rooms)
    tails = runner.facts.draft_tails if drafts else None
    states = StateShapes.of(runner.facts.state_shapes, kv=shapes, ple=runner.facts.ple_tails, draft=tails)
    n_kept = 1 + drafts if drafts else 0
    rooms = {"room": views.get("recurrent state"), "kept_room": views.get("replay rows")}
    return plan, cache, StatePool(states, 2, device=CPU, n_kept=n_kept, **rooms), facts


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize(
    ("name", "drafts"), [*((name, 0) for name in FILES), ("qwen35moe-base", 3), ("qwen4exp-base", 3)]
)
def test_the_plan_says_what_the_caches_take(name, kv_type, drafts):
    runner = Runner(golden_path(FILES[name]))
    plan, cache, states, facts = planned(runner, kv_type=kv_type, drafts=drafts)
    tokens = plan.sizes.kv_tokens
    per_token = facts.kv_bytes_per_token[kv_type] + facts.indexer_bytes_per_token[kv_type]
    per_sequence = facts.state_bytes_per_sequence
    if drafts:
        per_token += facts.mtp_kv_bytes_per_token[kv_type] + facts.mtp_indexer_bytes_per_token[kv_type]
        per_sequence += facts.mtp_state_bytes_per_sequence + (1 + drafts) * facts.replay_bytes_per_row
    assert cache.nbytes == tokens * per_token
    assert states.nbytes == 2 * per_sequence


@pytest.mark.parametrize("name", [name for name in FILES if name != "qwen4exp-base"])
def test_planned_memory_gives_the_same_bits(name):
    runner = Runner(golden_path(FILES[name]))
    tokens = [int(t) for t in golden_arrays(f"{name}{'-quant' if 'k96' in name else ''}.npz")["tokens"]]
    whole = runner.logits(tokens, 40)
    _, runner.cache, runner.states, _ = planned(runner)
    for _ in range(2):  # the second sequence finds the first one's leavings
        assert torch.equal(runner.logits(tokens, 40), whole)


def test_half_precision_keys_change_logits_a_little():
    runner = Runner(golden_path(FILES["qwen4exp-k96"]))
    tokens = [int(t) for t in golden_arrays("qwen4exp-k96-quant.npz")["tokens"]]
    whole = runner.logits(tokens)
    _, runner.cache, runner.states, _ = planned(runner, kv_type="f16")
    half = runner.logits(tokens)
    assert 0 < (half - whole).abs().max() < 0.1
    assert torch.equal(runner.logits(tokens, 7), half)


def test_rooms_must_hold_every_layer_and_its_indexer():
    shapes = {0: KVShape(1, 8, 8), 1: KVShape(1, 8, 8, index_dim=4, ratio=4)}
    room = torch.empty(1 << 16, dtype=torch.uint8)
    with pytest.raises(AssertionError, match="every layer"):
        KVCache(shapes, 2, device=CPU, rooms=[KVRoom([0], room)])
    with pytest.raises(AssertionError, match="indexer"):
        KVCache(shapes, 2, device=CPU, rooms=[KVRoom([0, 1], room)])
    with pytest.raises(AssertionError, match="bytes of room"):
        KVCache(shapes, 2, device=CPU, rooms=[KVRoom([0, 1], room[:100], room)])


@pytest.mark.parametrize(("ratio", "rows"), [(1, 8), (4, 16), (9, 16), (10, 32), (64, 128)])
def test_the_ring_holds_an_incomplete_block_and_a_step(ratio, rows):
    shape = KVShape(1, 8, 8, index_dim=4, ratio=ratio)
    assert shape.ring_rows == rows >= ratio - 1 + 8
    assert KVShape(1, 8, 8).ring_rows == 0
