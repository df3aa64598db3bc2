"""Compiling one by one and ahead, with a module that compiles and loads nothing."""

import gc
import threading
import weakref
from pathlib import Path

import pytest

from makeway.errors import EngineFailed
from makeway.kernels.cuda import programs as of_programs
from makeway.kernels.cuda.programs import Programs

FILE = Path("some.cu")


class FakeKernel:
    def __init__(self, name, parameters):
        self.name, self.parameters, self.launched = name, parameters, []

    def launch(self, *arguments, overlaps_previous=False):
        self.launched.append(arguments)


class FakeModule:
    """Compiles what is not named "wrong"."""

    compiled, loaded, meeting = [], [], None

    def __init__(self, names):
        self.names = names

    @classmethod
    def compile(cls, files, names, arch):
        assert (files, arch) == ([FILE], "sm_90")
        if cls.meeting is not None:
            cls.meeting.wait(timeout=20)
        cls.compiled += names
        if "wrong" in names:
            raise EngineFailed("does not compile")
        return cls(names)

    def kernel(self, name, parameters):
        assert self.names == [name]
        assert threading.current_thread() is threading.main_thread(), "loaded by a thread without torch's context"
        self.loaded.append(name)
        return FakeKernel(name, parameters)


@pytest.fixture
def module(monkeypatch):
    class Module(FakeModule):
        compiled, loaded = [], []

    monkeypatch.setattr(of_programs, "Module", Module)
    monkeypatch.setattr(of_programs, "current_arch", lambda: "sm_90")
    return Module


def test_a_kernel_is_compiled_once(module):
    programs = Programs()
    one = programs.kernel(FILE, "one", "p")
    assert programs.kernel(FILE, "one", "p") is one
    assert programs.kernel(FILE, "two", "pi").parameters == "pi"
    assert module.compiled == ["one", "two"]


def test_ahead_all_are_compiled_at_once_and_none_runs(module, monkeypatch):
    monkeypatch.setattr(of_programs.os, "cpu_count", lambda: 3)
    programs = Programs()
    known = programs.kernel(FILE, "known", "i")
    module.meeting = threading.Barrier(3)  # three compile at the same time, or nothing goes on
    with programs.ahead():
        for _ in range(2):
            for name in ("one", "known", "two", "three"):
                programs.kernel(FILE, name, "p").launch((1, 1, 1), 32, 0, (), overlaps_previous=True)
    assert sorted(module.compiled) == ["known", "one", "three", "two"]
    assert sorted(module.loaded) == sorted(module.compiled)
    assert programs.kernel(FILE, "known", "i") is known
    assert known.launched == []
    kernel = programs.kernel(FILE, "two", "p")
    assert (kernel.name, kernel.parameters, kernel.launched) == ("two", "p", [])
    kernel.launch((1, 1, 1), 32, 0, (7,))
    assert kernel.launched == [((1, 1, 1), 32, 0, (7,))]
    assert len(module.compiled) == 4


def use_ahead(programs, *names, fault=None):
    with programs.ahead():
        for name in names:
            programs.kernel(FILE, name, "p").launch()
        if fault is not None:
            raise fault


class Memory:
    """What the caller's frame holds."""


def cannot_compile(programs):
    memory = Memory()
    with pytest.raises(EngineFailed, match="does not compile"):
        use_ahead(programs, "one", "wrong", "two")
    return weakref.ref(memory)


def test_a_fault_is_raised_at_the_end_and_holds_nobody(module):
    programs = Programs()
    gc.disable()
    try:
        assert cannot_compile(programs)() is None
    finally:
        gc.enable()
    assert sorted(module.compiled) == ["one", "two", "wrong"]
    with pytest.raises(EngineFailed, match="does not compile"):
        programs.kernel(FILE, "wrong", "p")
    assert programs.kernel(FILE, "one", "p").name == "one"


def test_a_fault_of_the_caller_leaves_nothing_behind(module):
    programs = Programs()
    with pytest.raises(KeyError):
        use_ahead(programs, "wrong", fault=KeyError())
    assert programs.kernel(FILE, "one", "p").name == "one"
    use_ahead(programs, "two")
    assert module.loaded == ["one", "two"]
