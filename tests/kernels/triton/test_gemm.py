"""The products of one round, and the tiles."""

import pytest
import torch

from makeway.kernels.triton import gemm as module
from makeway.kernels.triton.gemm import AMPERE, HOPPER, PlainMatrices, Round, Tile, Tiles, down, gate_up, tiles_of
from makeway.kernels.triton.sort import SortedPairs, sort_pairs


@pytest.mark.parametrize(("skip", "capacity", "in_rows"), [(0, 40, False), (9, 6, False), (9, 6, True)])
def test_a_round_multiplies_its_rows_and_writes_no_other(skip, capacity, in_rows, device, monkeypatch):
    tile = Tile(16, 16, 16, warps=4, stages=2, described=in_rows)
    monkeypatch.setattr(module, "tiles_of", lambda _: Tiles(tile, tile, tile, tile))
    n, top_k, n_experts, d, d_ff, first, last = 18, 2, 4, 40, 24, 1, 4
    generator = torch.Generator().manual_seed(1)
    ids = torch.stack([torch.randperm(n_experts, generator=generator)[:top_k] for _ in range(n)])
    room = torch.empty(SortedPairs.nbytes(n, top_k, n_experts), dtype=torch.uint8, device=device)
    pairs = SortedPairs.of(room, n, top_k, n_experts=n_experts)
    sort_pairs(ids.to(device), pairs)
    x = torch.randn((n, d), generator=generator).bfloat16()
    weights = (torch.randn((last - first, 3 * d * d_ff), generator=generator) / 8).bfloat16()
    flat = weights.view(-1).to(device)
    starts = torch.arange(last - first, device=device) * (6 * d * d_ff)
    pair_weights = torch.rand((n, top_k), generator=generator)
    part = Round(pairs, first, last, skip, capacity, bins=8)
    hidden = torch.full((capacity, d_ff), torch.nan, dtype=torch.bfloat16, device=device)
    kind = torch.bfloat16 if in_rows else torch.float32
    out = torch.full((capacity, d), torch.nan, dtype=kind, device=device)
    gate_up(x.to(device), PlainMatrices(flat, starts, 0, d * d_ff, in_rows), d_ff=d_ff, part=part, out=hidden)
    down(
        hidden,
        PlainMatrices(flat, starts, 4 * d * d_ff, in_rows=in_rows),
        part=part,
        pair_weights=pair_weights.to(device),
        out=out,
    )
    offsets = pairs.offsets.tolist()
    low, high = offsets[first] + skip, min(offsets[last], offsets[first] + skip + capacity)
    assert high - low > 5
    for place in range(low, high):
        pair = int(pairs.order[place])
        expert = int(ids.view(-1)[pair])
        gate, up, down_matrix = weights[expert - first].float().view(3, -1)
        row = x[pair // top_k].float()
        h = torch.nn.functional.silu(gate.view(d_ff, d) @ row) * (up.view(d_ff, d) @ row)
        assert torch.allclose(hidden[place - low].float().cpu(), h, rtol=0.01, atol=0.01)
        expected = down_matrix.view(d, d_ff) @ hidden[place - low].float().cpu() * pair_weights.view(-1)[pair]
        limit = 1e-4 if kind == torch.float32 else 2**-8
        assert torch.allclose(out[place - low].float().cpu(), expected, rtol=limit, atol=1e-5)
    assert hidden[high - low :].isnan().all()
    assert out[high - low :].isnan().all()


def test_all_tiles_of_an_architecture_have_one_depth():
    """A row's bits depend on the depth: with one, the choice among tiles stays free."""
    for tiles in (AMPERE, HOPPER):
        assert len({tile.depth for tile in vars(tiles).values()}) == 1
    assert tiles_of(torch.device("cpu")) is AMPERE
