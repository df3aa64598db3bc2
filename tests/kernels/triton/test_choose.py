"""The choice by given scores: exactly the reference's, for any scores that are not negative."""

import pytest
import torch

from makeway.kernels import DeviceRows
from makeway.kernels import reference_attention as reference
from makeway.kernels.triton import choose as choosing
from makeway.kernels.triton.choose import IndexScratch, choose

N_BLOCKS = 300


def tiles(monkeypatch, tile, part):
    """Scores of a program, and listed blocks that are looked at together."""
    monkeypatch.setattr(choosing, "SELECT_TILE", tile)
    monkeypatch.setattr(choosing, "LIST_PART", part)


def filled(scores, positions, n_select, device):
    """A scratch with these scores, with their bins counted as the kernel of the scores counts them."""
    n = scores.shape[0]
    scratch = IndexScratch(device, n_blocks=N_BLOCKS, n_rows=n)
    scratch.scores.fill_(torch.nan)
    for row in range(n):
        n_complete = (int(positions[row]) + 1) // 4
        own = scores[row, :n_complete]
        scratch.scores[row, :n_complete] = own.to(device)
        bins = ((own.view(torch.int32) >> choosing.LOW_BITS) - choosing.FIRST_BIN).clamp(0, choosing.N_BINS - 1)
        count = torch.bincount(bins.long(), minlength=choosing.N_BINS).to(torch.int32)
        count[0] = 0
        if n_complete > n_select:
            scratch.bins[row] = count.flip(0).to(device)
    return scratch


def check(scores, positions, n_select, device, *, first=0):
    n = scores.shape[0]
    behind = torch.zeros(first, dtype=torch.int64)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    segments = torch.zeros(first + n, dtype=torch.int32, device=device)
    all_positions = torch.cat((behind, positions)).to(device)
    rows = DeviceRows(all_positions, segments, none, none, none, none, none[None])
    scratch = filled(scores, positions, n_select, device)
    out = torch.full((n, n_select), -7, dtype=torch.int32, device=device)
    choose(scratch, rows, out=out, first=first, n=n, n_blocks=N_BLOCKS, ratio=4)
    expected = reference.best_blocks(scores, positions, ratio=4, n_select=n_select)
    assert torch.equal(out.cpu(), expected)
    assert not scratch.bins.any()
    assert not scratch.arrived.any()


def made(kind, generator):
    """[2, N_BLOCKS] scores."""
    x = torch.rand((2, N_BLOCKS), generator=generator)
    if kind == "ordinary":
        return 4 * x
    if kind == "few values":
        return (4 * x).round() / 2
    if kind == "equal":
        return torch.full_like(x, 0.7)
    if kind == "mostly zero":
        return (x - 0.97).clamp(min=0)
    if kind == "one bin":
        return 1 + x / 128
    if kind == "all sizes":
        return torch.exp(160 * (x - 0.5))
    if kind == "tiny":
        return x * 1e-40
    if kind == "neighbours":
        return (torch.ones_like(x).view(torch.int32) + (3 * x).to(torch.int32)).view(torch.float32)
    assert kind == "huge"
    return torch.where(x > 0.9, torch.inf, x * 3e38)


KINDS = ["ordinary", "few values", "equal", "mostly zero", "one bin", "all sizes", "tiny", "neighbours", "huge"]


@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_best(kind, monkeypatch, device):
    tiles(monkeypatch, 64, 128)
    scores = made(kind, torch.Generator().manual_seed(len(kind)))
    check(scores, torch.tensor([1199, 803]), 40, device)


@pytest.mark.slow
@pytest.mark.parametrize(("tile", "part"), [(32, 16), (512, 64), (512, 512)])
@pytest.mark.parametrize("kind", KINDS)
def test_exactly_the_best_with_other_tiles(kind, tile, part, monkeypatch, device):
    tiles(monkeypatch, tile, part)
    scores = made(kind, torch.Generator().manual_seed(tile))
    for n_select in (1, 64, 65):
        check(scores, torch.tensor([1198, 262]), n_select, device)


@pytest.mark.parametrize("n_select", [31, 32, 75])
def test_lengths_next_to_a_tile_and_to_the_choice(n_select, monkeypatch, device):
    tiles(monkeypatch, 32, 128)
    positions = torch.tensor([0, 3, 18, 127, 131, 303, 307])
    scores = torch.rand((7, N_BLOCKS), generator=torch.Generator().manual_seed(n_select))
    check(scores, positions, n_select, device, first=2)


def test_more_reach_the_floor_than_are_looked_at_together(monkeypatch, device):
    tiles(monkeypatch, 128, 64)
    scores = torch.full((2, N_BLOCKS), 0.5)
    scores[0, 100:] += torch.arange(N_BLOCKS - 100) % 3 / 128  # of one bin
    scores[1, 200:250] = 3.0
    check(scores, torch.tensor([1199, 1199]), 90, device)


def test_a_padding_row_chooses_nothing_wherever_it_stands(monkeypatch, device):
    tiles(monkeypatch, 64, 64)
    scratch = IndexScratch(device, n_blocks=N_BLOCKS, n_rows=1)
    scratch.scores.fill_(torch.nan)
    none = torch.zeros(1, dtype=torch.int32, device=device)
    rows = DeviceRows(torch.tensor([1199], device=device), none - 1, none, none, none, none, none[None])
    out = torch.full((1, 20), -7, dtype=torch.int32, device=device)
    choose(scratch, rows, out=out, first=0, n=1, n_blocks=N_BLOCKS, ratio=4)
    assert (out == -1).all()
    assert not scratch.arrived.any()


def test_all_chosen_lie_in_one_tile(monkeypatch, device):
    tiles(monkeypatch, 64, 64)
    scores = torch.rand((2, N_BLOCKS), generator=torch.Generator().manual_seed(1))
    scores[0, 130:160] += 2
    scores[1, 280:] += 2
    check(scores, torch.tensor([1199, 1199]), 20, device)
