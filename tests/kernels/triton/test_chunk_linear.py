"""Linear of chunks against the reference, and the bits of a row in any company."""

import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import Weight
from makeway.kernels.triton import chunk_linear as module
from makeway.kernels.triton.ahead import compiling_ahead
from makeway.kernels.triton.chunk_linear import (
    LinearScratch,
    can_multiply,
    chunk_linear,
    chunk_linears,
    least_scratch,
    together,
)
from makeway.kernels.triton.gemm import Tile, Tiles
from makeway.kernels.triton.unpack import PLANES
from tests.kernels.triton.blocks import random_weight


@pytest.fixture
def descriptors(monkeypatch):
    """Tiles that are loaded through descriptors, which only Hopper's own are."""
    tile = Tile(32, 16, 64, warps=4, stages=2, described=True)
    monkeypatch.setattr(module, "tiles_of", lambda _: Tiles(tile, tile, tile, tile))


def run(x, weight, device, *, spare=0, dtype=torch.float32):
    room = torch.full((least_scratch(weight) + spare,), 255, dtype=torch.uint8, device=device)
    out = torch.full((x.shape[0], weight.n_rows), torch.nan, dtype=dtype, device=device)
    there = Weight(weight.raw.to(device), weight.type, weight.n_cols)
    chunk_linear(x.to(device), there, out=out, scratch=LinearScratch.of(room))
    return out.cpu()


def activations(n, n_cols):
    return torch.randn((n, n_cols), generator=torch.Generator().manual_seed(n)).bfloat16()


@pytest.mark.parametrize(
    ("kind", "n_cols"),
    [(GGMLType.Q4_K, 256), (GGMLType.Q5_1, 96), (GGMLType.Q8_0, 64), (GGMLType.BF16, 32), (GGMLType.F32, 32)],
)
def test_types_multiply_as_the_reference(kind, n_cols, device):
    weight = random_weight(kind, 70, n_cols)
    x = activations(5, n_cols)
    decoded = weight.decode() if kind in (GGMLType.F32, GGMLType.BF16) else weight.decode().bfloat16()
    expected = x.double() @ decoded.double().t()
    bound = x.double().abs() @ decoded.double().abs().t()
    assert ((run(x, weight, device) - expected).abs() <= 2**-18 * bound).all()


@pytest.mark.parametrize(("kind", "n_cols"), [(GGMLType.Q5_1, 96), (GGMLType.BF16, 32), (GGMLType.F32, 32)])
def test_descriptors_reach_the_same_rows(kind, n_cols, device, request):
    weight, x = random_weight(kind, 140, n_cols), activations(37, n_cols)
    plain = run(x, weight, device)
    request.getfixturevalue("descriptors")
    torch.testing.assert_close(run(x, weight, device), plain, rtol=1e-5, atol=1e-5)


def test_a_row_has_the_same_bits_alone_and_among_others(device):
    weight = random_weight(GGMLType.Q5_1, 40, 96)
    x = activations(70, 96)
    together = run(x, weight, device)
    for rows in (slice(69, 70), slice(3, 20)):
        assert torch.equal(run(x[rows], weight, device), together[rows])


def test_cutting_the_matrix_changes_no_bit(device):
    weight = random_weight(GGMLType.Q8_0, 300, 32)
    x = activations(3, 32)
    cut = run(x, weight, device)
    assert torch.equal(run(x, weight, device, spare=least_scratch(weight) * 3), cut)
    assert torch.equal(run(x, weight, device, dtype=torch.bfloat16), cut.bfloat16())


@pytest.mark.parametrize(
    "kinds", [(GGMLType.Q5_1, GGMLType.Q8_0, GGMLType.Q8_0), (GGMLType.F32, GGMLType.F32, GGMLType.F32)]
)
def test_several_matrices_at_once_have_the_bits_of_each_alone(kinds, device):
    weights, x = [random_weight(kind, 40 + 30 * i, 96) for i, kind in enumerate(kinds)], activations(9, 96)
    n_rows = [w.n_rows for w in weights]
    room = torch.full((1 << 18,), 255, dtype=torch.uint8, device=device)
    out = torch.full((9, sum(n_rows)), torch.nan, device=device)
    there = [Weight(w.raw.to(device), w.type, w.n_cols) for w in weights]
    scratch = LinearScratch.of(room)
    assert together(there, scratch) == [list(range(len(kinds)))]
    for _ in range(2):  # the second time, tables are there already
        out.fill_(torch.nan)
        chunk_linears(x.to(device), there, out=out, scratch=scratch)
    for weight, part in zip(weights, out.cpu().split(n_rows, dim=1), strict=True):
        torch.testing.assert_close(part, run(x, weight, device), rtol=1e-5, atol=1e-5)


