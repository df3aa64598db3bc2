"""Pieces of experts against the reference, for every way to cut the work."""

import numpy as np
import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import reference
from makeway.kernels.triton.sort import SortedPairs, sort_pairs
from makeway.kernels.triton.sweep_experts import ExpertMatrices, SweepRows, SweepScratch, can_run, run_piece, run_used
from tests.kernels.triton.blocks import random_weight

N, TOP_K, N_EXPERTS = 9, 2, 4
SMALL = ExpertMatrices(64, 32, GGMLType.Q5_1, GGMLType.Q5_1, GGMLType.Q8_0)
STRIDE = 1 << 16


class Layer:
    """Experts anywhere in a room, tokens that chose them, and what the reference makes of it."""

    def __init__(self, matrices, device):
        generator = torch.Generator().manual_seed(3)
        self.matrices, self.device = matrices, device
        self.experts = []
        places = torch.randperm(N_EXPERTS, generator=generator)
        room = torch.zeros(N_EXPERTS * STRIDE, dtype=torch.uint8)
        for expert, place in enumerate(places.tolist()):
            weights = [
                random_weight(part.type, part.n_rows, part.n_cols, seed=10 * expert + i)
                for i, part in enumerate(matrices.parts)
            ]
            raw = torch.cat([weight.raw.reshape(-1) for weight in weights])
            room[place * STRIDE : place * STRIDE + len(raw)] = raw
            self.experts.append(weights)
        self.room = room.to(device)
        self.where = (places * STRIDE).to(device)
        self.ids = torch.stack([torch.randperm(N_EXPERTS - 1, generator=generator)[:TOP_K] for _ in range(N)])
        self.ids[7] = -1  # padding; and nobody chose the last expert
        scale = torch.stack([weights[0].decode().std() for weights in self.experts]).max()
        self.x = (torch.randn((N, matrices.d), generator=generator) / scale / matrices.d**0.5).bfloat16()
        self.pair_weights = torch.rand((N, TOP_K), generator=generator)
        self.acc = torch.randn((N, matrices.d), generator=generator)

    def counts(self):
        return torch.bincount(self.ids[self.ids >= 0], minlength=N_EXPERTS).numpy()

    def expected(self):
        acc = self.acc.clone()
        for expert, weights in enumerate(self.experts):
            rows, ranks = torch.nonzero(self.ids == expert, as_tuple=True)
            if len(rows):
                acc[rows] += self.pair_weights[rows, ranks][:, None] * reference.expert_ffn(
                    self.x[rows].float(), *weights
                )
        return acc

    def rows(self, n_experts, n_rows):
        """The sorted rows, and scratch for so many experts and rows at a time."""
        n_bytes = SweepScratch.nbytes(self.matrices, n_experts=n_experts, n_rows=n_rows)
        room = torch.full((n_bytes,), 255, dtype=torch.uint8, device=self.device)
        scratch = SweepScratch.of(room, self.matrices, n_experts=n_experts, n_rows=n_rows)
        sorting = torch.empty(SortedPairs.nbytes(N, TOP_K, N_EXPERTS), dtype=torch.uint8, device=self.device)
        pairs = SortedPairs.of(sorting, N, TOP_K, n_experts=N_EXPERTS)
        sort_pairs(self.ids.to(self.device), pairs)
        rows = SweepRows(
            self.x.to(self.device), self.pair_weights.to(self.device), self.acc.to(self.device, copy=True), pairs
        )
        return rows, scratch

    def run_used(self, *, n_experts, n_rows):
        """Every expert that somebody chose, `n_experts` at a time."""
        rows, scratch = self.rows(n_experts, n_rows)
        counts = self.counts()
        used = np.flatnonzero(counts)
        starts = np.zeros(N_EXPERTS, dtype=np.int64)
        starts[used] = np.arange(used.size) % n_experts * 2 * self.matrices.n_values
        for first in range(0, used.size, n_experts):
            piece = used[first : first + n_experts]
            experts = slice(int(piece[0]), int(piece[-1]) + 1)
            run_used(
                rows,
                self.room,
                experts=range(experts.start, experts.stop),
                n_pairs=int(counts[experts].sum()),
                used=self.where[torch.from_numpy(piece).to(self.device)],
                where=self.where[experts],
                starts=torch.from_numpy(starts[experts]).to(self.device),
                matrices=self.matrices,
                scratch=scratch,
            )
        return rows.acc.cpu()

    def run(self, *, piece, n_experts, n_rows, counts=None):
        rows, scratch = self.rows(n_experts, n_rows)
        for first in range(0, N_EXPERTS, piece):
            run_piece(
                rows,
                self.room,
                where=self.where[first : first + piece],
                first=first,
                matrices=self.matrices,
                scratch=scratch,
                counts=None if counts is None else lambda first=first: counts[first : first + piece],
            )
        return rows.acc.cpu()


@pytest.mark.parametrize(
    "types",
    [
        (GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q5_1),
        pytest.param((GGMLType.Q6_K, GGMLType.Q4_K, GGMLType.Q8_0), marks=pytest.mark.slow),
        (GGMLType.BF16, GGMLType.BF16, GGMLType.BF16),
    ],
    ids=lambda types: "-".join(t.name for t in types),
)
def test_pieces_agree_with_the_reference(types, device):
    layer = Layer(ExpertMatrices(256, 32, *types), device)
    expected = layer.expected()
    out = layer.run(piece=N_EXPERTS, n_experts=2, n_rows=N * TOP_K, counts=layer.counts())
    change, wanted = out - layer.acc, expected - layer.acc
    assert (change - wanted).norm() < 0.01 * wanted.norm()
    assert torch.equal(out[7], layer.acc[7])


def test_no_way_to_cut_the_work_changes_a_bit(device):
    layer = Layer(SMALL, device)
    whole = layer.run(piece=N_EXPERTS, n_experts=N_EXPERTS, n_rows=N * TOP_K)
    assert torch.equal(layer.run(piece=2, n_experts=1, n_rows=8), whole)
    assert torch.equal(layer.run(piece=4, n_experts=3, n_rows=9, counts=layer.counts()), whole)


@pytest.mark.parametrize("kind", [GGMLType.Q5_1, GGMLType.BF16])
def test_only_used_experts_are_decoded_and_the_bits_stay(kind, device):
    layer = Layer(ExpertMatrices(64, 32, kind, kind, kind), device)
    layer.ids[layer.ids == 1] = 3  # an expert in between that nobody chose
    whole = layer.run(piece=N_EXPERTS, n_experts=N_EXPERTS, n_rows=N * TOP_K)
    assert torch.equal(layer.run_used(n_experts=2, n_rows=N * TOP_K), whole)
    assert torch.equal(layer.run_used(n_experts=3, n_rows=5), whole)


def test_shapes_that_the_kernels_lack_are_told():
    assert can_run(SMALL)
    assert not can_run(ExpertMatrices(256, 32, GGMLType.TQ2_0, GGMLType.Q8_0, GGMLType.Q8_0))
    assert not can_run(ExpertMatrices(32, 33, GGMLType.IQ4_NL, GGMLType.IQ4_NL, GGMLType.F32))  # up would be unaligned
