"""A GPU's executors on Triton's interpreter, in the slots and the ring of a planned arena, against direct experts."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from makeway.errors import EngineFailed
from makeway.experts.executors import DirectExperts
from makeway.experts.routed import RoutedInput
from makeway.kernels import REFERENCE
from tests.experts.rig import Rig

pytest.importorskip("triton")
from makeway.experts.in_graph import DeviceExperts
from makeway.experts.triton_pieces import TritonPieces

FILE = "qwen3moe-k256-Q4_K_M.gguf"
N_LAYERS = 1


def ask(x, routers):
    return [REFERENCE.linear(x, router) for router in routers]


def routed(rig, seed, *, n, dtype=torch.float32):
    """Random rows that choose experts at random, and what direct experts make of them, by layer."""
    facts, draw = rig.runner.facts, np.random.default_rng(seed)
    n_experts, top_k = rig.layers[0].n_experts, facts.top_k
    ids = np.stack([draw.permutation(n_experts)[:top_k] for _ in range(n)])
    x = torch.from_numpy(draw.normal(0, 1, (n, facts.hidden)).astype(np.float32)).bfloat16()
    weights = torch.from_numpy(draw.random((n, top_k)).astype(np.float32))
    acc = torch.from_numpy(draw.normal(0, 1, (n, facts.hidden)).astype(np.float32))
    return RoutedInput(x.to(dtype), torch.from_numpy(ids), weights, acc)


def truth(rig, layer, moe):
    out = RoutedInput(moe.x.float(), moe.ids, moe.weights, moe.acc.clone())
    DirectExperts(rig.runner.model.store, REFERENCE)(layer, out)
    return out.acc


def close(value, expected):
    return float((value - expected).abs().max()) <= 2e-2 * float(expected.abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("slots", [0, 2, 4])
def test_a_step_hits_fetches_and_keeps(slots):
    rig = Rig(FILE, slots=slots, uploads=2)
    rig.cached()
    rig.restore(1)
    n_restored = rig.cache.counters.uploads
    executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=4, multiply=ask)
    for step in range(4):
        for layer in range(N_LAYERS):
            moe = routed(rig, 10 * step % 20 + layer, n=1 + step % 2)
            expected = truth(rig, layer, moe)
            executor(layer, moe)
            assert close(moe.acc, expected), (step, layer)
        executor.end_step()
        executor._tables.read_report()
        rig.cache.audit()
    executor.settle()
    rig.cache.audit()
    counters = rig.cache.counters
    assert counters.hits + counters.misses > 0
    assert (counters.hits > 0) == (slots > 0)
    if slots:
        assert counters.uploads > n_restored, "misses were kept"


def test_the_report_counts_each_expert_of_a_layer_once():
    """Three rows of the first layer, the last of them padding; what no pass wrote does not count."""
    rig = Rig("qwen3moe-base-bf16.gguf", slots=2, uploads=2)
    rig.restore(1)  # expert 0 of every layer
    tables = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=3, multiply=ask)._tables
    assert tables.routed.shape[1] == 4
    counters, sizes = rig.cache.counters, [layer.expert_bytes for layer in rig.plan.layers]
    hits, misses, link = counters.hits, counters.misses, counters.link_bytes
    tables.send()
    tables.n_rows[0] = 3
    k = tables.routed.shape[2]
    tables.routed.fill_(1)
    for row, ids in enumerate(([0, 1], [3, 0], [-1, -1])):
        tables.routed[0, row] = torch.tensor(ids + [-1] * (k - 2))
    tables.fetched.fill_(1)
    tables.fetched[0] = torch.tensor([3, -1])
    tables.fetch_report()
    tables.end_step()
    tables.read_report()
    assert counters.hits - hits == 1
    assert counters.misses - misses == 2
    assert counters.link_bytes - link == 2 * (-(-sizes[0] // 16) * 16)
    spares = rig.cache.table.spares[0]
    assert rig.cache.table.holds[0, spares[0, 0]] == 3
    assert (rig.cache.table.holds[1:, spares[1:].flatten()] == -1).all()


def test_a_step_is_told_ahead_and_again_when_something_has_changed():
    rig = Rig("qwen3moe-base-bf16.gguf", slots=2, uploads=2)
    rig.restore(2)  # experts 0 and 2 of every layer
    tables = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=1, multiply=ask)._tables
    table = rig.cache.table
    tables.send()
    assert torch.equal(tables.slot_of, torch.from_numpy(table.slot_of))
    tables.send_ahead()
    assert torch.equal(tables.spares, torch.from_numpy(table.spares[1])), "the other set comes next"
    tables.slot_of.fill_(7)
    tables.send()
    assert (tables.slot_of == 7).all(), "nothing has changed, nothing is sent"
    tables.send_ahead()
    table.unpublish([0], [int(table.slot_of[0, 2])])
    tables.send()
    assert torch.equal(tables.slot_of, torch.from_numpy(table.slot_of))
    assert tables.slot_of[0, 2] == -1
    tables.send_ahead()
    tables.slot_of.fill_(7)
    tables.follower.n_decided += 1  # as `settle` does
    tables.send()
    assert torch.equal(tables.slot_of, torch.from_numpy(table.slot_of)), "what is wanted may have changed"


def test_what_the_last_step_fetched_is_forgotten_when_slots_are_lent_but_it_is_counted():
    rig = Rig("qwen3moe-base-bf16.gguf", slots=2, uploads=2)
    executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=1, multiply=ask)
    tables, table, counters = executor._tables, rig.cache.table, rig.cache.counters
    for ids in ([3, 4], [3, 4], [5, 6]):
        executor.begin_pass(slice(0, 1), 1)
        with pytest.raises(EngineFailed, match="a step is open"):
            executor.make_way()
        tables.routed.fill_(-1)
        tables.routed[0, 0, :2] = tables.fetched[0] = torch.tensor(ids)
        executor.end_step()
    assert table.slot_of[0, [3, 4]].min() >= 0
    counted, holds = counters.hits + counters.misses, table.holds.copy()
    executor.make_way()
    table.unpublish(*np.nonzero(table.expert_of != -1))  # there is room for all
    executor.settle()
    assert counters.hits + counters.misses == counted + 2
    assert table.n_published == 0
    assert set(table.holds.ravel()) <= set(holds.ravel())


@pytest.mark.slow
def test_bits_do_not_depend_on_where_an_expert_was():
    sums = []
    for slots in (0, 3, 8):
        rig = Rig(FILE, slots=slots, uploads=2)
        rig.cached()
        rig.restore(slots)
        executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=4, multiply=ask)
        moe = routed(rig, 3, n=2)
        executor(0, moe)
        executor.end_step()
        sums.append(moe.acc)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


@pytest.mark.parametrize("uploads", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_what_was_guessed_is_not_fetched_again(uploads):
    """Layer 1 is asked with layer 0's input; then it gets that itself, so that all guesses are right, or another."""
    sums = []
    for guesses in (0, 4):  # the second half of them one layer ahead
        rig = Rig("qwen3moe-base-bf16.gguf", slots=1, uploads=uploads, guesses=guesses)
        rig.restore(1)
        rig.cache.policy.wanted = lambda is_published, n_free: ~is_published  # every miss may take a spare
        executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=4, multiply=ask)
        router, counters = rig.runner.model.router(1), rig.cache.counters
        for right in (True, False):
            before, link = replace(counters), rig.device.link_bytes
            first = routed(rig, 3, n=1)
            ids, weights = REFERENCE.route(REFERENCE.linear(first.x, router), first.ids.shape[1])
            if not right:
                absent = [e for e in range(rig.plan.sizes.n_experts) if e not in ids][: ids.shape[1]]
                ids = torch.tensor([absent])
            second = RoutedInput(first.x, ids, weights, torch.zeros_like(first.acc))
            executor.begin_pass(slice(0, 2), 1)
            executor.run(0, first, first=0, ahead=[(1, 1, router)])
            executor.run(1, second, first=0)
            executor.end_pass()
            executor.end_step()
            executor._tables.read_report()
            rig.cache.audit()
            assert close(second.acc, truth(rig, 1, replace(second, acc=torch.zeros_like(second.acc))))
            sums.append(second.acc)
            made, misses = counters.guesses - before.guesses, counters.misses - before.misses
            assert made == guesses // 2
            assert counters.right_guesses - before.right_guesses == (made if right else 0)
            size = rig.plan.layers[1].stride_bytes
            assert rig.device.link_bytes - link == (misses + (0 if right else made)) * size
    assert torch.equal(sums[0], sums[2])
    assert torch.equal(sums[1], sums[3])


@pytest.mark.parametrize(
    ("piece", "copies_all", "slots"),
    [
        (3, True, 2),
        pytest.param(1, False, 0, marks=pytest.mark.slow),
        pytest.param(4, False, 4, marks=pytest.mark.slow),
    ],
)
def test_a_sweep_runs_pieces_from_slots_and_ring(piece, copies_all, slots):
    rig = Rig(FILE, slots=slots)
    rig.restore(slots)
    workspace = torch.empty(1 << 22, dtype=torch.uint8)
    pieces = TritonPieces(rig.cache, arena=rig.arena.whole, workspace=workspace, piece_experts=piece)
    experts = rig.streamed(piece=piece, copies_all=copies_all, pieces=pieces)
    for layer in range(N_LAYERS):
        moe = routed(rig, layer, n=5, dtype=torch.bfloat16)
        moe.ids[4] = -1
        expected = truth(rig, layer, moe)
        experts(layer, moe)
        assert close(moe.acc, expected), layer