def test_matrices_are_decoded_once_as_long_as_there_is_room(device, monkeypatch):
    """As the chunks of a layer come: the same matrices again and again, then another layer's."""
    n_decoded = 0

    def counted(function):
        def run(*args, **options):
            nonlocal n_decoded
            n_decoded += 1
            return function(*args, **options)

        return run

    monkeypatch.setattr(module, "decode_matrices", counted(module.decode_matrices))
    monkeypatch.setattr(module, "decode_stack", counted(module.decode_stack))
    kinds = [GGMLType.Q8_0, GGMLType.Q5_1, GGMLType.Q5_1, GGMLType.F32]
    weights = [random_weight(kind, 40, 96, seed=i) for i, kind in enumerate(kinds)]
    weights = [Weight(w.raw.to(device), w.type, w.n_cols) for w in weights]
    x = activations(9, 96).to(device)
    groups = [weights[:1], weights[1:3], weights[3:]]  # 1, 2 and 3 times 40 x 96 values
    expected = [[run(x, w, device) for w in group] for group in groups]

    def multiply(i):
        out = torch.full((9, 40 * len(groups[i])), torch.nan, device=device)
        chunk_linears(x, groups[i], out=out, scratch=scratch)
        for found, wanted in zip(out.cpu().split(40, dim=1), expected[i], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)

    for n_fit, order, n_expected in (
        (6, [0, 1, 2, 0, 1, 2, 2], 3),
        (3, [0, 1, 0, 1, 2, 2, 0, 0], 4),
        (5, [0, 1, 0, 2, 0, 1], 5),
    ):
        room = torch.full((256 + 2 * n_fit * 40 * 96,), 255, dtype=torch.uint8, device=device)
        scratch = LinearScratch.of(room)
        n_decoded = 0
        for i in order:
            multiply(i)
        assert n_decoded == n_expected


def test_other_bytes_at_the_same_place_are_decoded(device):
    """What was decoded is known by its address, which the next owner of the memory has too."""
    memory = random_weight(GGMLType.Q8_0, 40, 96).raw.to(device)
    x = activations(9, 96).to(device)
    scratch = LinearScratch.of(torch.full((1 << 16,), 255, dtype=torch.uint8, device=device))
    for seed in (1, 2):
        weight = random_weight(GGMLType.Q8_0, 40, 96, seed=seed)
        memory.copy_(weight.raw)
        out = torch.empty((9, 40), device=device)
        chunk_linear(x, Weight(memory.view_as(memory), weight.type, 96), out=out, scratch=scratch)
        assert torch.equal(out.cpu(), run(x, weight, device))


def test_what_was_only_compiled_is_not_taken_for_decoded(device):
    memory = random_weight(GGMLType.Q8_0, 40, 96).raw.to(device)
    weight, out = Weight(memory, GGMLType.Q8_0, 96), torch.empty((9, 40), device=device)
    scratch = LinearScratch.of(torch.full((1 << 16,), 255, dtype=torch.uint8, device=device))
    with compiling_ahead():
        chunk_linear(activations(9, 96).to(device), weight, out=out, scratch=scratch)
    assert scratch.find([weight]) is None


def test_what_is_decoded_alike_and_fits_goes_together(device):
    kinds = [GGMLType.Q8_0, GGMLType.Q5_1, GGMLType.F32, GGMLType.BF16, GGMLType.BF16, GGMLType.Q8_0, GGMLType.Q8_0]
    weights = [random_weight(kind, 40, 32) for kind in kinds]
    values = torch.zeros(2 * 40 * 32, dtype=torch.bfloat16)
    scratch = LinearScratch(values, values, values)
    assert together(weights, scratch) == [[0, 1], [2], [3], [4], [5, 6]]
    scratch = LinearScratch(values[:-1], values, values)
    assert together(weights, scratch) == [[i] for i in range(7)]


def test_other_types_are_refused():
    assert all(can_multiply(random_weight(kind, 16, PLANES[kind].step)) for kind in (GGMLType.Q4_K, GGMLType.F16))
    assert not can_multiply(Weight(torch.zeros((1, 66), dtype=torch.uint8), GGMLType.TQ2_0, 256))
