"""Attention over pages against the reference: steps and chunks, all keys and selected ones, f16 and f32 pools."""

import pytest
import torch

from makeway.kernels import reference_attention as reference
from makeway.kernels.triton import attend as kernels
from makeway.kernels.triton.attend import attend, write_kv
from tests.kernels.triton.paged import batch, copied, padded, pools

STEP = [(320, 1), (0, 2), (255, 2)]
CHUNK = [(60, 9), (0, 5)]
TYPES = [torch.float16, torch.float32]


def randn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_keys_and_values_land_in_their_blocks_and_padding_writes_nothing(dtype, device):
    sizes = [(7, 3), (30, 4)]
    kv = pools(sizes, block_tokens=8, n_kv=2, d=16, dtype=dtype)
    rows = batch(sizes, device, block_tokens=8, padding=1)
    keys, values = randn(7, 2, 16), randn(7, 2, 16, seed=1)
    ours = copied(kv, device)
    write_kv(padded(keys, 1).to(device), padded(values, 1).to(device), kv=ours, rows=rows.fixed)
    reference.write_kv(keys, values, kv=kv, rows=rows.rows)
    assert torch.equal(ours.keys.cpu(), kv.keys)
    assert torch.equal(ours.values.cpu(), kv.values)


@pytest.mark.parametrize(("dtype", "heads"), [(TYPES[0], (6, 2)), (TYPES[1], (8, 1))], ids=str)
@pytest.mark.parametrize("sizes", [STEP, CHUNK], ids=["step", "chunk"])
def test_all_keys(dtype, heads, sizes, device, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SPLITS", 3)  # of 6 tiles and of 21
    n_heads, n_kv = heads
    kv = pools(sizes, block_tokens=64, n_kv=n_kv, d=16, dtype=dtype)
    rows = batch(sizes, device, block_tokens=64, padding=1 if sizes is STEP else 0, max_keys=600)
    q, gate = randn(rows.n_rows, n_heads, 16), randn(rows.n_rows, n_heads, 16, seed=1)
    expected = reference.attend(q * 0.25, kv, rows=rows.rows)
    ours = copied(kv, device)
    tokens = rows.fixed.positions.shape[0] - rows.n_rows
    queries, gates = padded(q, tokens).to(device), padded(gate, tokens).to(device)
    out = attend(queries, ours, rows=rows.fixed, scale=0.25).cpu()
    limit = 2e-3 if dtype == torch.float16 and sizes is CHUNK else 1e-5
    torch.testing.assert_close(out[: rows.n_rows], expected, rtol=limit, atol=limit)
    assert not out[rows.n_rows :].any()
    gated = attend(queries, ours, rows=rows.fixed, gate=gates, scale=0.25).cpu()
    torch.testing.assert_close(gated[: rows.n_rows], expected * torch.sigmoid(gate), rtol=limit, atol=limit)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("sizes", [[(300, 1), (2, 2), (18, 3)], CHUNK], ids=["step", "chunk"])
def test_selected_keys(dtype, sizes, device):
    n_select = 5
    kv = pools(sizes, block_tokens=64, n_kv=1, d=16, dtype=dtype, index_dim=8)
    rows = batch(sizes, device, block_tokens=64, padding=2 if sizes is not CHUNK else 0, max_keys=600)
    positions = rows.rows.positions
    n = positions.shape[0]
    scores = randn(n, 100, seed=3)
    selected = reference.best_blocks(scores, positions, ratio=4, n_select=n_select)
    q = randn(n, 3, 16)
    expected = reference.attend(q, kv, rows=rows.rows, selected=selected)
    more = rows.fixed.positions.shape[0] - n
    out = attend(
        padded(q, more).to(device), copied(kv, device), rows=rows.fixed, selected=padded(selected, more, -1).to(device)
    )
    limit = 2e-3 if dtype == torch.float16 and sizes is CHUNK else 1e-5
    torch.testing.assert_close(out[:n].cpu(), expected, rtol=limit, atol=limit)


@pytest.mark.parametrize("most", [3, 64])
def test_a_row_has_the_same_bits_alone_in_company_and_under_a_larger_plan(most, device, monkeypatch):
    monkeypatch.setattr(kernels, "MOST_SPLITS", most)
    kv = copied(pools(STEP, block_tokens=64, n_kv=2, d=16, dtype=torch.float16), device)
    q = randn(5, 4, 16).to(device)
    together = batch(STEP, device, block_tokens=64)
    out = attend(q, kv, rows=together.fixed)
    again = attend(q, kv, rows=batch(STEP, device, block_tokens=64, max_keys=2000).fixed)
    assert torch.equal(out, again)
    fixed = together.fixed.fixed
    last = together.rows.spans[2]
    alone = batch([(255, 1)], device, block_tokens=64, max_keys=900)
    alone.fixed.fixed.block_tables[0] = fixed.block_tables[2, : alone.fixed.fixed.block_tables.shape[1]]
    assert torch.equal(attend(q[last.first : last.first + 1], kv, rows=alone.fixed)[0], out[last.first])
