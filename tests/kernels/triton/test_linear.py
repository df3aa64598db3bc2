import pytest
import torch

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels import Weight
from makeway.kernels.triton.linear import PROGRAMS, Scratch, can_multiply, linear, tiling
from makeway.kernels.triton.unpack import PLANES, planes_for
from tests.kernels.triton.blocks import random_weight


@pytest.fixture(scope="module")
def scratch(device):
    return Scratch(device, n_parts=1 << 16, n_tiles=64)


def _on(device, weight):
    return Weight(weight.raw.to(device), weight.type, weight.n_cols)


def _check(out, x, weight, rounding):
    """Every term may be off by `rounding` of its size."""
    w = weight.decode().double().cpu()
    x = x.double().cpu()
    assert out.shape == (x.shape[0], weight.n_rows)
    bound = x.abs() @ w.abs().T
    error = (out.double().cpu() - x @ w.T).abs()
    assert bool((error <= rounding * bound).all()), float((error / bound).max())


QUICK = (GGMLType.Q4_K, GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.MXFP4, GGMLType.F16, GGMLType.F32)
SLOW = [pytest.param(kind, marks=pytest.mark.slow) for kind in PLANES if kind not in QUICK]


@pytest.mark.parametrize("kind", [*QUICK, *SLOW], ids=lambda k: k.name)
def test_every_type_multiplies_as_the_reference(kind, device, scratch):
    n_cols = max(64, BLOCK_SIZES[kind].elements)
    weight = _on(device, random_weight(kind, 20, n_cols))
    x = torch.randn(3, n_cols, generator=torch.Generator().manual_seed(1)).to(device)
    out = torch.full((3, 20), torch.nan, device=device)
    linear(x, weight, scratch=scratch, out=out)
    _check(out, x, weight, 2**-16)


def test_activations_in_bf16_are_taken_as_they_are(device, scratch):
    weight = _on(device, random_weight(GGMLType.Q5_1, 16, 64))
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(2)).to(device).bfloat16()
    _check(linear(x, weight, scratch=scratch), x, weight, 2**-18)


def test_splitting_columns_changes_only_rounding_and_leaves_the_counters_at_zero(device, scratch):
    weight = _on(device, random_weight(GGMLType.Q5_1, 17, 6 * 32))
    x = torch.randn(2, 6 * 32, generator=torch.Generator().manual_seed(3)).to(device)
    for split, unroll in ((1, 2), (3, 2), (6, 1), (4, 1)):  # of six steps; with four parts the last one has none
        scratch.parts.fill_(torch.nan)
        out = torch.full((2, 17), torch.nan, device=device)
        linear(x, weight, scratch=scratch, out=out, split=split, unroll=unroll)
        _check(out, x, weight, 2**-16)
        assert not scratch.counters.any()


def test_a_row_has_the_same_bits_alone_and_among_others(device, scratch):
    weight = _on(device, random_weight(GGMLType.Q5_1, 16, 64))
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(4)).to(device)
    together = linear(x, weight, scratch=scratch)
    for n in (1, 2, 4):
        assert torch.equal(linear(x[3 : 3 + n], weight, scratch=scratch), together[3 : 3 + n])


def test_a_tiling_divides_the_work_and_fills_the_machine():
    for kind, planes in PLANES.items():
        for n_rows, n_cols in ((640, 2560), (2560, 6144), (12288, 2560), (248320, 2560), (320, 10240), (2048, 768)):
            if n_cols % planes.step:
                continue
            tiles = tiling(kind, n_rows, n_cols)
            n_steps = n_cols // planes_for(kind, n_cols).step
            assert n_steps % (tiles.unroll * tiles.split) == 0
            assert tiles.split == 1 or -(-n_rows // tiles.rows) * tiles.split < 4 * PROGRAMS


def test_a_row_that_is_no_whole_number_of_steps_is_refused():
    assert can_multiply(Weight(torch.zeros((1, 64), dtype=torch.uint8), GGMLType.BF16, 32))
    assert not can_multiply(Weight(torch.zeros((1, 60), dtype=torch.uint8), GGMLType.BF16, 30))
    assert not can_multiply(Weight(torch.zeros((1, 66), dtype=torch.uint8), GGMLType.TQ2_0, 256))
