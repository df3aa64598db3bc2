"""Experts come back into free slots: in order, behind their events, and no byte more than there is room for."""

import numpy as np
import pytest

from makeway.experts.refill import Refill
from makeway.experts.slots import NONE
from tests.devices import LazyDevice
from tests.experts.rig import FILES, Rig


@pytest.fixture
def rig():
    rig = Rig(FILES[2], slots=3, uploads=1, device=LazyDevice())
    yield rig
    rig.runner.file.close()


def wishes(rig, experts):
    return np.array([(layer, e) for e in experts for layer in range(len(rig.layers))])


def finish(refill):
    n = 0
    while not refill.is_done:
        n += refill.poll()
    return n


def test_the_first_wishes_come_first_and_nothing_is_published_before_it_is_there(rig):
    cache, table = rig.cache, rig.cache.table
    refill = Refill(cache, wishes(rig, [7, 2, 5, 1, 0]), batch_bytes=1)
    n_layers = len(rig.layers)
    assert refill.planned_bytes == sum(3 * layer.expert_bytes for layer in rig.layers)
    assert refill.wait() == 1
    assert table.is_published()[0, 7]
    assert table.n_published == 1
    while not refill.is_done:
        refill.poll()
        cache.audit()
    assert set(np.flatnonzero(table.is_published()[n_layers - 1])) == {7, 2, 5}
    assert refill.moved_bytes == refill.planned_bytes == rig.device.tally
    assert refill.n_published == cache.counters.uploads == 3 * n_layers
    assert refill.wait() == 0


def test_only_free_slots_are_filled(rig):
    rig.restore(2)
    moved = rig.device.tally
    refill = Refill(rig.cache, wishes(rig, [0, 2, 7, 9]), batch_bytes=1 << 30)
    assert finish(refill) == len(rig.layers)
    assert rig.device.tally - moved == refill.planned_bytes == sum(layer.expert_bytes for layer in rig.layers)
    assert rig.cache.table.is_published()[0, [0, 2, 7]].all()
    rig.cache.audit()


def test_a_batch_is_full_wherever_its_wishes_stand(rig):
    """Most of what is wished never left: a batch is of those that have to come, or the link would rest."""
    rig.refill([0], [0])
    stride = rig.plan.sizes.stride_bytes
    refill = Refill(rig.cache, np.array([(0, 0), (0, 7), (1, 3), (0, 0), (0, 9), (1, 4)]), batch_bytes=3 * stride)
    assert refill.wait() == 3
    assert rig.cache.table.is_published()[0, [0, 7, 9]].all()
    assert rig.cache.table.is_published()[1, 3]
    assert finish(refill) == 1
    rig.cache.audit()


def test_copies_are_asked_for_as_far_ahead_as_was_said(rig):
    many, stride = wishes(rig, [7, 2, 5]), rig.plan.sizes.stride_bytes
    for ahead_bytes, n_asked in ((0, 2), (5 * stride, 5), (5 * stride - 1, 4)):
        rig.cache.table.clear()
        before = rig.device.n_copies
        refill = Refill(rig.cache, many, batch_bytes=stride, ahead_bytes=ahead_bytes)
        assert refill.poll() == 0
        assert rig.device.n_copies - before == n_asked
        refill.stop()


def test_stop_publishes_what_is_on_its_way_and_no_more(rig):
    refill = Refill(rig.cache, wishes(rig, [7, 2, 5]), batch_bytes=1)
    refill.wait()
    moved = refill.moved_bytes
    assert rig.device.is_open(rig.device.n_copies)
    refill.stop()
    assert refill.is_done
    assert not rig.device.is_open(rig.device.n_copies), "who computes now finds the bytes"
    assert refill.moved_bytes == moved == rig.device.tally
    assert (rig.cache.table.holds != NONE).sum() == rig.cache.table.n_published == refill.n_published
    rig.cache.audit()


def test_an_expert_that_decode_kept_in_the_meantime_gives_its_slot_up(rig):
    """Its slot goes to the next wish: more bytes move than had room at first, no more are published."""
    cache, table = rig.cache, rig.cache.table
    rig.refill([0, 0], [0, 2])  # one slot is free
    refill = Refill(cache, np.array([(0, 7), (1, 1), (1, 2), (0, 9)]), batch_bytes=1)
    assert refill.poll() == 0
    assert table.slot_of[0, 7] == NONE
    spare = int(table.spares[0, 0, 0])
    table.fill(0, spare, 7)
    cache.fetch(0, 7, cache.slot_bytes(0, spare))
    rig.device.synchronize()
    table.keep(0, 0, 0, victims=2)
    finish(refill)
    assert set(np.flatnonzero(table.is_published()[0])) == {0, 7, 9}
    assert set(np.flatnonzero(table.is_published()[1])) == {1, 2}
    assert refill.planned_bytes == 3 * rig.layers[0].expert_bytes
    assert refill.moved_bytes == 4 * rig.layers[0].expert_bytes
    assert refill.moved_bytes - refill.dropped_bytes == refill.planned_bytes
    cache.audit()
