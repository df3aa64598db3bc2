"""The experts of a step in CUDA C++, emulated, against f64."""

import pytest
import torch

from makeway.gguf.types import GGMLType as G
from makeway.kernels.cuda.experts import SOURCE, StepExpertKernels, can_run, launches, launches_as
from makeway.kernels.cuda.linear import MAX_SHARED, MAX_SHARED_HOPPER
from makeway.kernels.triton.experts import ExpertLayout
from makeway.kernels.triton.step_buffers import StepBuffers
from tests.kernels.cuda.emulated_programs import EmulatedPrograms
from tests.kernels.triton.blocks import random_weight

CPU = torch.device("cpu")
N_EXPERTS = 5


class Layer:
    """Experts one after the other in an arena."""

    def __init__(self, layout):
        assert can_run(layout)
        self.layout = layout
        self.stride = -(-layout.expert_bytes // 256) * 256
        self.arena = torch.zeros(N_EXPERTS * self.stride, dtype=torch.uint8)
        self.weights = []
        for e in range(N_EXPERTS):
            gate = random_weight(layout.gate, layout.width, layout.hidden, seed=3 * e)
            up = random_weight(layout.up, layout.width, layout.hidden, seed=3 * e + 1)
            down = random_weight(layout.down, layout.hidden, layout.width, seed=3 * e + 2)
            flat = torch.cat([w.raw.reshape(-1) for w in (gate, up, down)])
            self.arena[e * self.stride : e * self.stride + flat.numel()] = flat
            self.weights.append([w.decode().double() for w in (gate, up, down)])

    def run(self, kernels, x, ids, routing, acc):
        """acc after the step; entries as the plan makes them."""
        n, top_k = ids.shape
        buffers = StepBuffers(CPU, n=n, top_k=top_k, hidden=self.layout.hidden, width=self.layout.width)
        entries = sorted(set(ids.flatten().tolist()) - {-1})
        buffers.count[0] = len(entries)
        for i, expert in enumerate(entries):
            buffers.experts[i], buffers.offsets[i] = expert, expert * self.stride
            for row in range(n):
                for j in range(top_k):
                    if ids[row, j] == expert:
                        buffers.chosen_by[i] |= 1 << row
                        buffers.weights[i, row] = routing[row, j]
        acc = acc.clone()
        kernels.run(buffers, x, self.arena, layout=self.layout, acc=acc)
        return acc

    def expected(self, x, ids, routing, acc):
        out = acc.double()
        for row in range(ids.shape[0]):
            for expert, weight in zip(ids[row].tolist(), routing[row].tolist(), strict=True):
                if expert >= 0:
                    gate, up, down = self.weights[expert]
                    hidden = torch.nn.functional.silu(gate @ x[row].double()) * (up @ x[row].double())
                    out[row] += weight * (down @ hidden)
        return out


def inputs(n, hidden, *, top_k=2, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, hidden, generator=generator)
    ids = torch.stack([torch.randperm(N_EXPERTS, generator=generator)[:top_k] for _ in range(n)])
    return x, ids, torch.rand(n, top_k, generator=generator), torch.randn(n, hidden, generator=generator)


LAYOUTS = [
    ExpertLayout(G.Q4_K, G.Q4_K, G.Q5_1, hidden=256, width=64),
    ExpertLayout(G.Q8_0, G.Q5_K, G.Q8_0, hidden=256, width=32),
    ExpertLayout(G.Q5_1, G.Q5_1, G.Q5_1, hidden=96, width=96),
    ExpertLayout(G.BF16, G.BF16, G.BF16, hidden=64, width=64),
    ExpertLayout(G.Q4_K, G.Q4_K, G.Q6_K, hidden=256, width=256),
]


@pytest.fixture
def kernels():
    return StepExpertKernels(CPU, EmulatedPrograms())


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda s: f"{s.gate.name}-{s.up.name}-{s.down.name}")
def test_a_step_agrees_with_f64(kernels, layout):
    layer = Layer(layout)
    x, ids, routing, acc = inputs(2, layout.hidden)
    got, want = layer.run(kernels, x, ids, routing, acc), layer.expected(x, ids, routing, acc)
    assert float((got.double() - want).norm() / want.norm()) < 1e-5


