"""A slot is a clean copy of the store, and the audit sees when it is not."""

import numpy as np
import pytest
import torch

from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.policies import Policy
from makeway.experts.store import ExpertStore
from makeway.memory.plan import Region
from tests.experts.rig import FILES, Rig


@pytest.mark.parametrize("file", FILES)
def test_an_expert_lies_together_in_its_slot(file):
    rig = Rig(file, slots=3)
    assert rig.restore(2) == 2 * len(rig.layers)
    for layer, store in enumerate(rig.layers):
        slot = int(rig.cache.table.slot_of[layer, 2])
        weights = rig.cache.weights_of(layer, slot)
        at = rig.arena.bytes_of(Region("all", 0, rig.arena.nbytes), None).data_ptr()
        at += rig.plan.decode.slot_offset(layer, slot)
        for weight, truth in zip(weights, store.of(2), strict=True):
            assert weight.raw.data_ptr() == at, "gate, up, down follow each other in place"
            assert torch.equal(weight.raw, truth.raw)
            assert (weight.type, weight.n_cols) == (truth.type, truth.n_cols)
            assert torch.equal(weight.decode(), truth.decode())
            at += weight.nbytes
    rig.cache.audit()


def test_restore_fills_what_is_free_in_order():
    rig = Rig(FILES[2], slots=2)
    assert rig.refill([0, 0, 0, 1], [5, 6, 7, 5]) == 3
    assert rig.cache.table.slot_of[0, [5, 6, 7]].tolist() == [0, 1, -1]
    assert rig.cache.counters.uploads == 3
    expected = 2 * rig.layers[0].expert_bytes + rig.layers[1].expert_bytes
    assert rig.cache.counters.link_bytes == rig.device.tally == expected
    assert rig.refill([0, 1], [5, 5]) == 0, "published already"
    assert rig.device.tally == expected
    assert rig.cache.nbytes == rig.cache.table.nbytes


def test_lending_keeps_the_hottest_and_moves_nothing_over_the_link():
    rig = Rig(FILES[2], slots=4, policy="lfu-decay")
    n_layers = len(rig.layers)
    rig.restore(4)  # experts 0, 2, 4, 6 in slots 0..3
    counts = np.zeros((n_layers, rig.plan.sizes.n_experts), dtype=np.float32)
    counts[:, [0, 2, 4, 6]] = [1, 4, 2, 3]
    rig.policy.observe_prompt(counts)
    tally = rig.device.tally
    lost = rig.lend(2)
    assert lost.tolist() == [[layer, expert] for layer in range(n_layers) for expert in (0, 4)]
    assert rig.device.tally == tally
    for layer in range(n_layers):
        assert rig.cache.table.slot_of[layer, [2, 6]].tolist() == [1, 0], "the coldest gave way to expert 6"
    rig.cache.audit()
    rig.cache.table.take_back()
    assert rig.refill(lost[:, 0].tolist(), lost[:, 1].tolist()) == 2 * n_layers
    assert rig.device.tally - tally == 2 * sum(layer.expert_bytes for layer in rig.layers)
    rig.cache.audit()


def test_the_audit_sees_one_wrong_byte():
    rig = Rig(FILES[0], slots=2)
    rig.restore(2)
    rig.cache.audit()
    rig.cache.slot_bytes(1, 1)[-1] ^= 1
    with pytest.raises(EngineFailed, match="slot 1 of layer 1 is not expert 2"):
        rig.cache.audit()


def test_plan_store_and_policy_must_agree():
    rig = Rig(FILES[2], slots=2)
    view, *_ = rig.arena.layout(rig.plan.decode.regions)
    few = ExpertStore(rig.runner.model.store.layers[:1], rig.device)
    with pytest.raises(EngineFailed, match="planned for"):
        ExpertCache(few, rig.plan, view, policy=rig.policy, device=rig.device)
    with pytest.raises(EngineFailed, match="the policy is for another number"):
        ExpertCache(rig.cache.store, rig.plan, view, policy=Policy("lru", 1, n_experts=2), device=rig.device)
    with pytest.raises(EngineFailed, match="does not start where the slots do"):
        rig.cache.attach(rig.transient)
