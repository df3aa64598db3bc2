"""A closed engine holds no memory, even while somebody holds the engine, and without help of the garbage collector: on
a GPU nothing would call it before the next engine asks for its arena."""

import gc
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest
import torch

from makeway import EngineFailed
from makeway.device import CpuDevice
from tests.devices import FlakyDevice, LazyDevice
from tests.engine import rig

PATHS = {"drafts": rig.QWEN35MOE, "n-grams": rig.QWEN4EXP, "plain": rig.QWEN3MOE}


@pytest.fixture
def no_garbage_collector():
    gc.disable()
    yield
    gc.enable()


def tensors_in(thing):
    """Every tensor that can be reached from it through objects, containers and closures."""
    found, seen, waiting = [], set(), [thing]
    while waiting:
        one = waiting.pop()
        if id(one) in seen or isinstance(one, type | ModuleType | BuiltinFunctionType):
            continue
        seen.add(id(one))
        if isinstance(one, torch.Tensor):
            found.append(one)
        elif isinstance(one, FunctionType):
            waiting += [*(one.__closure__ or ()), one.__defaults__]
        else:
            waiting += gc.get_referents(one)
    return found


def open_engine(name, *, device=None, backend=None, **config):
    drafts = {"drafter": "mtp", "draft_depth": 2} if name == "drafts" else {}
    settings = {"prefix_ram": 1 << 20, "slots": 3} | drafts | config
    return rig.open_engine(PATHS[name], device=device or CpuDevice(), backend=backend, **settings)


def answer_two(engine):
    """Two answers at once, with drafts where the model can, and the prompt of the second is known already."""
    for _ in range(2):
        engine.add(range(3, 70), rig.greedy(4))
        engine.add(range(5, 9), rig.greedy(6))
        events = rig.run(engine)
        assert not [e.text for e in events if e.kind == "error"]


def read_a_little(engine):
    request = engine.add(range(3, 40), rig.greedy(4))
    for _ in range(2):
        engine.step()
    return request


def cancel_a_prompt(engine):
    engine.cancel(read_a_little(engine))
    rig.run(engine)


def leave_an_answer(engine):
    """The iterator is neither exhausted nor closed."""
    events = engine.generate(range(3, 20), rig.greedy(9))
    while next(events).kind != "token":
        pass
    return events


def fail(engine):
    request = read_a_little(engine)
    engine.device.fail_at = engine.device.n_calls + 1
    events = rig.run(engine)
    assert [e.kind for e in events if e.request_id == request][-1] == "error"


def rebuild(engine):
    fail(engine)
    engine.rebuild()
    answer_two(engine)


def logits(engine):
    assert engine.logits(range(3, 40)).shape[0] == 37


ENDS = (answer_two, read_a_little, cancel_a_prompt, leave_an_answer, logits)
FAULTS = (fail, rebuild)


def check_nothing_is_held(engine, device, free):
    engine.close()
    assert device.free_bytes() == free, "somebody holds the arena"
    assert tensors_in(engine) == []


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.usefixtures("no_garbage_collector")
def test_a_closed_engine_holds_nothing(name, end):
    device = CpuDevice()
    free = device.free_bytes()
    engine = open_engine(name, device=device)
    assert device.free_bytes() < free
    assert len(tensors_in(engine)) > 40
    left = end(engine)
    check_nothing_is_held(engine, device, free)
    del left


@pytest.mark.parametrize("end", FAULTS, ids=lambda end: end.__name__)
@pytest.mark.usefixtures("no_garbage_collector")
def test_an_engine_that_failed_holds_nothing(end):
    device = FlakyDevice()
    free = device.free_bytes()
    engine = open_engine("drafts", device=device, handover="always")
    end(engine)
    check_nothing_is_held(engine, device, free)
    with pytest.raises(EngineFailed, match="after close"):
        _ = engine.memory.arena.whole


@pytest.mark.usefixtures("no_garbage_collector")
def test_copies_under_way_are_waited_for():
    device = LazyDevice()
    free = device.free_bytes()
    with rig.tight():
        engine = open_engine("plain", device=device, handover="always")
        engine.add(range(3, 40), rig.greedy(4))
        rig.run(engine, until=lambda events: any(e.kind == "token" for e in events))
    assert device._open, "no experts are on their way back"
    check_nothing_is_held(engine, device, free)
