"""All operations together: golden models through Triton's kernels, a prompt and then steps, against the reference."""

from dataclasses import replace

import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import REFERENCE, Weight
from makeway.kernels.triton.ops import triton_ops
from tests.conftest import golden_path
from tests.models.runner import Runner


def test_every_operation_has_a_kernel_and_says_so(device):
    ops = triton_ops(device)
    assert set(ops.kernels) == set(REFERENCE.kernels)
    assert set(ops.kernels.values()) == {"triton"}
    assert set(REFERENCE.kernels.values()) == {"reference"}
    assert replace(ops, rope=REFERENCE.rope).kernels["rope"] == "reference"


def test_a_matrix_that_no_kernel_reads_is_named(device):
    ops = triton_ops(device)
    values = torch.randn(5, 20)
    weight = Weight(values.view(torch.uint8).to(device), GGMLType.F32, 20)
    x = torch.randn(3, 20)
    torch.testing.assert_close(ops.linear(x.to(device), weight).cpu(), x @ values.T, rtol=1e-5, atol=1e-5)
    assert ops.kernels["linear F32 of 20"] == "reference"


def test_activations_that_changed_in_place_are_read_again(device):
    ops = triton_ops(device)
    weight = Weight(torch.eye(32).view(torch.uint8).to(device), GGMLType.F32, 32)
    x = torch.ones(2, 32, device=device)
    assert torch.equal(ops.linear(x, weight), x)
    x.mul_(3.0)
    assert torch.equal(ops.linear(x, weight), x)
    assert torch.equal(ops.linears(x[:1] * 2.0, (weight, weight))[1], x[:1] * 2.0)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("name", "limit"), [("qwen3moe-base-bf16", 0.03), ("qwen4exp-k96-UD-Q4_K_XL", 0.06)])
def test_a_golden_model_reads_a_chunk_and_then_steps(name, limit, device):
    if device.type != "cpu":
        pytest.skip("the runner's model is on the CPU")
    tokens = [7, 3, 11, 5, 2, 9, 4, 8, 1, 6, 12, 10, 3]
    ours = Runner(golden_path(f"{name}.gguf"), ops=triton_ops(device)).logits(tokens, chunk=10)
    theirs = Runner(golden_path(f"{name}.gguf")).logits(tokens)
    assert float((ours - theirs).norm() / theirs.norm()) < limit
