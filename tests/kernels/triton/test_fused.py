"""What stands between the matrices against the reference's steps, and the parts that matrices get."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels import reference_blocks as blocks
from makeway.kernels.triton import fused
from makeway.kernels.triton.gated_delta import gated_delta
from makeway.kernels.triton.linear import MAX_ROWS
from tests.kernels.triton.paged import batch, padded
from tests.kernels.triton.test_delta import D_K, D_V, HEADS, K_HEADS, TAPS, close, conv_state, delta_state, on


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def same_as_parts(parts, x):
    """Two parts hold x to 2^-16 of it, one to 2^-8."""
    limit = 2**-16 if parts.shape[0] == 2 else 2**-8
    torch.testing.assert_close(parts.float().sum(0), x, rtol=limit, atol=1e-30)


def test_the_gate_of_ple(device):
    key, h, value = randn(3, 2, 40), randn(3, 2, 40, seed=1), randn(3, 40, seed=2)
    key[1] = 0.0  # no product: the gate is half open
    norms = {name: randn(80, seed=i + 3) for i, name in enumerate(("norm_key", "norm_query", "norm_conv"))}
    expected = blocks.ple_gate(key, h, value, **norms, eps=1e-6)
    on_device = {name: t.to(device) for name, t in norms.items()}
    found = fused.ple_gate(key.to(device), h.to(device), value.to(device), **on_device, eps=1e-6)
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-5, atol=1e-6)
    assert torch.allclose(found[0][1].cpu(), value[1] / 2)


def test_activations_in_front_of_matrices(device):
    x, y = randn(2, 600), randn(2, 600, seed=1)
    parts = fused.silu_parts(x.to(device), scale=0.25, n_parts=2)
    torch.testing.assert_close(parts.cpu().float().sum(0), reference.silu(x * 0.25), rtol=1e-4, atol=1e-6)
    parts = fused.swiglu_parts(x.to(device), y.to(device), n_parts=2)
    torch.testing.assert_close(parts.cpu().float().sum(0), reference.silu(x) * y, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("n_parts", "d"), [(0, 20), (1, 600), (2, 20)])
def test_a_residual_with_something_added_and_its_norm(n_parts, d, device):
    h, more, gamma = randn(3, d), randn(3, d, seed=1), randn(d, seed=2)
    for added in (None, more):
        expected_h, expected = blocks.add_norm(h, added, gamma=gamma, eps=1e-6)
        on_device = None if added is None else added.to(device)
        new_h, x, parts = fused.add_norm(h.to(device), on_device, gamma=gamma.to(device), eps=1e-6, n_parts=n_parts)
        assert torch.equal(new_h.cpu(), expected_h)
        torch.testing.assert_close(x.cpu(), expected, rtol=1e-5, atol=1e-6)
        assert parts.shape == (n_parts, 3, d)
        if n_parts:
            same_as_parts(parts.cpu(), x.cpu())


@pytest.mark.parametrize(("n", "heads", "n_parts"), [(3, 5, 2), (3, 5, 0), (MAX_ROWS + 1, 19, 1), (MAX_ROWS + 1, 3, 1)])
def test_heads_normed_and_gated_one_by_one_or_many_together(n, heads, n_parts, device):
    x, gate, gamma = randn(n, heads, 16), randn(n, heads * 16 + 4, seed=1)[:, : heads * 16], randn(16, seed=2)
    normed = reference.rms_norm(x, gamma, 1e-6).reshape(n, -1)
    for sigmoid_gate in (True, False):
        expected = normed * (reference.sigmoid(gate) if sigmoid_gate else reference.silu(gate))
        where = {"eps": 1e-6, "sigmoid_gate": sigmoid_gate, "n_parts": n_parts}
        out, parts = fused.gated_norm_parts(x.to(device), gate.to(device), gamma.to(device), **where)
        limit = 2**-8 if n_parts == 1 else 1e-5
        torch.testing.assert_close(out.cpu().float(), expected, rtol=limit, atol=1e-6)
        if n_parts:
            same_as_parts(parts.cpu(), expected)


@pytest.mark.parametrize(("keep", "sigmoid_gate"), [(False, True), (True, False)])
def test_gated_delta(keep, sigmoid_gate, device):
    channels = 2 * K_HEADS * D_K + HEADS * D_V
    rows = batch([(9, 3), (4, 1)], device, block_tokens=16, replays=[2, 0], padding=1, keep=keep)
    theirs_conv, theirs = conv_state(1, channels), delta_state(True)
    ours_conv, ours = on(theirs_conv, device), on(theirs, device)
    inputs = {
        "qkv": randn(4, channels),
        "gate": randn(4, HEADS * D_V, seed=1),
        "alpha": randn(4, HEADS, seed=2),
        "beta": randn(4, HEADS, seed=3),
    }
    weights = {
        "conv": randn(channels, TAPS, seed=4),
        "a": -torch.rand(HEADS),
        "dt_bias": randn(HEADS, seed=5),
        "norm": randn(D_V, seed=6),
    }
    options = {"eps": 1e-6, "sigmoid_gate": sigmoid_gate}
    expected = blocks.gated_delta(**inputs, **weights, **options, conv_state=theirs_conv, state=theirs, rows=rows.rows)
    out, parts = gated_delta(
        **{name: padded(t, 1, torch.nan).to(device) for name, t in inputs.items()},
        **{name: t.to(device) for name, t in weights.items()},
        **options,
        conv_state=ours_conv,
        state=ours,
        rows=rows.fixed,
        scratch=None,
        n_parts=2,
    )
    torch.testing.assert_close(out[:4].cpu(), expected, rtol=1e-4, atol=1e-5)
    same_as_parts(parts[:, :4].cpu(), out[:4].cpu())
    close(ours, theirs)
    close(ours_conv, theirs_conv)