def test_a_row_has_the_same_bits_in_any_company(kernels):
    """Eight rows of which all choose one expert: more than a pass holds; and a row that is padding."""
    layer = Layer(LAYOUTS[0])
    x, ids, routing, acc = inputs(8, 256, seed=1)
    ids[:, 0] = torch.where((ids == 3).any(1), ids[:, 0], 3)
    ids[5] = -1
    together = layer.run(kernels, x, ids, routing, acc)
    assert torch.equal(together[5], acc[5])
    for row in (0, 3, 7):
        alone = slice(row, row + 1)
        assert torch.equal(layer.run(kernels, x[alone], ids[alone], routing[alone], acc[alone])[0], together[row])
    reverse = StepExpertKernels(CPU, EmulatedPrograms(reverse=True))
    assert torch.equal(layer.run(reverse, x, ids, routing, acc), together)


def test_down_starts_when_the_plan_has_been_made():
    """It reads the plan before it waits, so gate and up may let it start only after their own wait, in every block."""
    gate_up, down = SOURCE.read_text().split("gate_up_kernel(", 1)[1].split("down_kernel(", 1)
    wait, let = gate_up.index("wait_for_previous();"), gate_up.index("let_next_start();")
    assert wait < let
    assert "return" not in gate_up[:let]
    assert "hidden +" not in down[: down.index("wait_for_previous();")]


@pytest.mark.parametrize(("n", "top_k", "width"), [(1, 4, 640), (3, 4, 640), (8, 4, 640), (2, 2, 64)])
def test_many_turns_of_entries(n, top_k, width, monkeypatch):
    """More entries than are run at once, with one or two units for a warp in each."""
    layout = ExpertLayout(G.Q4_K, G.Q4_K, G.Q5_1, hidden=256, width=width)
    monkeypatch.setattr("makeway.kernels.cuda.experts.DOWN_WARPS", (2, 2))
    how = launches(layout, n=n, top_k=top_k)
    assert how.down_copies == 2
    assert how.per_entry == 1
    assert how.down_units == (2 if width == 640 else 1)
    layer = Layer(layout)
    x, ids, routing, acc = inputs(n, 256, top_k=top_k, seed=n)
    assert how.at_once < len(set(ids.flatten().tolist()))
    got = layer.run(StepExpertKernels(CPU, EmulatedPrograms(reverse=True)), x, ids, routing, acc)
    want = layer.expected(x, ids, routing, acc)
    assert float((got.double() - want).norm() / want.norm()) < 1e-5


def test_the_order_of_sums_is_the_same_on_every_card():
    for layout, top_k in ((LAYOUTS[0], 2), (ExpertLayout(G.Q4_K, G.Q4_K, G.Q5_1, 2560, 640), 10)):
        every = [
            launches(layout, n=n, top_k=top_k, max_shared=m) for n in (1, 4, 8) for m in (MAX_SHARED, MAX_SHARED_HOPPER)
        ]
        assert len({(how.unit, how.units, how.down_unit, how.per_entry) for how in every}) == 1
        assert max(how.shared_bytes for how in every) <= MAX_SHARED


def test_a_second_buffer_of_sums_must_fit_the_card():
    """Twelve units: with one buffer they are just small enough for a block of sm_86."""
    layout = ExpertLayout(G.Q4_K, G.Q4_K, G.Q4_K, hidden=3072, width=768)
    assert can_run(layout)
    assert all(launches(layout, n=n, top_k=8).shared_bytes <= MAX_SHARED for n in (1, 2, 4, 8))


@pytest.mark.parametrize(("n", "buffers"), [(1, 1), (3, 2)])
def test_several_tiles_of_a_block(n, buffers):
    """Of gate and up: tiles follow each other, with sums in one buffer or in two."""
    layout = ExpertLayout(G.Q4_K, G.Q5_K, G.Q4_K, hidden=256, width=256)
    choices = {"blocks": 3, "buffers": buffers, "per_entry": 1, "at_once": 3}
    rule = lambda layout, *, n, top_k, max_shared: launches_as(layout, n=n, **choices)  # noqa: E731
    layer = Layer(layout)
    x, ids, routing, acc = inputs(n, 256, top_k=3, seed=n)
    got = layer.run(StepExpertKernels(CPU, EmulatedPrograms(reverse=True), rule=rule), x, ids, routing, acc)
    want = layer.expected(x, ids, routing, acc)
    assert float((got.double() - want).norm() / want.norm()) < 1e-5
