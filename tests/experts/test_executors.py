"""Where an expert's bytes lie changes no bit, and exactly the planned bytes cross the link."""

import itertools
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from makeway.engine.prefill import Sweep
from makeway.errors import EngineFailed
from makeway.experts.executors import DirectExperts
from makeway.experts.pieces import ReferencePieces
from makeway.experts.policies import RANKINGS, Gate
from makeway.experts.routed import RoutedInput
from makeway.experts.streamed import StreamedExperts
from makeway.kernels import REFERENCE
from tests.conftest import golden_path
from tests.devices import LazyDevice, OrderedDevice, RecordingDevice
from tests.experts.rig import FILES, Rig, decode
from tests.models.runner import Runner

PROMPT = [(7 * i + 3) % 90 for i in range(20)]
N_STEPS = 6


def prefill(runner, experts, tokens=PROMPT, chunk=7):
    """A sweep of a new sequence; returns the sequence and the logits of all its rows."""
    sequence = runner.sequence()
    sequence.reserve(len(tokens))
    sweep = Sweep(runner.model, experts, parts=[(sequence, tokens)], chunk=chunk)
    sweep.run()
    residual = sweep.residual(sweep.parts[0])
    return sequence, runner.model.head(residual)


@cache
def direct(file):
    """Prompt logits, greedy tokens and step logits of direct experts, and the routed ids of the prompt by layer."""
    runner = Runner(golden_path(file))
    sequence, prompt = prefill(runner, runner.experts)
    ids = {layer: np.concatenate(calls) for layer, calls in runner.experts.ids.items()}
    plain = DirectExperts(runner.model.store, REFERENCE)
    tokens, logits = decode(runner, plain, sequence, token=int(prompt[-1].argmax()), n_steps=N_STEPS)
    return prompt, tokens, logits, ids


