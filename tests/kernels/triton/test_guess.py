import numpy as np
import pytest
import torch

from makeway.experts.guess import TRY_EVERY, Limits
from makeway.kernels.triton import fetch, step_plan
from makeway.kernels.triton.fetch import FETCH_PROGRAMS, Source, fetch_guesses
from makeway.kernels.triton.guess import Guesses, guess_step
from makeway.kernels.triton.step_buffers import Report, Rooms, StepBuffers
from makeway.kernels.triton.step_plan import plan_and_fetch, plan_step

STRIDE = 1 << 12
SLOTS, TRANSIENT, GUESSED = 0, 8 * STRIDE, 32 * STRIDE


def ints(values, device, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype, device=device)


def guess(ids, device, *, limit, n=4, live=None, wanted=(0,) * 8, earlier=None):
    """Experts 4 and 7 are in slots 1 and 0; spares are slots 2 and 3."""
    guesses, told = Guesses.empty(n, device), ints([9] * n, device)
    guesses.arrived.fill_(1)  # of two layers before
    guess_step(
        guesses,
        ints(ids, device, torch.int64),
        slot_of=ints([-1, -1, -1, -1, 1, -1, -1, 0], device),
        wanted=ints(wanted, device, torch.uint8),
        spares=ints([2, 3], device),
        limit=ints([limit], device),
        told=told,
        slots=(SLOTS, STRIDE),
        rooms=(GUESSED, STRIDE),
        live=None if live is None else ints(live, device),
        earlier=earlier,
    )
    assert torch.equal(told, guesses.experts)
    assert not guesses.arrived.any()
    return guesses


def test_the_likeliest_misses_are_guessed_each_once(device):
    guesses = guess([[4, 6, 1], [6, 3, 7]], device, limit=4)
    assert guesses.experts.tolist() == [6, 3, 1, -1], "by rank, then by row; 4 and 7 are in slots"
    assert guesses.offsets[:3].tolist() == [GUESSED, GUESSED + STRIDE, GUESSED + 2 * STRIDE]
    assert guesses.spares.tolist() == [-1] * 4


def test_as_many_as_the_layer_may_and_none_for_padding(device):
    assert guess([[0, 6, 1], [5, 3, 2]], device, limit=2).experts.tolist() == [0, 5, -1, -1]
    assert guess([[0, 6, 1], [5, 3, 2]], device, limit=0).experts.tolist() == [-1] * 4
    assert guess([[0, 6, 1], [5, 3, 2]], device, limit=9).experts.tolist() == [0, 5, 6, 3]
    assert guess([[0, 6, -1], [5, 3, 2]], device, limit=4, live=[0, -1]).experts.tolist() == [0, 6, -1, -1]


def test_wanted_guesses_take_spares_while_there_are_any(device):
    guesses = guess([[0, 6, 1, 2]], device, limit=4, wanted=(1, 1, 1, 1, 1, 1, 0, 1))
    assert guesses.experts.tolist() == [0, 6, 1, 2]
    assert guesses.spares.tolist() == [0, -1, 1, -1]
    assert guesses.offsets.tolist() == [2 * STRIDE, GUESSED + STRIDE, 3 * STRIDE, GUESSED + 3 * STRIDE]


def test_a_later_round_guesses_what_is_new(device):
    wanted = (1, 0, 0, 0, 0, 1, 0, 1)
    earlier = guess([[0, 6]], device, limit=4, wanted=wanted)
    assert earlier.spares.tolist() == [0, -1, -1, -1]
    guesses = guess([[6, 5, 0, 2]], device, limit=4, wanted=wanted, earlier=earlier)
    assert guesses.experts.tolist() == [5, 2, -1, -1]
    assert guesses.spares.tolist() == [1, -1, -1, -1]
    assert guesses.offsets[:2].tolist() == [3 * STRIDE, GUESSED + STRIDE]


def plan(ids, guesses, device, *, wanted=(0,) * 8):
    buffers = StepBuffers(device, n=len(ids), top_k=len(ids[0]), hidden=32, width=32)
    report = Report(ints([0], device), ints([[9] * len(ids[0])] * len(ids), device), ints([9, 9], device))
    plan_step(
        buffers,
        ints(ids, device, torch.int64),
        routing=torch.ones(len(ids), len(ids[0]), device=device),
        slot_of=ints([-1, -1, -1, -1, 1, -1, -1, 0], device),
        wanted=ints(wanted, device, torch.uint8),
        spares=ints([2, 3], device),
        rooms=Rooms(slots_at=SLOTS, slot_stride=STRIDE, transient_at=TRANSIENT, transient_stride=STRIDE),
        report=report,
        guesses=guesses,
    )
    return buffers, report.fetched.tolist()


