"""A closed engine whose kernels are Triton's holds no memory, as in tests/engine/test_close.py. Kernels do nothing here
and new memory is zero: only who holds what matters."""

import pytest
import torch

from makeway import EngineFailed
from makeway.device import CpuDevice
from tests.devices import FlakyDevice
from tests.engine.test_close import (
    ENDS,
    FAULTS,
    PATHS,
    check_nothing_is_held,
    no_garbage_collector,
    open_engine,
)

pytest.importorskip("triton")
from triton.runtime.interpreter import GridExecutor

from makeway.engine import graphs
from makeway.engine.backend import TritonBackend

__all__ = ["no_garbage_collector"]


@pytest.fixture
def _kernels_do_nothing(monkeypatch, device):
    if device.type != "cpu":
        pytest.skip("bench/gpu_check.py opens one engine after the other on a GPU")
    monkeypatch.setattr(GridExecutor, "__call__", lambda self, *_, **__: None)
    monkeypatch.setattr(torch, "empty", torch.zeros)
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", torch.Tensor.new_zeros)


def check(name, end, device):
    free = device.free_bytes()
    engine = open_engine(name, device=device, backend=TritonBackend(device))
    assert isinstance(engine.memory.graphs, graphs.StepGraphs)
    engine.memory.arena.whole.zero_()
    left = end(engine)
    check_nothing_is_held(engine, device, free)
    del left


@pytest.mark.parametrize("end", ENDS, ids=lambda end: end.__name__)
@pytest.mark.parametrize("name", PATHS)
@pytest.mark.usefixtures("no_garbage_collector", "_kernels_do_nothing")
def test_a_closed_engine_holds_nothing(name, end):
    check(name, end, CpuDevice())


@pytest.mark.parametrize("end", FAULTS, ids=lambda end: end.__name__)
@pytest.mark.usefixtures("no_garbage_collector", "_kernels_do_nothing")
def test_an_engine_that_failed_holds_nothing(end):
    check("drafts", end, FlakyDevice())


@pytest.mark.usefixtures("no_garbage_collector", "_kernels_do_nothing")
def test_an_engine_whose_passes_cannot_be_captured_holds_nothing(monkeypatch):
    device = CpuDevice()
    free = device.free_bytes()

    def fails(self, compute, device, **options):
        compute()
        raise EngineFailed("does not compile")

    monkeypatch.setattr(graphs._Captured, "__init__", fails)
    with pytest.raises(EngineFailed, match="does not compile"):
        open_engine("drafts", device=device, backend=TritonBackend(device))
    assert device.free_bytes() == free