def slots_of(name, file):
    n_experts = Runner(golden_path(file)).facts.n_experts
    return {"0": 0, "1": 1, "few": max(2, n_experts // 3), "all": n_experts}[name]


def small_first(*others):
    """Every combination with the smallest model; with the others the first of each value, and the rest slow."""
    for file, *values in itertools.product(FILES, *others):
        n_others = sum(value != next(iter(all_)) for value, all_ in zip(values, others, strict=True))
        yield pytest.param(file, *values, marks=[pytest.mark.slow] if file != FILES[2] and n_others > 1 else [])


@pytest.mark.parametrize(("file", "slots", "policy"), list(small_first(["few", "0", "1", "all"], RANKINGS)))
def test_slots_and_policy_change_no_bit(file, policy, slots):
    prompt, tokens, logits, _ = direct(file)
    n_slots = slots_of(slots, file)
    rig = Rig(file, slots=n_slots, policy=policy, device=LazyDevice())
    rig.restore(n_slots // 2)
    piece = {"0": 1, "1": 3, "few": 3, "all": rig.plan.sizes.n_experts}[slots]
    sequence, rows = prefill(rig.runner, rig.streamed(piece=piece, copies_all=True))
    assert torch.equal(rows, prompt)
    experts = rig.cached(n_transient=2)
    got = decode(
        rig.runner, experts, sequence, token=int(rows[-1].argmax()), n_steps=N_STEPS, end_step=experts.end_step
    )
    assert got[0] == tokens
    assert torch.equal(got[1], logits)
    experts.settle()
    rig.cache.audit()
    assert (rig.cache.table.n_published > 0) == (n_slots > 0)


@pytest.mark.parametrize(
    ("file", "chunk", "piece", "copies_all"), list(small_first([1000, 1], [3, 1, "all"], [True, False]))
)
def test_a_sweep_moves_each_expert_that_is_not_resident_once(file, copies_all, piece, chunk):
    prompt, _, _, ids = direct(file)
    rig = Rig(file, slots=slots_of("few", file), device=LazyDevice() if piece == 3 else RecordingDevice())
    rig.restore(3)
    piece = rig.plan.sizes.n_experts if piece == "all" else piece
    experts = rig.streamed(piece=piece, copies_all=copies_all, buffers=1 if chunk == 1 else 2)
    rig.device.sources.clear()
    before, tally = rig.cache.counters.link_bytes, rig.device.tally
    table, hits = rig.cache.table.slot_of.copy(), 0
    expected, sources = 0, set()
    for layer, store in enumerate(rig.layers[: rig.runner.facts.n_layers]):
        used = set(ids[layer].reshape(-1).tolist())
        hits += sum(table[layer, e] >= 0 for e in used)
        for expert in range(store.n_experts) if copies_all else used:
            if table[layer, expert] < 0:
                expected += store.expert_bytes
                sources.add(store.bytes_of(expert).data_ptr())
    _, rows = prefill(rig.runner, experts, chunk=chunk)
    assert torch.equal(rows, prompt)
    assert rig.device.tally - tally == expected
    assert rig.cache.counters.link_bytes - before == expected == rig.device.link_bytes - tally
    assert rig.device.sources == dict.fromkeys(sources, 1), "kept experts are not copied, the others once"
    assert rig.cache.counters.hits == hits
    assert np.array_equal(rig.cache.table.slot_of, table), "a sweep leaves the cache as it was"
    rig.cache.audit()


def test_a_sweep_beside_half_of_the_slots():
    file = FILES[2]
    rig = Rig(file, slots=6)
    rig.restore(6)
    assert rig.cache.table.n_published == 6 * len(rig.layers)
    assert len(rig.lend(3)) == 3 * len(rig.layers)
    _, rows = prefill(rig.runner, rig.streamed(piece=3, copies_all=False, n_kept=3))
    assert torch.equal(rows, direct(file)[0])
    with pytest.raises(EngineFailed, match="slot 3 of layer 0 is not in 'kept slots'"):
        rig.cache.weights_of(0, 3)
    rig.cache.audit()


def test_an_executor_of_another_layout_raises():
    rig = Rig(FILES[2], slots=4)
    streamed = rig.streamed(piece=1, copies_all=True)
    cached = rig.cached()
    with pytest.raises(EngineFailed, match="published is"):
        prefill(rig.runner, streamed)
    rig.streamed(piece=1, copies_all=True)
    with pytest.raises(EngineFailed, match="published is"):
        prefill(rig.runner, cached)


def routed(rig, ids, seed):
    """Input of the experts with given ids [n, k]; padding rows have ids of -1."""
    made = torch.Generator().manual_seed(seed)
    hidden = rig.runner.facts.hidden
    n, k = ids.shape
    weights = torch.rand((n, k), generator=made) * (ids >= 0)
    x, acc = torch.randn((n, hidden), generator=made), torch.randn((n, hidden), generator=made)
    return RoutedInput(x=x, ids=ids, weights=weights, acc=acc)


@pytest.mark.parametrize("policy", ["lru", "lfru"])
@pytest.mark.parametrize("gate", [Gate(1, 4), Gate(2, 8)])
def test_hits_and_misses_equal_a_recount(policy, gate):
    """Every step: hits are what was published before it, each other expert crosses once; a late policy publishes."""
    rig = Rig(FILES[1], slots=4, policy=policy, gate=gate, device=LazyDevice())
    experts = rig.cached(n_transient=1)
    draw, counters = np.random.default_rng(5), rig.cache.counters
    hits = misses = n_bytes = 0
    for step in range(20):
        table = rig.cache.table.slot_of.copy()
        for layer, store in enumerate(rig.layers):
            ids = torch.from_numpy(draw.zipf(1.5, size=(4, 3)) % store.n_experts)
            ids[3] = -1 if step % 2 else ids[3]
            ids = ids.int() if step % 3 else ids
            moe, plain = routed(rig, ids, step), routed(rig, ids, step)
            DirectExperts(rig.cache.store, REFERENCE)(layer, plain)
            experts(layer, moe)
            assert torch.equal(moe.acc, plain.acc)
            used = {int(e) for e in ids.reshape(-1) if e >= 0}
            here = sum(table[layer, e] >= 0 for e in used)
            hits, misses = hits + here, misses + len(used) - here
            n_bytes += (len(used) - here) * store.expert_bytes
        assert np.array_equal(rig.cache.table.slot_of, table), "nothing is published inside a step"
        experts.end_step()
        assert (counters.hits, counters.misses) == (hits, misses)
        assert counters.link_bytes == rig.device.tally == n_bytes, "keeping a spare copies nothing"
        assert counters.uploads - counters.evictions == rig.cache.table.n_published
        rig.cache.audit()
    assert hits > 0
    assert counters.evictions > 0


@pytest.mark.parametrize("file", FILES)
def test_slots_lent_by_the_plan_come_back(file):
    """Decode, lend, sweep with the plan's own prefill layout, take back, restore: three times, bits and bytes hold."""
    prompt, tokens, logits, _ = direct(file)
    rig = Rig(file, slots=slots_of("few", file), device=LazyDevice())
    for n_kept in (rig.plan.decode.n_ranks, 1, 0):
        lending = replace(rig.plan.lend_for(len(PROMPT)), n_kept=n_kept)
        layout = rig.plan.prefill_layout(lending)
        lent = rig.lend(n_kept)
        kept, ring, *_ = rig.arena.layout(layout.regions)
        rig.cache.attach(kept)
        pieces = ReferencePieces(rig.cache.store, REFERENCE, arena=rig.arena.whole)
        experts = StreamedExperts(
            rig.cache, pieces, ring=ring, piece_experts=layout.piece_experts, copies_all=lending.copies_all
        )
        ring.tensor.fill_(255)
        sequence, rows = prefill(rig.runner, experts)
        assert torch.equal(rows, prompt)
        rig.cache.audit()
        cached = rig.cached()
        rig.cache.table.take_back()
        assert rig.refill(lent[:, 0].tolist(), lent[:, 1].tolist()) == len(lent)
        got = decode(
            rig.runner, cached, sequence, token=int(rows[-1].argmax()), n_steps=N_STEPS, end_step=cached.end_step
        )
        assert got[0] == tokens
        assert torch.equal(got[1], logits)
        cached.settle()
        rig.cache.audit()
        sequence.close()
    assert rig.cache.table.n_published > 0


def test_a_layer_that_runs_twice_in_a_step_takes_one_spare():
    """As the MTP block does when it drafts more than one token."""
    rig = Rig(FILES[2], slots=4)
    experts, store = rig.cached(), rig.cache.store
    for step in range(3):
        for turn in range(2):
            moe, plain = (routed(rig, torch.tensor([[3, 1], [1, 5]]), 10 * step + turn) for _ in range(2))
            experts(2, moe)
            DirectExperts(store, REFERENCE)(2, plain)
            assert torch.equal(moe.acc, plain.acc)
        experts.end_step()
    experts.settle()
    rig.cache.audit()
    assert rig.cache.table.slot_of[2, [1, 3]].min() >= 0


def test_a_copy_that_fails_is_never_published():
    rig = Rig(FILES[2], slots=4)
    experts = rig.cached()
    good, copies = rig.device.copy, []

    def failing(target, source):
        copies.append(source)
        if len(copies) == 2:
            raise EngineFailed("the link is down")
        good(target, source)

    rig.device.copy = failing
    with pytest.raises(EngineFailed, match="link is down"):
        experts(0, routed(rig, torch.tensor([[4, 2]]), 0))
    experts.end_step()
    experts.settle()
    assert np.flatnonzero(rig.cache.table.slot_of[0] >= 0).tolist() == [2]
    copies.clear()
    with pytest.raises(EngineFailed, match="link is down"):
        rig.refill([1, 1], [0, 1])
    assert rig.cache.table.slot_of[1].max() == -1
    rig.cache.audit()


def test_settle_decides_at_once_and_refuses_an_open_step():
    rig = Rig(FILES[2], slots=4)
    experts = rig.cached()
    experts(0, routed(rig, torch.tensor([[0, 1]]), 0))
    with pytest.raises(EngineFailed, match="a step is open"):
        experts.settle()
    experts.end_step()
    assert rig.cache.table.n_published == 0, "the policy is one step late"
    experts.settle()
    assert rig.cache.table.slot_of[0, :2].min() >= 0
    before = rig.device.tally
    experts(0, routed(rig, torch.tensor([[0, 1]]), 1))
    assert rig.device.tally == before
    assert rig.cache.counters.hits == 2


def test_pieces_take_turns_in_the_ring():
    """The next piece is copied beside the one that computes, never over it."""
    rig = Rig(FILES[2], slots=0)
    experts = rig.streamed(piece=3, copies_all=True, buffers=2)
    good, targets = rig.device.copy, []

    def recording(target, source):
        targets.append(target.storage_offset())
        good(target, source)

    rig.device.copy = recording
    moe, plain = (routed(rig, torch.tensor([[11, 4], [0, 4], [-1, -1]]), 0) for _ in range(2))
    experts(0, moe)
    DirectExperts(rig.cache.store, REFERENCE)(0, plain)
    assert torch.equal(moe.acc, plain.acc)
    stride = rig.plan.sizes.stride_bytes
    slots = [(offset - rig.plan.swing.offset) // stride for offset in targets]
    assert slots == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5]
    assert rig.cache.counters.misses == 3, "padding rows route nowhere"


def test_executors_need_room_for_one_expert():
    rig = Rig(FILES[2], slots=4)
    with pytest.raises(EngineFailed, match="has no room for one expert"):
        rig.cached(n_transient=0)
    with pytest.raises(EngineFailed, match="a piece of 3 experts does not fit"):
        rig.streamed(piece=3, copies_all=True, buffers=0)


def sweep(rig, experts, *, n_layers, prefetch, seed=0):
    """Random routing over the first layers, each announced one ahead; every sum is compared with direct experts."""
    draw = np.random.default_rng(seed)
    if prefetch:
        experts.prefetch(0)
    for layer in range(n_layers):
        if prefetch and layer + 1 < n_layers:
            experts.prefetch(layer + 1)
        ids = torch.from_numpy(draw.integers(0, rig.layers[layer].n_experts, size=(4, 3)))
        moe, plain = routed(rig, ids, layer), routed(rig, ids, layer)
        experts(layer, moe)
        DirectExperts(rig.runner.model.store, REFERENCE)(layer, plain)
        assert torch.equal(moe.acc, plain.acc)
    experts.close()


@pytest.mark.parametrize("buffers", [1, 2, 5])
@pytest.mark.parametrize("piece", [1, 3])
def test_pieces_of_the_next_layer_cross_ahead_and_once(buffers, piece):
    rig = Rig(FILES[2], slots=4, device=LazyDevice())
    rig.restore(4)
    rig.device.sources.clear()
    experts = rig.streamed(piece=piece, copies_all=True, buffers=buffers)
    sweep(rig, experts, n_layers=3, prefetch=True)
    absent = [(i, e) for i in range(3) for e in range(rig.layers[i].n_experts) if rig.cache.table.slot_of[i, e] < 0]
    assert rig.device.sources == {rig.cache.store.bytes_of(*key).data_ptr(): 1 for key in absent}


def test_the_ring_is_full_from_the_start_to_the_last_layer():
    rig = Rig(FILES[2], slots=0)
    n_experts = rig.layers[0].n_experts
    experts = rig.streamed(piece=2, copies_all=True, buffers=2)
    experts.prefetch(0)
    assert rig.device.n_copies == 4
    experts.prefetch(1)
    experts.prefetch(1)
    assert rig.device.n_copies == 4, "no buffer is free"
    asked = []
    rig.ops = replace(REFERENCE, expert_ffn=lambda *a: asked.append(rig.device.n_copies) or REFERENCE.expert_ffn(*a))
    experts._pieces = ReferencePieces(rig.cache.store, rig.ops, arena=rig.arena.whole)
    experts(0, routed(rig, torch.arange(n_experts)[:, None], 0))
    assert asked == [min(2 * (e // 2) + 4, n_experts + 4) for e in range(n_experts)], "always one piece ahead"
    assert rig.device.n_copies == n_experts + 4
    experts(1, routed(rig, torch.tensor([[0]]), 1))
    assert rig.device.n_copies == 2 * n_experts, "nothing behind the last layer"


def test_routed_experts_are_not_known_ahead():
    rig = Rig(FILES[2], slots=0)
    experts = rig.streamed(piece=2, copies_all=False)
    experts.prefetch(0)
    assert rig.device.n_copies == 0
    experts(0, routed(rig, torch.tensor([[1, 9]], dtype=torch.int32), 0))
    assert rig.device.n_copies == 2


def test_layers_run_in_the_order_announced():
    rig = Rig(FILES[2], slots=0)
    experts = rig.streamed(piece=3, copies_all=True)
    experts.prefetch(1)
    with pytest.raises(EngineFailed, match="layer 1 was announced to run next, not layer 0"):
        experts(0, routed(rig, torch.tensor([[1]]), 0))


def test_a_slot_that_a_sweep_counts_on_must_stay():
    rig = Rig(FILES[2], slots=4)
    rig.restore(1)
    experts = rig.streamed(piece=3, copies_all=True)
    experts.prefetch(0)
    rig.cache.table.unpublish([0], rig.cache.table.slot_of[0, [0]])
    with pytest.raises(EngineFailed, match="expert 0 of layer 0 left its slot"):
        experts(0, routed(rig, torch.tensor([[0]]), 0))


def ordered_run(without=None):
    """A refill, decode from too few slots, and a sweep, on a device that checks the order, one wait left out."""
    device = OrderedDevice()
    rig = Rig(FILES[2], slots=4, device=device, ops=device.watched(REFERENCE))
    rig.restore(2)
    if without is not None:
        setattr(device, without, lambda event: None)
    draw = np.random.default_rng(0)
    for turn in range(2):
        cached = rig.cached(n_transient=2)
        for step in range(6):
            cached(0, routed(rig, torch.from_numpy(draw.integers(0, rig.layers[0].n_experts, size=(3, 3))), step))
            cached.end_step()
        cached.settle()
        lent = rig.lend(1)
        sweep(rig, rig.streamed(piece=2, copies_all=True, n_kept=1), n_layers=3, prefetch=turn == 1)
        sweep(rig, rig.streamed(piece=2, copies_all=False, n_kept=1), n_layers=3, prefetch=False)
        rig.cache.table.take_back()
        rig.cached()
        rig.refill(lent[:, 0].tolist(), lent[:, 1].tolist())
    rig.cache.audit()


def test_nothing_is_read_early_and_nothing_overwritten_early():
    ordered_run()
    with pytest.raises(AssertionError, match="bytes read too early"):
        ordered_run(without="compute_waits")
    with pytest.raises(AssertionError, match="a copy overtakes a read"):
        ordered_run(without="copies_wait")
