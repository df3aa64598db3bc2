"""All operations together: golden models through Triton's kernels, a prompt and then steps, against the reference."""

from dataclasses import replace

import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import REFERENCE, MixerWeights, Weight
from makeway.kernels.cuda.linear import Linears
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton import streams
from makeway.kernels.triton.ops import triton_ops
from tests.conftest import golden_path
from tests.kernels.cuda.emulated_programs import EmulatedPrograms
from tests.kernels.triton.blocks import random_weight
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


def mixer(device, *, rank, hidden, n_streams, with_inject=True):
    width = n_streams * hidden
    down, up = random_weight(GGMLType.Q8_0, rank, width), random_weight(GGMLType.Q8_0, width, rank)
    inject = random_weight(GGMLType.BF16, n_streams, width) if with_inject else None
    weights = (w and Weight(w.raw.to(device), w.type, w.n_cols) for w in (down, up, inject))
    return MixerWeights(torch.rand(width, device=device) + 0.5, *weights)


@pytest.mark.parametrize(("n_streams", "rank", "launches"), [(4, 64, 1), (4, 512, 2)])
def test_a_mixer_ends_in_one_launch_where_its_rank_is_a_unit(n_streams, rank, launches, device, monkeypatch):
    """Beside matrices in CUDA C++, emulated where there is no GPU; other ranks take Triton's kernel for it."""
    ends = []
    whole = streams.mixed
    monkeypatch.setattr(streams, "mixed", lambda *args, **options: ends.append(1) or whole(*args, **options))
    ops = triton_ops(device, Linears(device, EmulatedPrograms() if device.type == "cpu" else Programs()))
    torch.manual_seed(5)
    for with_inject in (True, False):
        w = mixer(device, rank=rank, hidden=32, n_streams=n_streams, with_inject=with_inject)
        h, added, out = (torch.randn(3, *size, device=device) for size in ((n_streams, 32), (n_streams,), (32,)))
        got = ops.hc_mix(h, w, eps=1e-6, added=(added, out))
        want = REFERENCE.hc_mix(h, w, eps=1e-6, added=(added, out))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(ends) == 2 * (launches - 1)


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
