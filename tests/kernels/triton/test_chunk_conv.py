"""The convolution of a chunk against the reference, with and without what the delta rule wants behind it."""

import pytest
import torch

from makeway.kernels import reference
from makeway.kernels.triton.chunk_conv import chunk_conv
from makeway.kernels.triton.conv import conv_step
from tests.kernels.triton.paged import batch
from tests.kernels.triton.test_delta import CHANNELS, TAPS, close, conv_state, on, randn

SIZES = [(5, 33), (9, 2)]


@pytest.mark.parametrize("dilation", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_chunk_and_the_tail_behind_it(dilation, device):
    rows = batch(SIZES, device, block_tokens=16, replays=[3, 0])
    x, kernel = randn(35, CHANNELS, seed=2), randn(CHANNELS, TAPS, seed=3)
    theirs = conv_state(dilation)
    ours = on(theirs, device)
    wide = torch.cat((x, torch.zeros(35, 10)), dim=1).to(device)  # rows may be strided
    out = conv_step(wide[:, :CHANNELS], kernel.to(device), state=ours, rows=rows.fixed, dilation=dilation)
    expected = reference.conv_step(x, kernel, state=theirs, rows=rows.rows, dilation=dilation)
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-5)
    close(ours, theirs)


def test_heads_of_a_chunk_are_normed_and_rounded(device):
    n_heads, d = 2, 16
    rows = batch(SIZES, device, block_tokens=16, replays=[3, 0])
    x, kernel = randn(35, 6 * d, seed=2), randn(6 * d, TAPS, seed=3)
    state = conv_state(1, 6 * d)
    out = torch.full((35, 6 * d), torch.nan, dtype=torch.bfloat16, device=device)
    options = {"dilation": 1, "k_heads": (n_heads, d), "out": out}
    chunk_conv(x.to(device), kernel.to(device), on(state, device), rows.fixed, **options)
    heads = reference.silu(reference.conv_step(x, kernel, state=state, rows=rows.rows)).view(35, 6, d)
    q, k = reference.l2_norm(heads[:, :n_heads]) * d**-0.5, reference.l2_norm(heads[:, n_heads : 2 * n_heads])
    expected = torch.cat((q, k, heads[:, 2 * n_heads :]), dim=1).flatten(1)
    torch.testing.assert_close(out.cpu().float(), expected, rtol=2**-8, atol=1e-6)
