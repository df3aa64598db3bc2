"""Several matrices in one launch: each as if alone, but for rounding."""

import pytest
import torch

from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels import Weight
from makeway.kernels.triton.linear import Scratch, split
from makeway.kernels.triton.linears import groups, linears
from tests.kernels.triton.blocks import random_weight

ROWS = (33, 1, 20, 5)


@pytest.fixture(scope="module")
def scratch(device):
    return Scratch(device, n_parts=1 << 16, n_tiles=64)


def weights_of(kind, n_cols, device):
    found = [random_weight(kind, n, n_cols, seed=i) for i, n in enumerate(ROWS)]
    return [Weight(w.raw.to(device), w.type, w.n_cols) for w in found]


@pytest.mark.parametrize(("kind", "n_cols"), [(GGMLType.Q8_0, 128), (GGMLType.F32, 64), (GGMLType.Q4_K, 256)], ids=str)
@pytest.mark.parametrize("n_together", [2, 4])
def test_each_is_right(kind, n_cols, n_together, device, scratch):
    weights = weights_of(kind, n_cols, device)[:n_together]
    x = torch.randn(3, n_cols, generator=torch.Generator().manual_seed(1)).to(device)
    scratch.parts.fill_(torch.nan)
    outs = linears(split(x), weights, scratch=scratch)
    assert not scratch.counters.any()
    for out, w in zip(outs, weights, strict=True):
        values = w.decode().double().cpu()
        bound = x.double().cpu().abs() @ values.abs().T
        error = (out.double().cpu() - x.double().cpu() @ values.T).abs()
        assert bool((error <= 2**-16 * bound).all())


def test_a_row_has_the_same_bits_alone_and_among_others(device, scratch):
    weights = weights_of(GGMLType.Q8_0, 64, device)
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4)).to(device)
    together = linears(split(x), weights, scratch=scratch)
    for first, n in ((3, 1), (2, 4)):
        part = linears(split(x[first : first + n]), weights, scratch=scratch)
        assert all(torch.equal(a, b[first : first + n]) for a, b in zip(part, together, strict=True))


def test_only_small_matrices_of_one_type_and_width_go_together():
    def w(kind, n_rows, n_cols=256):
        return Weight(torch.zeros((n_rows, row_bytes(kind, n_cols)), dtype=torch.uint8), kind, n_cols)

    q8, f32 = GGMLType.Q8_0, GGMLType.F32
    assert groups([w(f32, 512), w(f32, 1), w(q8, 640), w(q8, 640)]) == [[0, 1], [2, 3]]
    assert groups([w(q8, 10240), w(q8, 48), w(q8, 48)]) == [[0], [1, 2]]
    assert groups([w(q8, 4), w(q8, 4, 512), w(q8, 4)]) == [[0, 2], [1]]
    assert groups([w(q8, 4)] * 6) == [[0, 1, 2, 3], [4, 5]]
