"""Decoding to bf16 over all types."""

import pytest
import torch

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.triton.decode import QuantMatrix, decode_matrices
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
    raw, matrix = weight.raw.view(-1).to(device), QuantMatrix(weight.type, 4, 32)
    decode_matrices(raw, where, matrix, out=out.view(1, -1), counted=counted, terms=3, term_stride=128)
    assert torch.equal(out.double().sum(0).cpu(), weight.decode().double().view(-1))
