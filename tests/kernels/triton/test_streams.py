"""Hyper-connections' kernels against the reference's steps."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels import reference_blocks as blocks
from makeway.kernels.triton import streams
from tests.kernels.triton.test_fused import randn, same_as_parts


@pytest.mark.parametrize("n_parts", [1, 2])
def test_stream_norm_with_and_without_something_added(n_parts, device):
    h, inject, out, gamma = randn(3, 4, 20), randn(3, 4, seed=1), randn(3, 20, seed=2), randn(80, seed=3)
    for added in (None, (inject, out)):
        expected_h = h if added is None else blocks.hc_combine(h, inject, out)
        expected = reference.rms_norm(expected_h, gamma.view(4, 20), 1e-6).reshape(3, -1)
        on_device = None if added is None else (inject.to(device), out.to(device))
        given = h.to(device, copy=True)
        new_h, normed, parts = streams.stream_norm(given, gamma.to(device), eps=1e-6, n_parts=n_parts, added=on_device)
        torch.testing.assert_close(new_h.cpu(), expected_h)
        in_place = added is None or n_parts == 1  # a chunk's streams change where they are
        assert (new_h.data_ptr() == given.data_ptr()) == in_place
        assert torch.equal(given.cpu(), new_h.cpu() if in_place else h)
        limit = 2**-8 if n_parts == 1 else 1e-5
        torch.testing.assert_close(normed.cpu().float(), expected, rtol=limit, atol=1e-6)
        same_as_parts(parts.cpu(), expected)
    combined = streams.hc_combine(h.to(device), inject.to(device), out.to(device))
    torch.testing.assert_close(combined.cpu(), blocks.hc_combine(h, inject, out))


@pytest.mark.parametrize("n_streams", [1, 3, 4])
def test_the_end_of_a_mixer(n_streams, device):
    up, normed, raw = randn(2, n_streams * 300), randn(2, n_streams * 300, seed=1), randn(2, n_streams, seed=2)
    expected = (reference.sigmoid(up) * normed).view(2, n_streams, 300).mean(1)
    x, parts, inject = streams.mixed(up.to(device), normed.to(device), raw.to(device), n_streams=n_streams, n_parts=2)
    torch.testing.assert_close(x.cpu(), expected, rtol=1e-5, atol=1e-6)
    same_as_parts(parts.cpu(), x.cpu())
    torch.testing.assert_close(inject.cpu(), 2 * reference.sigmoid(raw / n_streams), rtol=1e-5, atol=1e-6)
    up, normed = up.bfloat16(), normed.bfloat16()  # as a chunk has them
    expected = (reference.sigmoid(up.float()) * normed.float()).view(2, n_streams, 300).mean(1)
    x, parts, none = streams.mixed(up.to(device), normed.to(device), None, n_streams=n_streams, n_parts=1)
    assert x.data_ptr() == parts.data_ptr()
    same_as_parts(parts.cpu(), expected)
    assert none is None
