"""Pairs sorted by expert and summed by token, against torch's stable sort and a loop."""

import pytest
import torch

from makeway.kernels.triton import sort as module
from makeway.kernels.triton.sort import SortedPairs, combine, sort_pairs


def random_ids(n, top_k, n_experts, *, padded=0.2):
    """ids int64 [n, top_k], distinct in a row; some rows are padding."""
    generator = torch.Generator().manual_seed(n * 31 + n_experts)
    ids = torch.stack([torch.randperm(n_experts, generator=generator)[:top_k] for _ in range(n)])
    ids[torch.rand(n, generator=generator) < padded] = -1
    return ids


def sorted_pairs(ids, n_experts, device):
    """The result on the device, and a copy on the CPU."""
    room = torch.full((SortedPairs.nbytes(*ids.shape, n_experts),), 249, dtype=torch.uint8, device=device)
    pairs = SortedPairs.of(room, *ids.shape, n_experts=n_experts)
    sort_pairs(ids.to(device), pairs)
    return pairs, SortedPairs(pairs.order.cpu(), pairs.offsets.cpu(), pairs.places.cpu(), pairs.nexts.cpu())


def expected_order(ids):
    flat = ids.reshape(-1)
    order = torch.sort(flat, stable=True).indices
    return order[flat[order] >= 0]


@pytest.mark.parametrize(("n", "top_k", "n_experts"), [(300, 4, 5), (7, 2, 9), (1, 1, 1), (1500, 3, 6)])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pairs_lie_by_expert_then_token(n, top_k, n_experts, dtype, device):
    ids = random_ids(n, top_k, n_experts).to(dtype)
    _, pairs = sorted_pairs(ids, n_experts, device)
    order = expected_order(ids)
    counts = torch.bincount(ids[ids >= 0], minlength=n_experts)
    assert torch.equal(pairs.order[: len(order)].long(), order)
    assert torch.equal(pairs.offsets.long(), torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))))
    places = torch.full((n * top_k,), -1)
    places[order] = torch.arange(len(order))
    assert torch.equal(pairs.places.long().view(-1), places)


def test_many_segments_and_their_sums(device, monkeypatch):
    """Segments that end inside a tile, more of them than are summed at a time, and fewer than there could be."""
    monkeypatch.setattr(module, "SEGMENT_PAIRS", 7)
    monkeypatch.setattr(module, "MOST_SEGMENTS", 50)
    for n, n_segs in ((60, 26), (1000, 50)):
        ids = random_ids(n, 3, 5)
        _, pairs = sorted_pairs(ids, 5, device)
        assert pairs.nexts.shape == (n_segs, 5)
        order = expected_order(ids)
        assert torch.equal(pairs.order[: len(order)].long(), order)
        assert torch.equal(pairs.nexts[-1], pairs.offsets[1:]), "the last segment's pairs end where the expert's do"


def test_only_padding_leaves_every_expert_empty(device):
    _, pairs = sorted_pairs(torch.full((5, 2), -1), 4, device)
    assert pairs.offsets.tolist() == [0] * 5
    assert (pairs.places == -1).all()


def test_no_token_leaves_every_expert_empty(device):
    _, pairs = sorted_pairs(torch.empty((0, 2), dtype=torch.int64), 4, device)
    assert pairs.offsets.tolist() == [0] * 5


@pytest.mark.parametrize(("capacity", "piece", "kind"), [(7, 2, "float32"), (1000, 6, "float32"), (7, 6, "bfloat16")])
def test_sum_has_the_same_bits_for_every_round_and_piece(capacity, piece, kind, device):
    n, top_k, n_experts, hidden = 24, 3, 6, 20
    ids = random_ids(n, top_k, n_experts)
    there, pairs = sorted_pairs(ids, n_experts, device)
    order = expected_order(ids)
    generator = torch.Generator().manual_seed(5)
    outputs = torch.randn((len(order), hidden), generator=generator).to(getattr(torch, kind))
    expected = torch.randn((n, hidden), generator=generator)
    acc = expected.to(device, copy=True)
    for place, pair in enumerate(order.tolist()):  # ascending expert id
        expected[pair // top_k] += outputs[place].float()
    for first in range(0, n_experts, piece):
        last = min(first + piece, n_experts)
        low, high = int(pairs.offsets[first]), int(pairs.offsets[last])
        for skip in range(0, n * top_k, capacity):
            out = torch.full((capacity, hidden), torch.nan, dtype=outputs.dtype)  # what no pair filled must not be read
            filled = outputs[min(low + skip, high) : min(low + skip + capacity, high)]
            out[: len(filled)] = filled
            combine(acc, out.to(device), pairs=there, first=first, last=last, skip=skip)
    assert torch.equal(acc.cpu(), expected)