def test_the_plan_takes_what_was_guessed_right_and_fetches_the_rest(device):
    wanted = (1, 1, 0, 1, 0, 0, 0, 0)
    guesses = guess([[0, 6, 5]], device, limit=4, wanted=wanted)
    assert guesses.spares.tolist() == [0, -1, -1, -1]
    buffers, fetched = plan([[6, 1, 3, 4, 2]], guesses, device, wanted=wanted)
    assert buffers.experts.tolist() == [1, 2, 3, 4, 6]
    assert buffers.missing.tolist() == [1, 1, 1, 0, 2 + 1]
    assert buffers.offsets.tolist() == [
        SLOTS + 3 * STRIDE,  # the spare that no guess took
        TRANSIENT,
        TRANSIENT + STRIDE,  # wanted, and no spare is left
        SLOTS + STRIDE,
        GUESSED + STRIDE,
    ]
    assert fetched == [0, 1], "a wrong guess that was wanted is in its spare all the same"


def test_without_a_right_guess_the_plan_fetches_all(device):
    for guesses, n_taken in (
        (None, 0),
        (Guesses.empty(4, device), 0),
        (guess([[5, 5]], device, limit=4), 0),
        (guess([[5, 5]], device, limit=4, wanted=(1,) * 8), 1),
    ):
        buffers, fetched = plan([[6, 1], [4, 1]], guesses, device, wanted=(1,) * 8)
        assert buffers.missing[:3].tolist() == [1, 0, 1]
        assert buffers.offsets[0].item() == SLOTS + (2 + n_taken) * STRIDE
        assert fetched == ([1, 6] if n_taken == 0 else [5, 1])


@pytest.mark.parametrize("n_rows", [1, 6])
def test_a_guess_is_waited_for_or_copied_after_all(n_rows, device, monkeypatch):
    """With few ids in the plan itself, with many in a launch of its own. Rooms of what has arrived are not written."""
    for module in (step_plan, fetch):
        monkeypatch.setattr(module, "POLLS", 3)
    store = torch.arange(8 * STRIDE, dtype=torch.int64).to(torch.uint8).view(8, STRIDE) * 3
    arena = torch.zeros(64 * STRIDE, dtype=torch.uint8, device=device)
    if device.type == "cuda":
        store = store.pin_memory()
    source = Source(store, arena, STRIDE)
    guesses = guess([[0, 6, 5, 2]], device, limit=4)
    fetch_guesses([(source, guesses.experts, guesses.offsets, guesses.arrived)])
    assert guesses.arrived.tolist() == [[1] * FETCH_PROGRAMS] * 4
    rooms = [arena[GUESSED + g * STRIDE :][:STRIDE] for g in range(4)]
    for room, expert in zip(rooms, [0, 6, 5, 2], strict=True):
        assert torch.equal(room.cpu(), store[expert])
    arena.zero_()
    guesses.arrived[1, 0] = 0  # the first program's share, which is all of so small an expert, is not here
    ids = ints([[6, 3, 4, 5, 1, 7]] * n_rows, device, torch.int64)
    buffers = StepBuffers(device, n=n_rows, top_k=6, hidden=32, width=32)
    report = Report(ints([0], device), ints([[9] * 6] * n_rows, device), ints([9, 9], device))
    plan_and_fetch(
        buffers,
        ids,
        source=source,
        routing=torch.ones(n_rows, 6, device=device),
        slot_of=ints([-1, -1, -1, -1, 1, -1, -1, 0], device),
        wanted=ints([0] * 8, device, torch.uint8),
        spares=ints([2, 3], device),
        rooms=Rooms(slots_at=SLOTS, slot_stride=STRIDE, transient_at=TRANSIENT, transient_stride=STRIDE),
        report=report,
        guesses=guesses,
    )
    assert buffers.experts.tolist()[:6] == [1, 3, 4, 5, 6, 7]
    assert buffers.missing.tolist()[:6] == [1, 1, 0, 2 + 2, 2 + 1, 0]
    assert torch.equal(rooms[1].cpu(), store[6])
    assert not rooms[2].any(), "expert 5 has arrived"
    assert torch.equal(arena[TRANSIENT:][:STRIDE].cpu(), store[1])
    assert torch.equal(arena[TRANSIENT + STRIDE :][:STRIDE].cpu(), store[3])


def test_a_layer_that_is_mostly_wrong_stops_and_tries_again():
    limits = Limits(2, 4)
    values = limits.limits
    assert values.tolist() == [4, 4]
    made = np.array([4, 4])
    for _ in range(3):
        limits.observe(made, np.array([3, 1]))
    assert values.tolist() == [4, 0]
    seen = []
    for _ in range(2 * TRY_EVERY):
        limits.observe(np.where(values > 0, made, 0), np.array([0, 0]))
        seen.append(values[1])
    assert sum(v > 0 for v in seen) == 2, "one step in so many"
    for _ in range(200):
        limits.observe(np.where(values > 0, made, 0), np.where(values > 0, made, 0))
    assert values.tolist() == [4, 4], "right again, so guessing pays again"
