"""Pooled keys, and the choice of blocks: close to the reference's scores, and exactly the best of the kernel's own."""

import pytest
import torch

from makeway.kernels import reference_attention as reference
from makeway.kernels import reference_blocks as blocks
from makeway.kernels.triton import choose as choosing
from makeway.kernels.triton import index
from makeway.kernels.triton.choose import IndexScratch
from makeway.kernels.triton.index import index_pool, index_select
from tests.kernels.triton.paged import batch, copied, padded, pools

STEP = [(299, 1), (2, 2), (18, 3), (39, 1)]
CHUNK = [(150, 21), (37, 3)]
TYPES = [torch.float16, torch.float32]
POOL = {"eps": 1e-6, "n_rot": 8, "theta": 1e7}


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several tiles of everything, with few scores."""
    monkeypatch.setattr(index, "SCORE_KEYS", 16)
    monkeypatch.setattr(choosing, "SELECT_TILE", 32)
    monkeypatch.setattr(choosing, "LIST_PART", 16)


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [STEP, CHUNK], ids=["step", "chunk"])
def test_pooled_keys_and_the_ring(dtype, sizes, device):
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=dtype, index_dim=16)
    rows = batch(sizes, device, block_tokens=16, padding=1)
    raw, gamma = randn(rows.n_rows, 16), randn(16, seed=1)
    ours = copied(kv, device)
    index_pool(padded(raw, 1).to(device), gamma.to(device), kv=ours, rows=rows.fixed, **POOL)
    untouched = kv.pooled.clone()
    reference.index_pool(raw, gamma, kv=kv, rows=rows.rows, **POOL)
    assert torch.equal(ours.ring.cpu(), kv.ring)
    limit = 1e-3 if dtype == torch.float16 else 1e-5
    torch.testing.assert_close(ours.pooled.cpu(), kv.pooled, rtol=limit, atol=limit)
    same = kv.pooled == untouched
    assert torch.equal(ours.pooled.cpu()[same], untouched[same])


@pytest.mark.parametrize("sizes", [STEP, CHUNK], ids=["step", "chunk"])
def test_keys_and_queries_in_one_launch(sizes, device):
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=torch.float32, index_dim=16)
    rows = batch(sizes, device, block_tokens=16, padding=1)
    raw, q = randn(rows.n_rows, 16), randn(rows.n_rows, 3, 16, seed=2)
    norms = {"k_norm": randn(16, seed=1), "q_norm": randn(16, seed=3)}
    ours = copied(kv, device)
    on_device = {name: t.to(device) for name, t in norms.items()}
    found = index.index_input(
        padded(raw, 1).to(device), padded(q, 1).to(device), **on_device, kv=ours, rows=rows.fixed, **POOL
    )
    expected = blocks.index_input(raw, q, **norms, kv=kv, rows=rows.rows, **POOL)
    torch.testing.assert_close(found[: rows.n_rows].cpu(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(ours.ring.cpu(), kv.ring)
    torch.testing.assert_close(ours.pooled.cpu(), kv.pooled, rtol=1e-5, atol=1e-5)


def choose(q, kv, rows, *, n_select, device, more=0, n_rows=8):
    scratch = IndexScratch(device, n_blocks=rows.fixed.max_keys // 4 + 1, n_rows=n_rows)
    scratch.scores.fill_(torch.nan)
    out = index_select(
        padded(q, more).to(device), copied(kv, device), rows=rows.fixed, n_select=n_select, scratch=scratch
    )
    assert not scratch.bins.any()
    assert not scratch.arrived.any()
    return out.cpu(), scratch


def by_score(q, kv, rows, n_select):
    """What the reference chooses, and its scores [n, blocks]."""
    scores = torch.zeros((rows.n_rows, max(s.position + s.n for s in rows.rows.spans) // 4))
    for s in rows.rows.spans:
        n_blocks = (s.position + s.n) // 4
        if n_blocks:
            scores[s.rows, :n_blocks] = reference.block_scores(
                q[s.rows],
                n_blocks=n_blocks,
                pooled_tile=lambda j, s=s: kv.pooled[s.blocks[j]].float(),
                blocks_per_tile=kv.pooled.shape[1],
            )
    return reference.best_blocks(scores, rows.rows.positions, ratio=4, n_select=n_select), scores


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [STEP, CHUNK], ids=["step", "chunk"])
def test_the_best_blocks(dtype, sizes, device):
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=dtype, index_dim=16)
    padding = 1 if sizes is STEP else 0
    rows = batch(sizes, device, block_tokens=16, padding=padding, max_keys=400)
    q = randn(rows.n_rows, 3, 16, seed=4)
    out, scratch = choose(q, kv, rows, n_select=9, device=device, more=padding)
    assert (out[rows.n_rows :] == -1).all()
    expected, scores = by_score(q, kv, rows, 9)
    if sizes is STEP:  # the scratch still holds every row
        own = scores.clone()
        for row, position in enumerate(rows.rows.positions.tolist()):
            n = (position + 1) // 4
            if n > 9:
                own[row, :n] = scratch.scores[row, :n].cpu()
        torch.testing.assert_close(own, scores, rtol=1e-5, atol=1e-5)
        expected = reference.best_blocks(own, rows.rows.positions, ratio=4, n_select=9)
    assert torch.equal(out[: rows.n_rows], expected)


@pytest.mark.parametrize("n_select", [1, 7, 40, 70, 80])
def test_equal_scores_go_to_the_lower_block(n_select, device):
    sizes = [(299, 1), (250, 2)]
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=torch.float32, index_dim=16)
    kv.pooled.zero_()
    flat = kv.pooled.view(-1, 16)
    flat[:, 0] = torch.tensor([0.0, 1.0, -3.0, 1.0, 2.0, 1.0, 1.0 + 2**-20, 0.0]).repeat(flat.shape[0] // 8 + 1)[
        : len(flat)
    ]
    rows = batch(sizes, device, block_tokens=16)
    q = torch.ones(3, 2, 16)
    out, _ = choose(q, kv, rows, n_select=n_select, device=device)
    assert torch.equal(out, by_score(q, kv, rows, n_select)[0])


@pytest.mark.parametrize("values", ["any", "few", "rising"])
@pytest.mark.parametrize("n_select", [pytest.param(1, marks=pytest.mark.slow), 9])
def test_a_chunk_chooses_alike_by_counts_of_blocks_and_of_groups(values, n_select, device, monkeypatch):
    """Of groups: with more good blocks in one group than elsewhere, counts are too low, and the choice is not."""
    sizes = [(597, 8), (300, 2)]
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=torch.float32, index_dim=16)
    flat = kv.pooled.view(-1, 16)
    if values != "any":
        flat.zero_()
        flat[:, 0] = torch.arange(len(flat)) if values == "rising" else torch.arange(len(flat)) // 16 % 5
    rows = batch(sizes, device, block_tokens=16)
    q = randn(rows.n_rows, 3, 16, seed=4).abs()
    monkeypatch.setattr(index, "SCORE_KEYS", 16)
    monkeypatch.setattr(index, "TILES", 3)
    monkeypatch.setattr(choosing, "SELECT_TILE", 64)
    out, _ = choose(q, kv, rows, n_select=n_select, device=device)
    monkeypatch.setattr(index, "MANY", 1000)
    by_blocks, _ = choose(q, kv, rows, n_select=n_select, device=device)
    assert torch.equal(out, by_blocks)
    assert torch.equal(out, by_score(q, kv, rows, n_select)[0])


def test_all_scores_zero(device):
    sizes = [(299, 2)]
    kv = pools(sizes, block_tokens=16, n_kv=1, d=16, dtype=torch.float16, index_dim=16)
    kv.pooled.zero_()
    out, _ = choose(torch.ones(2, 2, 16), kv, batch(sizes, device, block_tokens=16), n_select=20, device=device)
    assert torch.equal(out, torch.arange(20, dtype=torch.int32).repeat(2, 1))


def test_a_row_chooses_alike_alone_and_under_a_larger_plan(device):
    kv = pools(STEP, block_tokens=16, n_kv=1, d=16, dtype=torch.float16, index_dim=16)
    rows = batch(STEP, device, block_tokens=16)
    q = randn(rows.n_rows, 4, 16)
    out, scratch = choose(q, kv, rows, n_select=9, device=device)
    wide, wide_scratch = choose(q, kv, batch(STEP, device, block_tokens=16, max_keys=2000), n_select=9, device=device)
    assert torch.equal(out, wide)
    assert torch.equal(scratch.scores[0, :75], wide_scratch.scores[0, :75])
