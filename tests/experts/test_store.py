"""The store lays an expert's matrices together, and what lies there is what the file holds."""

import pytest
import torch

from makeway.device import CpuDevice
from makeway.errors import EngineFailed
from makeway.experts.loader import load_experts
from makeway.experts.store import ExpertStore, used_experts
from makeway.memory.facts import ALIGN_BYTES
from makeway.models.plan_facts import plan_facts
from tests.conftest import golden_path
from tests.experts.rig import FILES
from tests.models.runner import Runner


@pytest.mark.parametrize("file", FILES)
def test_an_expert_lies_together_every_stride(file):
    runner = Runner(golden_path(file))
    device = CpuDevice()
    mapped = runner.model.store
    store = load_experts(runner.file, mapped.layers, device)
    facts = plan_facts(runner.file, runner.model.facts).expert_layers
    at = store.memory.tensor.data_ptr()
    for i, (layer, truth, planned) in enumerate(zip(store.layers, mapped.layers, facts, strict=True)):
        assert (layer.n_experts, layer.expert_bytes) == (truth.n_experts, truth.expert_bytes)
        assert (layer.n_experts, layer.expert_bytes) == (planned.n_experts, planned.expert_bytes)
        for expert in range(layer.n_experts):
            raw = store.bytes_of(i, expert)
            assert raw.data_ptr() == at
            assert at % ALIGN_BYTES == store.memory.tensor.data_ptr() % ALIGN_BYTES == 0
            assert raw.numel() == layer.expert_bytes
            for weight, same in zip(layer.of(expert), truth.of(expert), strict=True):
                assert weight.raw.data_ptr() == at
                assert (weight.type, weight.n_cols, weight.n_rows) == (same.type, same.n_cols, same.n_rows)
                assert torch.equal(weight.decode(), same.decode())
                at += weight.nbytes
            assert not layer.raw[expert, layer.expert_bytes :].any(), "padding stays as it was"
            at = raw.data_ptr() + planned.stride_bytes
    assert store.nbytes == at - store.memory.tensor.data_ptr()
    assert store.nbytes >= mapped.nbytes
    assert device.n_copies == 0


def test_an_expert_elsewhere_has_the_same_matrices():
    runner = Runner(golden_path(FILES[0]))
    store = load_experts(runner.file, runner.model.store.layers, CpuDevice())
    room = torch.empty(store.layers[1].expert_bytes + 7, dtype=torch.uint8)[5:-2]
    room.copy_(store.bytes_of(1, 3))
    for weight, same in zip(store.layers[1].weights_in(room), store.layers[1].of(3), strict=True):
        assert torch.equal(weight.raw, same.raw)
        assert weight.raw.untyped_storage().data_ptr() == room.untyped_storage().data_ptr()


def test_a_closed_store_is_refused():
    runner = Runner(golden_path(FILES[2]))
    store = load_experts(runner.file, runner.model.store.layers, CpuDevice())
    store.close()
    store.close()
    assert store.nbytes == 0
    with pytest.raises(EngineFailed, match="after close"):
        store.bytes_of(0, 0)


def test_memory_that_cannot_be_had():
    class Full(CpuDevice):
        def host_alloc(self, n_bytes):
            raise EngineFailed(f"no room for {n_bytes}")

    runner = Runner(golden_path(FILES[2]))
    with pytest.raises(EngineFailed, match="no room for"):
        ExpertStore(runner.model.store.layers, Full())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_used_experts_ascend_and_padding_is_none(dtype):
    assert used_experts(torch.tensor([[5, 2], [-1, -1], [2, 11]], dtype=dtype)) == [2, 5, 11]
    assert used_experts(torch.full((2, 3), -1, dtype=dtype)) == []
