"""A quick launch passes what Triton would, to the binary that Triton would take."""

import runpy
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from triton import knobs
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime import jit
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from makeway.kernels.triton import quick as module
from makeway.kernels.triton.ahead import compiling_ahead
from makeway.kernels.triton.quick import Quick, kind_of, quick
from tests.conftest import ROOT


def kernel(x, n, scale, out, BLOCK: tl.constexpr, FAST: tl.constexpr):
    pass


@pytest.fixture
def launches(monkeypatch):
    """What Triton was asked for, and what its binaries were given; a GPU's stream stands in."""
    found = SimpleNamespace(asked=[], ran=[], compiled=[], ready=True)
    monkeypatch.setattr(module, "_place", lambda: (0, 77))

    def run(self, *arguments, grid, warmup, **constants):
        (found.compiled if warmup else found.asked).append((grid, arguments, constants))
        compiled = SimpleNamespace(function=len(found.asked) if found.ready else None, packed_metadata=(4, 1, 0))
        compiled.run = lambda *what: found.ran.append(what)
        return compiled

    monkeypatch.setattr(JITFunction, "run", run)
    return found


def made():
    return Quick(JITFunction(kernel))


def test_the_second_launch_of_a_kind_goes_straight_to_the_binary(launches):
    quick_kernel, x, out = made(), torch.zeros(64), torch.zeros(8)
    for n in (32, 48):
        quick_kernel[(3, n)](x, n, 0.5, out, FAST=True, BLOCK=128, num_warps=8)
    assert launches.asked == [((3, 32), (x, 32, 0.5, out), {"FAST": True, "BLOCK": 128, "num_warps": 8})]
    assert launches.ran == [(3, 48, 1, 77, 1, (4, 1, 0), None, None, None, x, 48, 0.5, out, 128, True)]


def test_another_kind_is_triton_s_own_launch(launches):
    quick_kernel, x = made(), torch.zeros(64)
    kinds = [(x, 32), (x, 1), (x, 33), (x, 1 << 40), (x[1:], 32), (x.half(), 32)]
    for _ in range(2):
        for first, n in kinds:
            quick_kernel[(1,)](first, n, 1.0, x, BLOCK=16, FAST=False)
        quick_kernel[(1,)](x, 32, 1.0, x, BLOCK=32, FAST=False)
        quick_kernel[(1,)](x, 32, 1.0, x, BLOCK=16, FAST=False, num_warps=8)
    assert len(launches.asked) == len(launches.ran) == 8
    assert [what[4] for what in launches.ran] == list(range(1, 9))


def test_a_kernel_that_is_still_being_compiled_is_asked_for_again(launches):
    quick_kernel, x = made(), torch.zeros(16)
    launches.ready = False
    for _ in range(2):
        quick_kernel[(1,)](x, 16, 1.0, x, BLOCK=16, FAST=False)
    assert len(launches.asked) == 2


def test_nothing_runs_while_kernels_are_compiled_ahead_not_even_what_is_known(launches):
    quick_kernel, x = made(), torch.zeros(16)
    quick_kernel[(1,)](x, 16, 1.0, x, BLOCK=16, FAST=False)
    with compiling_ahead():
        for fast in (False, True):
            quick_kernel[(1,)](x, 16, 1.0, x, BLOCK=16, FAST=fast)
    assert len(launches.asked) == 1
    assert not launches.ran
    assert [constants["FAST"] for _, _, constants in launches.compiled] == [False, True]


@pytest.mark.parametrize("name", ["fetch", "guess", "step_plan"])
def test_nothing_that_copies_experts_runs_while_kernels_are_compiled_ahead(name, monkeypatch):
    """Where the kernel that finds the list or the plan is not compiled yet, an earlier step's would be copied again: a
    layer's experts into slots of another, which may be published since."""
    monkeypatch.setattr(knobs.runtime, "interpret", False)
    names = runpy.run_path(str(ROOT / "src" / "makeway" / "kernels" / "triton" / f"{name}.py"))
    kernels = {name: kernel for name, kernel in names.items() if name.endswith("_kernel")}
    assert kernels
    assert {name for name, kernel in kernels.items() if not isinstance(kernel, Quick)} == set()


def test_what_varies_is_not_taken_for_a_constant(launches):
    x = torch.zeros(16)
    with pytest.raises(AssertionError, match="what varies goes by place"):
        made()[(1,)](x, 16, 1.0, out=x, BLOCK=16, FAST=False)


def test_a_profiler_sees_every_launch(launches, monkeypatch):
    quick_kernel, x = made(), torch.zeros(16)
    monkeypatch.setattr(knobs.runtime.launch_enter_hook, "calls", [print])
    for _ in range(2):
        quick_kernel[(1,)](x, 16, 1.0, x, BLOCK=16, FAST=False)
    assert len(launches.asked) == 2


def test_the_interpreter_launches_as_it_does():
    assert quick(kernel) is kernel


BASE = torch.zeros(4096, dtype=torch.uint8)
integers = st.one_of(st.sampled_from([0, 1, 16, 2**31 - 1, 2**31, -(2**31), 2**63 - 1]), st.integers(-40, 40))
tensors = st.builds(
    lambda kind, at: BASE[at * 2 :][: 64 * 8].view(torch.uint8)[: 64 * kind.itemsize].view(kind),
    st.sampled_from([torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8]),
    st.integers(0, 64).map(lambda i: 2 * i),
)
descriptors = st.builds(
    lambda block: TensorDescriptor(torch.zeros((64, 64)), [64, 64], [64, 1], block),
    st.sampled_from([[16, 16], [16, 32], [64, 64]]),
)


@given(st.lists(st.one_of(integers, st.booleans(), st.floats(), tensors, descriptors), min_size=2, max_size=12))
@settings(max_examples=200, deadline=None)
def test_kinds_are_as_fine_as_triton_s(arguments):
    seen = {}
    for argument in arguments:
        triton_s = jit.native_specialize_impl(CUDABackend, argument, False, True, True)
        assert seen.setdefault(kind_of(argument), triton_s) == triton_s, argument
