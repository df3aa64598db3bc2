import pytest
import torch

from makeway.gguf.types import GGMLType
from makeway.kernels import Weight
from makeway.kernels.triton import step_plan
from makeway.kernels.triton.experts import ExpertLayout, gate_up_tiling, run_experts
from makeway.kernels.triton.fetch import Source
from makeway.kernels.triton.linear import Scratch
from makeway.kernels.triton.step_buffers import Report, Rooms, StepBuffers
from makeway.kernels.triton.step_plan import plan_and_fetch
from makeway.kernels.triton.unpack import PLANES, planes_for
from makeway.quants import decode_rows
from tests.kernels.triton.blocks import random_weight

N_EXPERTS, TOP_K = 7, 2
STRIDE = 1 << 15


class Rig:
    """A layer of experts in a store, and an arena with four slots, two of which are spares, and a transient region."""

    def __init__(self, layout, device, *, seed=0):
        self.layout = layout
        self.device = device
        self.store = torch.zeros((N_EXPERTS, STRIDE), dtype=torch.uint8)
        self.weights = []
        for e in range(N_EXPERTS):
            gate = random_weight(layout.gate, layout.width, layout.hidden, seed=seed + 3 * e)
            up = random_weight(layout.up, layout.width, layout.hidden, seed=seed + 3 * e + 1)
            down = random_weight(layout.down, layout.hidden, layout.width, seed=seed + 3 * e + 2)
            flat = torch.cat([w.raw.reshape(-1) for w in (gate, up, down)])
            assert flat.numel() == layout.expert_bytes
            self.store[e, : flat.numel()] = flat
            self.weights.append([w.decode().double() for w in (gate, up, down)])
        self.rooms = Rooms(slots_at=256, slot_stride=STRIDE, transient_at=256 + 4 * STRIDE, transient_stride=STRIDE)
        if device.type == "cuda":
            self.store = self.store.pin_memory()
        self.arena = torch.randint(0, 256, (256 + (4 + 8 * TOP_K) * STRIDE,), dtype=torch.uint8).to(device)
        self.slot_of = torch.full((N_EXPERTS,), -1, dtype=torch.int32)
        self.scratch = Scratch(device, n_parts=1 << 16, n_tiles=256)

    def put(self, expert, slot):
        self.slot_of[expert] = slot
        at = 256 + slot * STRIDE
        self.arena[at : at + STRIDE] = self.store[expert].to(self.device)

    def step(self, x, ids, routing, *, wanted=(), spares=(2, 3), acc=None):
        """acc, fetched and the buffers after plan, fetch and run."""
        n = ids.shape[0]
        layout, device = self.layout, self.device
        buffers = StepBuffers(device, n=n, top_k=TOP_K, hidden=layout.hidden, width=layout.width)
        buffers.hidden.fill_(torch.nan)
        buffers.outputs.fill_(torch.nan)
        wish = torch.zeros(N_EXPERTS, dtype=torch.uint8)
        wish[list(wanted)] = 1
        acc = torch.zeros((n, layout.hidden)) if acc is None else acc.clone()
        acc = acc.to(device)
        fetched = torch.full((len(spares),), 99, dtype=torch.int32, device=device)
        first = torch.zeros(1, dtype=torch.int32, device=device)
        plan_and_fetch(
            buffers,
            ids.to(device),
            routing=routing.to(device),
            slot_of=self.slot_of.to(device),
            wanted=wish.to(device),
            spares=torch.tensor(spares, dtype=torch.int32, device=device),
            rooms=self.rooms,
            source=Source(self.store, self.arena, layout.expert_bytes),
            report=Report(first, torch.zeros((n, TOP_K), dtype=torch.int32, device=device), fetched),
        )
        run_experts(buffers, x.to(device), self.arena, layout=layout, acc=acc, scratch=self.scratch)
        assert not self.scratch.counters.any()
        return acc.cpu(), fetched.cpu().tolist(), buffers

    def reference(self, x, ids, routing, acc):
        """f64, and the size of the terms that were added."""
        out, size = acc.double(), acc.double().abs()
        for row in range(ids.shape[0]):
            for expert, weight in zip(ids[row].tolist(), routing[row].tolist(), strict=True):
                if expert < 0:
                    continue
                gate, up, down = self.weights[expert]
                g = gate @ x[row].double()
                h = g * torch.sigmoid(g) * (up @ x[row].double())
                out[row] += weight * (down @ h)
                size[row] += abs(weight) * (down.abs() @ h.abs())
        return out, size


def _inputs(n, hidden, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, hidden, generator=generator)
    ids = torch.stack([torch.randperm(N_EXPERTS, generator=generator)[:TOP_K] for _ in range(n)])
    return x, ids, torch.rand(n, TOP_K, generator=generator)


LAYOUT = ExpertLayout(GGMLType.Q8_0, GGMLType.Q8_0, GGMLType.Q5_1, hidden=32, width=32)
LAYOUTS = [
    LAYOUT,
    ExpertLayout(GGMLType.Q8_0, GGMLType.Q5_0, GGMLType.Q8_0, hidden=32, width=32),
    pytest.param(
        ExpertLayout(GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q5_1, hidden=256, width=32), marks=pytest.mark.slow
    ),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda s: f"{s.gate.name}-{s.up.name}-{s.down.name}")
