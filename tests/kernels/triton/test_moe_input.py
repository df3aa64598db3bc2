"""The router's choice with what a layer's sum begins with, against the reference's steps."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels.triton.moe_input import choice_and_swiglu, choice_and_zeros


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("n_experts", "top_k", "hidden"), [(40, 10, 600), (8, 8, 16)])
def test_choice_and_zeros(n_experts, top_k, hidden, device):
    logits = randn(3, n_experts)
    logits[1] = 0.5  # all alike: the lowest ids
    ids, weights, zeros = choice_and_zeros(logits.to(device), top_k, hidden=hidden)
    expected_ids, expected = reference.route(logits, top_k)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-6, atol=1e-7)
    assert zeros.shape == (3, hidden)
    assert not zeros.any()


@pytest.mark.parametrize("n_parts", [0, 1, 2])
def test_choice_and_the_shared_experts_hidden_values(n_parts, device):
    logits, gate, up, factor = randn(2, 24), randn(2, 600, seed=1), randn(2, 600, seed=2), randn(2, 1, seed=3)
    ids, weights, out = choice_and_swiglu(
        logits.to(device), 5, gate=gate.to(device), up=up.to(device), shared_gate=factor.to(device), n_parts=n_parts
    )
    expected_ids, expected = reference.route(logits, 5)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-6, atol=1e-7)
    hidden = reference.silu(gate) * up * reference.sigmoid(factor)
    values = out.cpu().float().sum(0) if n_parts else out.cpu()
    limit = {0: 1e-6, 1: 2**-8, 2: 2**-15}[n_parts]
    torch.testing.assert_close(values, hidden, rtol=limit, atol=1e-30 + (1e-7 if n_parts == 0 else 0))
