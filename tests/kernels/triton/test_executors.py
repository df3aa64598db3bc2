"""A GPU's executors on Triton's interpreter, in the slots and the ring of a planned arena, against direct experts."""

import numpy as np
import pytest
import torch

from makeway.experts.executors import DirectExperts
from makeway.experts.routed import RoutedInput
from makeway.kernels import REFERENCE
from tests.experts.rig import Rig

pytest.importorskip("triton")
from makeway.experts.in_graph import DeviceExperts
from makeway.experts.triton_pieces import TritonPieces

FILE = "qwen3moe-k256-Q4_K_M.gguf"
N_LAYERS = 1


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
    executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=4)
    for step in range(4):
        for layer in range(N_LAYERS):
            moe = routed(rig, 10 * step % 20 + layer, n=1 + step % 2)
            expected = truth(rig, layer, moe)
            executor(layer, moe)
            assert close(moe.acc, expected), (step, layer)
        executor.end_step()
        rig.cache.audit()
    executor.settle()
    rig.cache.audit()
    counters = rig.cache.counters
    assert counters.hits + counters.misses > 0
    assert (counters.hits > 0) == (slots > 0)
    if slots:
        assert counters.uploads > n_restored, "misses were kept"


@pytest.mark.slow
def test_bits_do_not_depend_on_where_an_expert_was():
    sums = []
    for slots in (0, 3, 8):
        rig = Rig(FILE, slots=slots, uploads=2)
        rig.cached()
        rig.restore(slots)
        executor = DeviceExperts(rig.cache, arena=rig.arena.whole, most_rows=4)
        moe = routed(rig, 3, n=2)
        executor(0, moe)
        executor.end_step()
        sums.append(moe.acc)
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[0], sums[2])


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