def test_a_step_of_hits_and_misses_agrees_with_the_reference(layout, device):
    rig = Rig(layout, device)
    rig.put(1, 0)
    rig.put(4, 1)
    x, ids, routing = _inputs(2, layout.hidden)
    start = torch.randn(2, layout.hidden)
    acc, _, _ = rig.step(x, ids, routing, wanted=range(N_EXPERTS), acc=start)
    expected, size = rig.reference(x, ids, routing, start)
    # two products in a row, each good to 2^-16 of its terms; the hidden values cancel, so their error weighs more
    assert bool(((acc.double() - expected).abs() <= 2e-3 * size).all())
    assert ((acc.double() - expected).norm() / expected.norm()) < 2e-4


def test_bits_do_not_depend_on_where_experts_lie_or_on_company(device):
    x, ids, routing = _inputs(2, LAYOUT.hidden, seed=1)
    all_missing = Rig(LAYOUT, device).step(x, ids, routing)[0]
    some = Rig(LAYOUT, device)
    some.put(int(ids[0, 0]), 1)
    some.put(int(ids[1, 1]), 0)
    assert torch.equal(some.step(x, ids, routing, wanted=(0, 3, 6))[0], all_missing)
    alone = [Rig(LAYOUT, device).step(x[i : i + 1], ids[i : i + 1], routing[i : i + 1])[0] for i in range(2)]
    assert torch.equal(torch.cat(alone), all_missing)


def test_fetched_bytes_are_those_of_the_store_and_nothing_else_changes(device):
    rig = Rig(LAYOUT, device)
    rig.put(4, 1)
    before = rig.arena.clone()
    ids = torch.tensor([[6, 4], [0, 4]])
    rig.step(torch.zeros(2, LAYOUT.hidden), ids, torch.ones(2, TOP_K), wanted=(6,))
    n_bytes = LAYOUT.expert_bytes
    rooms = rig.rooms
    for at, expert in ((rooms.slots_at + 2 * STRIDE, 6), (rooms.transient_at, 0)):
        assert torch.equal(rig.arena[at : at + n_bytes].cpu(), rig.store[expert, :n_bytes])
        before[at : at + n_bytes] = rig.arena[at : at + n_bytes]
    assert torch.equal(rig.arena, before)


def test_a_plan_that_fetches_does_what_a_plan_and_a_fetch_do(device, monkeypatch):
    x, ids, routing = torch.zeros(2, LAYOUT.hidden), torch.tensor([[5, 1], [1, 6]]), torch.ones(2, TOP_K)
    found = []
    for alone in (2 * TOP_K, 0):
        monkeypatch.setattr(step_plan, "ALONE_IDS", alone)
        torch.manual_seed(1)
        rig = Rig(LAYOUT, device)
        rig.put(5, 1)
        _, fetched, buffers = rig.step(x, ids, routing, wanted=(6,))
        plan = [t.cpu() for t in (buffers.experts, buffers.offsets[:3], buffers.missing[:3], buffers.chosen_by[:3])]
        found.append((fetched, rig.arena.cpu(), plan))
    assert found[0][0] == found[1][0] == [6, -1]
    assert torch.equal(found[0][1], found[1][1])
    assert all(torch.equal(a, b) for a, b in zip(found[0][2], found[1][2], strict=True))


def test_padding_rows_do_nothing(device):
    rig = Rig(LAYOUT, device)
    x, ids, routing = _inputs(2, LAYOUT.hidden, seed=2)
    alone, fetched, _ = rig.step(x[:1], ids[:1], routing[:1], wanted=range(N_EXPERTS))
    padded_ids = torch.cat((ids[:1], torch.full((1, TOP_K), -1)))
    start = torch.cat((torch.zeros(1, LAYOUT.hidden), torch.full((1, LAYOUT.hidden), 5.0)))
    acc, padded_fetched, buffers = rig.step(x, padded_ids, routing, wanted=range(N_EXPERTS), acc=start)
    assert torch.equal(acc[0], alone[0])
    assert torch.equal(acc[1], start[1])
    assert padded_fetched == fetched
    assert buffers.experts.tolist() == sorted(ids[0].tolist()) + [-1] * 2
    nothing, none_fetched, buffers = rig.step(x, torch.full((2, TOP_K), -1), routing, acc=start)
    assert torch.equal(nothing, start)
    assert none_fetched == [-1, -1]
    assert buffers.count.item() == 0


def test_without_spares_every_miss_passes_through(device):
    rig = Rig(LAYOUT, device)
    x, ids, routing = _inputs(1, LAYOUT.hidden, seed=3)
    _, fetched, buffers = rig.step(x, ids, routing, wanted=range(N_EXPERTS), spares=())
    assert fetched == []
    assert buffers.offsets.tolist() == [rig.rooms.transient_at + i * STRIDE for i in range(TOP_K)]


def test_gate_and_up_of_different_types_are_split_alike():
    for hidden in (2048, 2560, 4096):
        for gate in PLANES:
            for up in PLANES:
                tiles, up_unroll = gate_up_tiling(gate, up, hidden)
                assert hidden % (planes_for(gate, hidden).step * tiles.split * tiles.unroll) == 0
                assert hidden % (planes_for(up, hidden).step * tiles.split * up_unroll) == 0


def test_a_layout_says_where_matrices_lie():
    layout = ExpertLayout(GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q5_1, hidden=2560, width=640)
    assert (layout.up_at, layout.down_at, layout.expert_bytes) == (921_600, 1_843_200, 3_072_000)
    assert decode_rows(torch.zeros((1, 480), dtype=torch.uint8), GGMLType.Q5_1).shape == (1, 640)
    assert Weight(torch.zeros((1, 1440), dtype=torch.uint8), GGMLType.Q4_K, 2560).nbytes * 640 == layout.up_at
