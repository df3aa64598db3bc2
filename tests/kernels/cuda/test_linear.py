"""Products of decode steps in CUDA C++, emulated, against f64 products of what the reference decodes."""

from functools import partial

import pytest
import torch

from makeway.gguf.types import GGMLType as G
from makeway.kernels import Weight
from makeway.kernels.cuda.linear import (
    KINDS,
    MAX_SHARED,
    MAX_SHARED_HOPPER,
    Linears,
    can_mix,
    cut,
    cut_as,
    has_kernel,
    mix_bytes,
)
from tests.kernels.cuda.emulated_programs import EmulatedPrograms
from tests.kernels.triton.blocks import random_weight

CPU = torch.device("cpu")
TOLERANCE = {G.F32: 1e-5}  # as two bf16


class CountedPrograms(EmulatedPrograms):
    launches = 0

    def kernel(self, *arguments):
        self.launches += 1
        return super().kernel(*arguments)


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


@pytest.mark.parametrize("n_matrices", [5, 6])
def test_several_types_in_few_launches(n_matrices):
    """Five matrices are one launch, six are two."""
    shapes = [(G.Q4_K, 48), (G.F32, 3), (G.Q6_K, 16), (G.Q4_K, 33), (G.F32, 17), (G.Q6_K, 5)][:n_matrices]
    weights = [random_weight(kind, rows, 256, seed=rows) for kind, rows in shapes]
    x = torch.randn((1, 256), generator=torch.Generator().manual_seed(3))
    programs = CountedPrograms()
    outs = Linears(CPU, programs)(x, weights)
    assert programs.launches == -(-n_matrices // 5)
    for out, weight in zip(outs, weights, strict=True):
        close(out, product(x, weight), TOLERANCE.get(weight.type, 2e-6))


def test_five_matrices_whose_tiles_have_several_blocks():
    """Each finds its own parts of sums."""
    weights = [random_weight(G.Q4_K, rows, 4608, seed=rows) for rows in (16, 33, 5, 48, 17)]
    assert cut([G.Q4_K] * 5, 4608, rows=[w.n_rows for w in weights], n=2).splits > 1
    x = torch.randn((2, 4608), generator=torch.Generator().manual_seed(9))
    for out, weight in zip(Linears(CPU, EmulatedPrograms(reverse=True))(x, weights), weights, strict=True):
        close(out, product(x, weight))


SOME = [G.Q6_K, *(pytest.param(kind, marks=pytest.mark.slow) for kind in (G.Q4_K, G.Q8_0))]


@pytest.mark.parametrize("kind", SOME, ids=lambda kind: kind.name)
def test_a_row_has_the_same_bits_in_any_company(kind, monkeypatch):
    """Of 2560 columns the sums are shared by other numbers of blocks for one row and for eight, and on a GPU of one
    processor."""
    weight = random_weight(kind, 20, 2560)
    x = torch.randn((8, 2560), generator=torch.Generator().manual_seed(4))
    (apart,) = Linears(CPU, EmulatedPrograms())(x[:1], [weight])
    monkeypatch.setattr("makeway.kernels.cuda.linear.PROCESSORS", 1)
    assert [cut([kind], 2560, rows=[20], n=n).splits for n in (1, 8)] == [1, 2]
    (together,) = Linears(CPU, EmulatedPrograms())(x, [weight])
    close(together, product(x, weight))
    assert torch.equal(apart[0], together[0])
    for programs in (EmulatedPrograms(), EmulatedPrograms(reverse=True)):
        for rows in (slice(0, 1), slice(3, 5)):
            assert torch.equal(Linears(CPU, programs)(x[rows], [weight])[0], together[rows])


def test_many_tiles_of_a_block(monkeypatch):
    monkeypatch.setattr("makeway.kernels.cuda.linear.PROCESSORS", 1)
    weight = random_weight(G.Q4_K, 16 * 12 - 3, 2048)
    how = cut([G.Q4_K], 2048, rows=[weight.n_rows], n=8)
    assert (how.turns > 1, how.buffers, how.splits) == (True, 1, 1)
    x = torch.randn((8, 2048), generator=torch.Generator().manual_seed(8))
    (out,) = Linears(CPU, EmulatedPrograms(reverse=True))(x, [weight])
    close(out, product(x, weight))
    (alone,) = Linears(CPU, EmulatedPrograms())(x[2:3], [weight])
    assert torch.equal(alone[0], out[2])


@pytest.mark.parametrize(("turns", "buffers", "copies"), [(3, 1, 3), (5, 2, 2)])
def test_several_tiles_on_their_way(turns, buffers, copies):
    """Blocks with as many tiles as are fetched at once, with more and with less; bits are those of any other cut."""
    weights = [random_weight(G.Q4_K, rows, 512, seed=rows) for rows in (16 * 7 - 3, 5)]
    x = torch.randn((1, 512), generator=torch.Generator().manual_seed(10))
    rule = partial(cut_as, turns=turns, buffers=buffers, copies=copies)
    ring = Linears(
        CPU, EmulatedPrograms(reverse=True), rule=lambda *facts, rows, n, max_shared: rule(*facts, rows=rows, n=n)
    )
    for out, weight in zip(ring(x, weights), weights, strict=True):
        close(out, product(x, weight))
        assert torch.equal(out, Linears(CPU, EmulatedPrograms())(x, [weight])[0])


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


def mixer_case(kind, *, hidden, n_streams, n_cols, n, seed):
    """up, low, normed and raw inject factors: what a mixer has before its end."""
    generator = torch.Generator().manual_seed(seed)
    up = random_weight(kind, n_streams * hidden, n_cols, seed=seed)
    sizes = (n_cols, n_streams * hidden, n_streams)
    low, normed, raw = (torch.randn((n, size), generator=generator) for size in sizes)
    return up, 3.0 * low, normed, 3.0 * raw


def mixed(up, low, normed, raw):
    """What `hc_mix` says, in f64."""
    n_streams = raw.shape[1]
    gates = torch.sigmoid(product(torch.nn.functional.silu(low.double() / n_streams), up))
    x = (gates * normed.double()).view(low.shape[0], n_streams, -1).mean(dim=1)
    return x, 2.0 * torch.sigmoid(raw.double() / n_streams)


@pytest.mark.parametrize(
    ("kind", "hidden", "n_streams", "n_cols", "n"),
    [
        (G.Q8_0, 48, 4, 320, 1),
        (G.Q8_0, 40, 3, 320, 8),  # two turns for the activations, a last tile of eight columns
        (G.Q5_K, 32, 2, 256, 8),  # two turns for the outputs
        (G.Q5_1, 19, 4, 96, 3),
        (G.BF16, 16, 8, 128, 2),
    ],
)
def test_the_end_of_a_mixer(linears, kind, hidden, n_streams, n_cols, n):
    up, low, normed, raw = mixer_case(kind, hidden=hidden, n_streams=n_streams, n_cols=n_cols, n=n, seed=n)
    x, inject = linears.mix(low, up, normed=normed, raw_inject=raw, n_streams=n_streams)
    want_x, want_inject = mixed(up, low, normed, raw)
    close(x, want_x, 1e-6)
    close(inject, want_inject, 1e-6)
    again, none = linears.mix(low, up, normed=normed, raw_inject=None, n_streams=n_streams)
    assert torch.equal(again, x)
    assert none is None


def test_a_mixed_row_has_the_same_bits_in_any_company(linears):
    up, low, normed, raw = mixer_case(G.Q8_0, hidden=36, n_streams=4, n_cols=320, n=8, seed=11)
    low[3, 7] = 1e4  # an outlier stays in its row
    together = linears.mix(low, up, normed=normed, raw_inject=raw, n_streams=4)
    for reverse in (False, True):
        other = Linears(CPU, EmulatedPrograms(reverse=reverse))
        for rows in (slice(3, 4), slice(7, 8), slice(3, 5), slice(1, 5), slice(0, 8)):
            apart = other.mix(low[rows], up, normed=normed[rows], raw_inject=raw[rows], n_streams=4)
            assert all(torch.equal(a, b[rows]) for a, b in zip(apart, together, strict=True))


def test_which_mixers_end_in_one_launch():
    assert can_mix(G.Q8_0, 320, n_streams=4)
    assert not can_mix(G.Q8_0, 640, n_streams=4)  # two units
    assert not can_mix(G.F32, 256, n_streams=4)  # units of floats are halved: two
    assert not can_mix(G.Q8_0, 320, n_streams=1)
    assert not can_mix(G.Q8_0, 320, n_streams=9)
    assert not can_mix(G.IQ2_XXS, 256, n_streams=4)
    for kind in KINDS:
        for n_cols in (32, 64, 96, 128, 256, 320):
            if can_mix(kind, n_cols, n_streams=8):
                assert mix_bytes(kind, n_cols, n_streams=8, n=8) <= MAX_SHARED
