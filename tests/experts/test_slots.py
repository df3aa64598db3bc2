"""The slot table against a dictionary model: one expert in at most one slot, whatever happens."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from makeway.errors import EngineFailed
from makeway.experts.slots import NONE, SlotTable


def table(n_layers: int = 2, n_experts: int = 8, *, n_slots: int = 4, n_spares_per_set: int = 1) -> SlotTable:
    return SlotTable(n_layers, n_experts, n_slots=n_slots, n_spares_per_set=n_spares_per_set)


def put(slots: SlotTable, layer: int, pairs: dict[int, int]) -> None:
    """Fill and publish slot -> expert."""
    layers = [layer] * len(pairs)
    slots.fill(layers, list(pairs), list(pairs.values()))
    slots.publish(layers, list(pairs))


def test_filled_is_not_published():
    made = table()
    made.fill([0], [2], [5])
    assert made.slot_of[0, 5] == NONE
    assert made.holds[0, 2] == 5
    made.publish([0], [2])
    assert made.slot_of[0, 5] == 2
    assert made.n_published == 1
    assert made.is_published().sum() == 1
    assert made.unpublish([0], [2]).tolist() == [5]
    assert made.holds[0, 2] == NONE, "a free slot holds nothing"
    made.audit_all()


def test_epochs_grow_when_a_slot_changes_its_bytes():
    made = table()
    before = made.epochs.copy()
    made.fill([1], [0], [3])
    assert (made.epochs - before).sum() == 1
    at = made.epoch
    made.publish([1], [0])
    assert made.epoch == at + 1
    made.lend(0)
    assert made.epochs[1, 0] == before[1, 0] + 2
    assert made.epoch == at + 2


@pytest.mark.parametrize(
    "wrong",
    [
        lambda t: t.publish([0], [3]),  # empty
        lambda t: t.publish([0], [0]),  # published already
        lambda t: t.publish([0], [4]),  # a spare
        lambda t: t.fill([0], [0], [6]),  # over a published slot
        lambda t: t.fill([0], [1], [8]),  # no such expert
        lambda t: t.fill([0], [6], [1]),  # no such slot
        lambda t: t.fill([2], [1], [1]),  # no such layer
        lambda t: t.fill([0, 0], [1, 1], [2, 3]),  # one slot twice
        lambda t: t.fill([0], [1], [2, 3]),  # counts differ
        lambda t: t.publish([0, 0], [1]),  # counts differ
        lambda t: t.unpublish([0], [1]),  # not published
        lambda t: t.keep(0, [0], [0], victims=[7]),  # the spare is empty
        lambda t: t.keep(1, [0], [1], victims=[0]),  # no such spare
        lambda t: t.keep(2, [0], [0], victims=[0]),  # no such set
        lambda t: t.lend(7),
        lambda t: t.lend(-1),
    ],
)
def test_a_broken_invariant_is_an_error_and_changes_nothing(wrong):
    made = table()
    put(made, 0, {0: 7})
    before = (made.slot_of.copy(), made.expert_of.copy(), made.holds.copy(), made.spares.copy(), made.epoch)
    with pytest.raises(EngineFailed, match="slot table"):
        wrong(made)
    after = (made.slot_of, made.expert_of, made.holds, made.spares, made.epoch)
    assert all(np.array_equal(a, b) for a, b in zip(before, after, strict=True))
    made.audit_all()


def test_the_same_expert_is_never_in_two_slots():
    made = table()
    put(made, 0, {0: 7})
    made.fill([0], [1], [7])
    with pytest.raises(EngineFailed, match="another slot"):
        made.publish([0], [1])
    made.fill([0, 0], [2, 3], [5, 5])
    with pytest.raises(EngineFailed, match="twice"):
        made.publish([0, 0], [2, 3])
    put(made, 1, {0: 7})  # another layer is another expert


def test_keep_swaps_spare_and_victim_without_moving_bytes():
    made = table()
    put(made, 0, {0: 1, 1: 2, 2: 3, 3: 4})
    made.fill([0], [made.spares[1, 0, 0]], [6])
    kept = made.keep(1, [0], [0], victims=[2])
    assert kept.tolist() == [5]
    assert made.slot_of[0, 6] == 5
    assert made.slot_of[0, 2] == NONE
    assert made.spares[1, 0, 0] == 1, "the victim's slot is the spare now"
    assert made.n_published == 4
    made.audit_all()


def test_keep_into_free_slots_takes_different_ones():
    made = table(n_spares_per_set=2)
    put(made, 0, {0: 1})
    spares = made.spares[0, 0]
    made.fill([0, 0], spares, [5, 6])
    made.keep(0, [0, 0], [0, 1], victims=[-1, -1])
    assert made.n_published == 3
    assert made.n_free().tolist() == [1, 4]
    made.audit_all()
    made.fill([0, 0], made.spares[0, 0], [3, 4])
    with pytest.raises(EngineFailed, match="no free slot"):
        made.keep(0, [0, 0], [0, 1], victims=[-1, -1])
    made.audit_all()


def test_lending_takes_the_tail_of_every_layer_in_one_call():
    made = table()
    put(made, 0, {0: 1, 2: 3, 3: 4})
    put(made, 1, {1: 5, 3: 0})
    lent = made.lend(2)
    assert list(zip(lent.layers, lent.slots, lent.experts, strict=True)) == [(0, 2, 3), (0, 3, 4), (1, 3, 0)]
    assert made.n_published == 2
    for refused in (lambda: made.fill([0], [2], [3]), lambda: made.keep(0, [0], [0], victims=[1])):
        with pytest.raises(EngineFailed, match="lent"):
            refused()
    made.audit_all()
    made.take_back()
    assert (made.holds[:, 2:] == NONE).all()
    assert made.n_free().tolist() == [3, 3]
    made.audit_all()


def test_assign_gives_the_wish_list_free_slots_hottest_first():
    made = table()
    put(made, 0, {1: 7})
    slots = made.assign([0, 1, 0, 0, 0, 0, 0], [7, 2, 3, 3, 4, 5, 6])
    assert slots.tolist() == [-1, 0, 0, -1, 2, 3, -1]
    assert made.n_published == 1, "assign changes nothing"


def test_no_slots_means_no_spares():
    made = table(n_slots=0, n_spares_per_set=2)
    assert (made.n_ranks, made.spares.size) == (0, 0)
    lent = made.lend(0)
    made.take_back()
    assert lent.layers.size == 0
    assert made.assign([0], [0]).tolist() == [-1]
    assert made.keep(0, [], [], victims=[]).size == 0
    made.audit_all()
    with pytest.raises(ValueError, match="layers"):
        table(n_slots=-1)


@given(st.integers(0, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_moves_leave_the_hottest_experts_in_the_kept_part(n_kept, seed):
    random = np.random.default_rng(seed)
    made = table(3, 9, n_slots=4, n_spares_per_set=1)
    for layer in range(3):
        n = int(random.integers(0, 5))
        put(made, layer, dict(zip(random.permutation(4)[:n].tolist(), random.permutation(9)[:n].tolist(), strict=True)))
        spare = made.spares[0, layer, 0]
        if n and random.random() < 0.7:
            victim = made.expert_of[layer][made.expert_of[layer] != NONE][0]
            new = int(np.flatnonzero(made.slot_of[layer] == NONE)[0])
            made.fill([layer], [spare], [new])
            made.keep(0, [layer], [0], victims=[victim])
    heat = random.random((3, 9))
    published = [set(made.expert_of[layer][made.expert_of[layer] != NONE].tolist()) for layer in range(3)]
    moves = made.moves_before_lending(n_kept, heat)
    assert all(moves.sources >= n_kept)
    assert all(moves.targets < n_kept)
    made.unpublish_targets(moves)
    made.publish(moves.layers, moves.targets)
    made.audit_all()
    made.lend(n_kept)
    made.audit_all()
    for layer in range(3):
        room = int((~made.is_spare[layer, :n_kept]).sum())
        best = sorted(published[layer], key=lambda expert: -heat[layer, expert])[:room]
        left = made.expert_of[layer]
        assert set(left[left != NONE].tolist()) == set(best)


@pytest.mark.parametrize("field", ["slot_of", "expert_of", "holds", "is_spare", "n_published", "n_owned"])
def test_the_audit_sees_every_kind_of_damage(field):
    made = table()
    put(made, 0, {0: 1, 1: 2})
    if field == "n_published":
        made.n_published = 99
        with pytest.raises(EngineFailed):
            made.audit()
    elif field == "n_owned":
        made.n_owned = 1
    elif field == "is_spare":
        made.is_spare[0, 1] = True
    else:
        getattr(made, field)[0, 1] = 5
    with pytest.raises(EngineFailed):
        made.audit_all()


class TableMachine(RuleBasedStateMachine):
    """Random fills, keeps, lending and restores beside a plain dictionary."""

    @initialize(n_slots=st.integers(0, 5), n_spares=st.integers(0, 2))
    def start(self, n_slots, n_spares):
        self.made = table(2, 7, n_slots=n_slots, n_spares_per_set=n_spares)
        self.model: dict[tuple[int, int], int] = {}  # (layer, expert) -> slot
        self.lent = False

    @rule(layer=st.integers(0, 1), expert=st.integers(0, 6))
    def restore_one(self, layer, expert):
        (slot,) = self.made.assign([layer], [expert]).tolist()
        if slot >= 0:
            assert (layer, slot) not in {(la, s) for (la, _), s in self.model.items()}
            put(self.made, layer, {slot: expert})
            self.model[layer, expert] = slot
        else:
            assert (layer, expert) in self.model or self.made.n_free()[layer] == 0

    @precondition(lambda self: not self.lent)
    @rule(spare_set=st.integers(0, 1), layer=st.integers(0, 1), expert=st.integers(0, 6), pick=st.integers(0, 6))
    def keep_one(self, spare_set, layer, expert, pick):
        if self.made.n_spares_per_set == 0 or (layer, expert) in self.model:
            return
        self.made.fill([layer], [self.made.spares[spare_set, layer, 0]], [expert])
        mine = [e for (la, e) in self.model if la == layer]
        if self.made.n_free()[layer]:
            victim = -1
        else:
            victim = mine[pick % len(mine)]
            del self.model[layer, victim]
        (slot,) = self.made.keep(spare_set, [layer], [0], victims=[victim]).tolist()
        self.model[layer, expert] = slot

    @rule(n_kept=st.integers(0, 9))
    def lend(self, n_kept):
        n_kept = min(n_kept, self.made.n_owned)
        lent = self.made.lend(n_kept)
        gone = {(la, e): s for (la, e), s in self.model.items() if s >= n_kept}
        found = zip(lent.layers.tolist(), lent.experts.tolist(), lent.slots.tolist(), strict=True)
        assert gone == {(la, e): s for la, e, s in found}
        self.model = {key: slot for key, slot in self.model.items() if slot < n_kept}
        self.lent = n_kept < self.made.n_ranks

    @rule()
    def take_back(self):
        self.made.take_back()
        self.lent = False

    @invariant()
    def agrees(self):
        if not hasattr(self, "made"):
            return
        self.made.audit_all()
        layers, experts = np.nonzero(self.made.slot_of != NONE)
        found = {(int(a), int(b)): int(self.made.slot_of[a, b]) for a, b in zip(layers, experts, strict=True)}
        assert found == self.model


TableMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestTableMachine = TableMachine.TestCase


def test_a_model_of_one_layer_keeps_spares_too():
    made = SlotTable(1, 8, n_slots=2, n_spares_per_set=1)
    made.fill([0], [2], [5])
    made.keep(0, [0], [0], victims=[NONE])
    assert made.slot_of[0, 5] == 2
    made.audit_all()
