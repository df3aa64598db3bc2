"""Norms, rope, activations and the router against the reference, row by row."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels.triton import small


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(3, 24), (2, 3, 20), (1, 700)])
def test_norms(shape, device):
    x, gamma = randn(*shape), randn(shape[-1], seed=1)
    out = small.rms_norm(x.to(device), gamma.to(device), 1e-6).cpu()
    torch.testing.assert_close(out, reference.rms_norm(x, gamma, 1e-6), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(small.l2_norm(x.to(device)).cpu(), reference.l2_norm(x), rtol=1e-5, atol=1e-6)


def test_a_norm_with_one_gamma_for_each_stream(device):
    x, gamma = randn(2, 4, 10), randn(4, 10, seed=1)
    out = small.rms_norm(x.to(device), gamma.to(device), 1e-6).cpu()
    torch.testing.assert_close(out, reference.rms_norm(x, gamma, 1e-6), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("d", "n_rot"), [(16, 16), (24, 8), (32, 6)])
def test_rope_far_from_the_start(d, n_rot, device):
    x, positions = randn(4, 3, d), torch.tensor([0, 1, 777, 262_143])
    out = small.rope(x.to(device), positions.to(device), n_rot=n_rot, theta=1e7).cpu()
    torch.testing.assert_close(out, reference.rope(x, positions, n_rot=n_rot, theta=1e7), rtol=1e-5, atol=2e-6)


def test_norm_and_rope_of_strided_heads(device):
    both, gamma, positions = randn(3, 2, 48), randn(24, seed=1), torch.tensor([5, 6, 1000])
    x = both[..., :24]
    expected = reference.rope(reference.rms_norm(x, gamma, 1e-5), positions, n_rot=16, theta=1e4) * 0.25
    out = small.norm_rope(
        both.to(device)[..., :24],
        gamma.to(device),
        positions=positions.to(device),
        eps=1e-5,
        n_rot=16,
        theta=1e4,
        scale=0.25,
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
    alone = small.norm_rope(
        both.to(device)[1:2, :, :24],
        gamma.to(device),
        positions=positions.to(device)[1:2],
        eps=1e-5,
        n_rot=16,
        theta=1e4,
        scale=0.25,
    )
    assert torch.equal(alone[0], out[1])


def test_activations(device):
    x = torch.cat((randn(500), torch.tensor([-90.0, -30.0, -17.0, -5.0, 0.0, 19.9, 20.1, 90.0])))
    y = randn(508, seed=1)
    for code, oracle in (
        (small.SIGMOID, reference.sigmoid),
        (small.SILU, reference.silu),
        (small.SOFTPLUS, reference.softplus),
    ):
        out = small.pointwise(code, x.to(device)).cpu()
        torch.testing.assert_close(out, oracle(x), rtol=2e-6, atol=0 if code == small.SOFTPLUS else 1e-36)
    out = small.pointwise(small.SWIGLU, x.to(device), y.to(device)).cpu()
    torch.testing.assert_close(out, reference.silu(x) * y, rtol=2e-6, atol=1e-36)


@pytest.mark.parametrize(("n_experts", "top_k"), [(40, 10), (8, 8), (128, 1)])
def test_route(n_experts, top_k, device):
    logits = randn(3, n_experts, seed=2)
    logits[1] = 0.5  # all alike: the lowest ids
    logits[2, ::3] = 1.0
    ids, weights = small.route(logits.to(device), top_k)
    expected_ids, expected = reference.route(logits, top_k)
    assert torch.equal(ids.cpu(), expected_ids)
    torch.testing.assert_close(weights.cpu(), expected, rtol=1e-6, atol=1e-7)


def test_a_row_of_nan_names_different_experts_that_exist(device):
    ids, _ = small.route(torch.full((1, 20), torch.nan, device=device), 6)
    assert sorted(ids[0].tolist()) == list(range(6))
