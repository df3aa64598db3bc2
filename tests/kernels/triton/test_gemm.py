"""Decoding to bf16 over all types, and the products of one round."""

import pytest
import torch

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.triton.gemm import (
    AMPERE,
    HOPPER,
    PlainMatrices,
    QuantMatrix,
    Round,
    decode_matrices,
    down,
    gate_up,
    tiles_of,
)
from makeway.kernels.triton.sort import SortedPairs, sort_pairs
from makeway.kernels.triton.unpack import PLANES, planes_for
from tests.kernels.triton.blocks import random_weight


def width(kind, *, wide):
    """Columns of a row whose blocks are, or are not, taken by twos and fours."""
    n_elements = BLOCK_SIZES[kind].elements
    return 4 * n_elements if wide else 3 * max(PLANES[kind].step, n_elements)


QUICK = [GGMLType.Q4_K, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.IQ4_NL, GGMLType.MXFP4, GGMLType.BF16, GGMLType.F32]
CASES = [
    pytest.param(kind, wide, id=kind.name + " wide" * wide, marks=[] if kind in QUICK else [pytest.mark.slow])
    for kind in PLANES
    for wide in (False, True)
    if not wide or planes_for(kind, 1024) is not PLANES[kind]
]


@pytest.mark.parametrize(("kind", "wide"), CASES)
def test_every_type_decodes_to_the_rounded_reference(kind, wide, device):
    n_rows, n_cols = 5, width(kind, wide=wide)
    assert (planes_for(kind, n_cols) is PLANES[kind]) != wide
    weights = [random_weight(kind, n_rows, n_cols, seed=seed) for seed in range(3)]
    n_bytes = weights[0].nbytes
    stride = -(-(n_bytes + 16) // 16) * 16
    room = torch.zeros(3 * stride, dtype=torch.uint8)
    for i, weight in enumerate(weights):
        room[i * stride + 16 : i * stride + 16 + n_bytes] = weight.raw.reshape(-1)
    where = torch.arange(0, 3 * stride, stride, device=device)
    counted = torch.tensor([4, 5, 5, 9], dtype=torch.int32, device=device)  # nobody chose the second
    matrix = QuantMatrix(kind, n_rows, n_cols, inside=16)
    values = n_rows * n_cols
    out = torch.full((3, values + 8), torch.nan, dtype=torch.bfloat16, device=device)
    decode_matrices(room.to(device), where, matrix, out=out, counted=counted)
    for i in (0, 2):
        assert torch.equal(out[i, :values].cpu().view(n_rows, n_cols), weights[i].decode().bfloat16()), i
    assert out[1].isnan().all()
    assert out[:, values:].isnan().all()


def test_terms_add_up_to_float32(device):
    weight = random_weight(GGMLType.F32, 4, 32)
    out = torch.empty((3, 128), dtype=torch.bfloat16, device=device)
    where = torch.zeros(1, dtype=torch.int64, device=device)
    counted = torch.tensor([0, 1], dtype=torch.int32, device=device)
    for term in range(3):
        decode_matrices(
            weight.raw.view(-1).to(device),
            where,
            QuantMatrix(weight.type, 4, 32),
            out=out[term : term + 1],
            counted=counted,
            term=term,
        )
    assert torch.equal(out.double().sum(0).cpu(), weight.decode().double().view(-1))


@pytest.mark.parametrize(("skip", "capacity"), [(0, 40), (9, 6)])
def test_a_round_multiplies_its_rows_and_writes_no_other(skip, capacity, device):
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
    part = Round(pairs, first, last, skip, capacity)
    hidden = torch.full((capacity, d_ff), torch.nan, dtype=torch.bfloat16, device=device)
    out = torch.full((capacity, d), torch.nan, device=device)
    gate_up(x.to(device), PlainMatrices(flat, starts, 0, d * d_ff), d_ff=d_ff, part=part, out=hidden)
    down(hidden, PlainMatrices(flat, starts, 4 * d * d_ff), part=part, pair_weights=pair_weights.to(device), out=out)
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
        assert torch.allclose(out[place - low].cpu(), expected, rtol=1e-4, atol=1e-5)
    assert hidden[high - low :].isnan().all()
    assert out[high - low :].isnan().all()


def test_tiles_fit_every_quantised_width():
    for tiles in (AMPERE, HOPPER):
        for tile in vars(tiles).values():
            assert tile.depth % max(BLOCK_SIZES[k].elements for k in PLANES if BLOCK_SIZES[k].elements < 256) == 0
    assert tiles_of(torch.device("cpu")) is AMPERE
