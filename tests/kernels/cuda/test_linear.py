"""Products of decode steps in CUDA C++, emulated, against f64 products of what the reference decodes."""

import pytest
import torch

from makeway.gguf.types import GGMLType as G
from makeway.kernels import Weight
from makeway.kernels.cuda.linear import KINDS, MAX_SHARED, MAX_SHARED_HOPPER, Linears, cut, has_kernel
from tests.kernels.cuda.emulated_programs import EmulatedPrograms
from tests.kernels.triton.blocks import random_weight

CPU = torch.device("cpu")
TOLERANCE = {G.F32: 1e-5}  # as two bf16


@pytest.fixture
def linears():
    return Linears(CPU, EmulatedPrograms())


def product(x: torch.Tensor, weight: Weight) -> torch.Tensor:
    return x.double() @ weight.decode().double().T


def close(got, want, tolerance=2e-6):
    error = float((got.double() - want).norm() / want.norm())
    assert error < tolerance, error


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_every_type(linears, kind):
    weight = random_weight(kind, 40, 512)
    x = torch.randn((3, 512), generator=torch.Generator().manual_seed(1))
    (out,) = linears(x, [weight])
    close(out, product(x, weight), TOLERANCE.get(kind, 2e-6))


@pytest.mark.parametrize(("kind", "n_cols"), [(G.Q8_0, 640), (G.Q5_1, 96), (G.Q8_0, 320), (G.F32, 2560), (G.BF16, 64)])
def test_widths(linears, kind, n_cols):
    weight = random_weight(kind, 17, n_cols)
    x = torch.randn((2, n_cols), generator=torch.Generator().manual_seed(2))
    (out,) = linears(x, [weight])
    close(out, product(x, weight), TOLERANCE.get(kind, 2e-6))


def test_several_types_in_one_launch(linears):
    weights = [random_weight(kind, rows, 256, seed=rows) for kind, rows in ((G.Q4_K, 48), (G.F32, 3), (G.Q6_K, 16))]
    x = torch.randn((1, 256), generator=torch.Generator().manual_seed(3))
    for out, weight in zip(linears(x, weights), weights, strict=True):
        close(out, product(x, weight))


@pytest.mark.parametrize("kind", [G.Q4_K, G.Q6_K, G.Q8_0], ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_any_company(kind, monkeypatch):
    """Of 4608 columns the sums are shared by other numbers of blocks for one row and for eight, and on a GPU of one
    processor."""
    weight = random_weight(kind, 20, 4608)
    x = torch.randn((8, 4608), generator=torch.Generator().manual_seed(4))
    (apart,) = Linears(CPU, EmulatedPrograms())(x[:1], [weight])
    monkeypatch.setattr("makeway.kernels.cuda.linear.PROCESSORS", 1)
    assert len({cut([kind], 4608, rows=[20], n=n).splits for n in (1, 8)}) == 2
    (together,) = Linears(CPU, EmulatedPrograms())(x, [weight])
    close(together, product(x, weight))
    assert torch.equal(apart[0], together[0])
    for programs in (EmulatedPrograms(), EmulatedPrograms(reverse=True)):
        for rows in (slice(0, 1), slice(3, 5)):
            assert torch.equal(Linears(CPU, programs)(x[rows], [weight])[0], together[rows])


def test_many_tiles_of_a_block(linears, monkeypatch):
    """A matrix with more tiles than blocks: tiles follow each other, with sums in two buffers or in one."""
    monkeypatch.setattr("makeway.kernels.cuda.linear.PROCESSORS", 1)
    weight = random_weight(G.Q6_K, 16 * 20 - 5, 1280)
    how = cut([G.Q6_K], 1280, rows=[weight.n_rows], n=1)
    assert how.turns > 2
    assert how.buffers == 2
    x = torch.randn((1, 1280), generator=torch.Generator().manual_seed(5))
    (out,) = linears(x, [weight])
    close(out, product(x, weight))


@pytest.mark.parametrize("reverse", [False, True])
def test_many_tiles_with_one_buffer(reverse, monkeypatch):
    monkeypatch.setattr("makeway.kernels.cuda.linear.PROCESSORS", 1)
    weight = random_weight(G.Q4_K, 16 * 12 - 3, 2048)
    how = cut([G.Q4_K], 2048, rows=[weight.n_rows], n=8)
    assert (how.turns > 1, how.buffers, how.splits) == (True, 1, 1)
    x = torch.randn((8, 2048), generator=torch.Generator().manual_seed(8))
    (out,) = Linears(CPU, EmulatedPrograms(reverse=reverse))(x, [weight])
    close(out, product(x, weight))
    (alone,) = Linears(CPU, EmulatedPrograms())(x[2:3], [weight])
    assert torch.equal(alone[0], out[2])


def test_what_the_activations_are_made_of(linears):
    weight = random_weight(G.Q8_0, 16, 128)
    generator = torch.Generator().manual_seed(6)
    x, up = (torch.randn((2, 128), generator=generator) for _ in range(2))
    gate = torch.randn((2, 1), generator=generator)
    close(linears(x, [weight], silu_scale=0.25)[0], product(torch.nn.functional.silu(0.25 * x), weight))
    swiglu = torch.nn.functional.silu(x) * up
    close(linears(x, [weight], up=up)[0], product(swiglu, weight))
    close(linears(x, [weight], up=up, gate=gate)[0], product(swiglu * torch.sigmoid(gate), weight))


def test_every_launch_fits_the_smallest_card():
    for kind in KINDS:
        for n_cols in (32, 320, 640, 768, 2048, 2560, 4096, 6144, 10240):
            if has_kernel(kind, n_cols):
                how = [cut([kind], n_cols, rows=[512], n=n) for n in (1, 2, 4, 8)]
                assert max(h.shared_bytes for h in how) <= MAX_SHARED
                more = [cut([kind], n_cols, rows=[99999], n=n, max_shared=MAX_SHARED_HOPPER) for n in (1, 2, 4, 8)]
                assert max(h.shared_bytes for h in more) <= MAX_SHARED_HOPPER
                assert len({(h.unit, h.group_units) for h in how + more}) == 1


def test_any_size_of_activations(linears):
    """Zeros, an outlier beside small values, numbers near both ends of f32; what is no number stays in its row."""
    weight = random_weight(G.Q4_K, 32, 512)
    x = torch.randn((8, 512), generator=torch.Generator().manual_seed(7))
    x[0] = 0.0
    x[1, 5] = 3e4
    x[2] *= 1e30
    x[3] *= 1e-25
    x[4] *= 1e-42  # below what has a scale: nothing is left of it
    x[5, 300] = torch.nan
    x[6, 3] = torch.inf
    (out,) = linears(x, [weight])
    assert torch.equal(out[0], torch.zeros(32))
    for row in (1, 2, 3, 7):
        close(out[row], product(x[row], weight))
    assert float(out[4].abs().max()) < 1e-30
    assert bool(out[5].isnan().all())
    assert bool((out[6].isnan() | out[6].isinf()).all())
