"""Attention of a chunk: any tiling and any chunk against the reference, over blocks that lie apart."""

import pytest
import torch

from makeway.kernels import reference_attention as reference
from makeway.kernels.triton.attend_chunk import ChunkTiling, attend_chunk
from tests.kernels.triton.paged import batch, copied, pools

D = 16


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def attended(q, kv, rows, tiling, gate=None):
    out = torch.empty(q.shape, device=q.device)
    attend_chunk(q, kv, rows=rows, gate=gate, scale=0.25, out=out, tiling=tiling)
    return out


@pytest.mark.parametrize(
    "tiling",
    [
        ChunkTiling(16, 64, warps=4, stages=1),
        ChunkTiling(32, 128, warps=4, stages=1),
        ChunkTiling(16, 32, warps=4, stages=1, described=True),
        pytest.param(ChunkTiling(64, 32, warps=4, stages=1), marks=pytest.mark.slow),
    ],
    ids=["a block", "several blocks", "part of a block, described", "part of a block"],
)
def test_any_tiling_agrees_with_the_reference(tiling, device):
    sizes = [(121, 21), (0, 13)]
    kv = pools(sizes, block_tokens=64, n_kv=2, d=D, dtype=torch.float16)
    told = batch(sizes, device, block_tokens=64)
    q, gate = randn(told.n_rows, 6, D), randn(told.n_rows, 6, D, seed=1)
    expected = reference.attend(q * 0.25, kv, rows=told.rows) * torch.sigmoid(gate)
    out = attended(q.to(device), copied(kv, device), told.fixed, tiling, gate.to(device))
    torch.testing.assert_close(out.cpu(), expected, rtol=2e-3, atol=2e-3)


def test_rows_have_the_same_bits_in_any_chunk(device):
    kv = copied(pools([(0, 40)], block_tokens=16, n_kv=1, d=D, dtype=torch.float16), device)
    q, tiling = randn(40, 3, D).to(device), ChunkTiling(16, 16, warps=4, stages=1)
    whole = attended(q, kv, batch([(0, 40)], device, block_tokens=16).fixed, tiling)
    for first, n in ((0, 11), (11, 20), (31, 9)):
        rows = batch([(first, n)], device, block_tokens=16).fixed
        blocks = batch([(0, 40)], device, block_tokens=16).fixed.fixed.block_tables
        rows.fixed.block_tables[0] = blocks[0, : rows.fixed.block_tables.shape[1]]
        assert torch.equal(attended(q[first : first + n], kv, rows, tiling), whole[first : first + n])
