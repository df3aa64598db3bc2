"""Runs kernels in CUDA C++ on the CPU: g++ compiles them with an emulated lanes.cuh, a fiber for each thread.

Owns the builds (kept in the temporary folder by what they are made from) and the passing of arguments; never judges
numbers.
Hazard: blocks run one after the other, so a kernel that waits for a later block never ends.
"""

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from makeway.kernels.cuda.compiler import read_sources

EMULATED = Path(__file__).parent / "emulated"
CHECKS = ["alignment", "bounds", "shift-exponent"]  # reported by emulate.cpp; no library of the compiler's
FLAGS = ["-O0", "-std=c++17", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off", "-Wno-unknown-pragmas"]
FLAGS += [f"-fsanitize={','.join(CHECKS)}"]
GUARD_BYTES = 256  # before and after each array
GUARD = 0xA5
TYPES = {"p": ctypes.c_void_p, "i": ctypes.c_int32, "l": ctypes.c_int64, "f": ctypes.c_float}


class EmulationError(Exception):
    """The kernel did something that a GPU would not forgive, or not do."""


class _Launch(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_int32 * 3),
        ("n_threads", ctypes.c_int32),
        ("shared_bytes", ctypes.c_int32),
        ("reverse", ctypes.c_int32),
        ("overlaps", ctypes.c_int32),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    ]


class Program:
    """Source files compiled for some kernels, by their C++ names; `run` launches one."""

    def __init__(self, source_files, names):
        self._numbers = {name: number for number, name in enumerate(names)}
        self._library = ctypes.CDLL(str(_built(tuple(source_files), tuple(names))))

    def signature(self, name):
        """The letters of its parameters, as `Kernel` of launch.py wants them."""
        function = getattr(self._library, f"signature_{self._numbers[name]}")
        function.restype = ctypes.c_char_p
        return function().decode()

    def kernel(self, name, parameters, *, reverse=False):
        """What `Module.kernel` gives, for the CPU."""
        assert parameters == self.signature(name), f"{name} takes {self.signature(name)}, not {parameters}"
        return EmulatedKernel(self, name, reverse=reverse)

    def run(self, name, grid, threads, shared_bytes, arguments, *, reverse=False, overlaps=False):
        """Runs the kernel to its end; writes into the contiguous arrays (numpy, or torch on the CPU) among `arguments`.

        Other arguments are ints and floats. `reverse`: blocks, warps and lanes take their turns from the last to the
        first, which shows races that the usual order hides. `overlaps`: every thread must call
        wait_for_previous() once. Raises EmulationError with the block and thread where it went wrong.
        """
        assert threads % 32 == 0
        assert 0 < threads <= 1024
        letters = self.signature(name)
        assert len(letters) == len(arguments), f"{name} takes {len(letters)} arguments, not {len(arguments)}"
        arrays = [_Guarded(a) for a in arguments if isinstance(a, np.ndarray | torch.Tensor)]
        _check_apart(arrays)
        waiting = iter(arrays)
        values = []
        for letter, argument in zip(letters, arguments, strict=True):
            is_array = isinstance(argument, np.ndarray | torch.Tensor)
            assert (letter == "f") == isinstance(argument, float), f"{argument!r} for {letter!r} in {letters} of {name}"
            assert letter == "p" or not is_array, f"an array for {letter!r} in {letters} of {name}"
            value = TYPES[letter](next(waiting).address if is_array else argument)
            assert letter != "i" or value.value == argument, f"{argument} is not an i32"
            values.append(value)
        pointers = (ctypes.c_void_p * max(1, len(values)))(*[ctypes.addressof(value) for value in values])
        launch = _Launch(tuple(grid), threads, shared_bytes, int(reverse), int(overlaps), pointers)
        run = getattr(self._library, f"run_{self._numbers[name]}")
        run.restype = ctypes.c_char_p
        error = run(ctypes.byref(launch))
        if error is not None:
            raise EmulationError(f"{name}: {error.decode()}")
        for array in arrays:
            array.copy_back(name)


class EmulatedKernel:
    """Stands in for `Kernel` of launch.py."""

    def __init__(self, program, name, *, reverse):
        self.name = name
        self._program, self._reverse = program, reverse

    def launch(self, grid, threads, shared_bytes, arguments, *, overlaps_previous=False):
        options = {"reverse": self._reverse, "overlaps": overlaps_previous}
        self._program.run(self.name, grid, threads, shared_bytes, arguments, **options)


def run(source, name, grid, threads, shared_bytes, arguments, *, reverse=False):
    """`Program.run` for one kernel of one file."""
    _program(Path(source), name).run(name, grid, threads, shared_bytes, arguments, reverse=reverse)


@lru_cache(maxsize=64)
def _program(source, name):
    return Program([source], [name])


class _Guarded:
    """A copy of an array between guard bytes, so that a write beside it is seen and a read beside it gives nonsense."""

    def __init__(self, array):
        if isinstance(array, torch.Tensor):
            assert array.device.type == "cpu"
            assert array.is_contiguous()
            array = array.detach().reshape(-1).view(torch.uint8).numpy()
        assert array.flags.c_contiguous
        self.place = array.ctypes.data
        self.array = array.reshape(-1).view(np.uint8)
        self.memory = np.full(self.array.size + 2 * GUARD_BYTES + 16, GUARD, np.uint8)
        self.start = GUARD_BYTES + (self.place - self.memory.ctypes.data) % 16  # aligned just as the array is
        self.memory[self.start : self.start + self.array.size] = self.array
        self.address = self.memory.ctypes.data + self.start

    def copy_back(self, name):
        inside = slice(self.start, self.start + self.array.size)
        outside = np.ones(self.memory.size, bool)
        outside[inside] = False
        wrong = np.flatnonzero(outside & (self.memory != GUARD)) - self.start
        if wrong.size:
            raise EmulationError(f"{name} wrote at byte {wrong[0]} of an array of {self.array.size} bytes")
        if self.array.flags.writeable:
            self.array[:] = self.memory[inside]


def _check_apart(arrays):
    spans = sorted((array.place, array.place + array.array.size) for array in arrays if array.array.size)
    for (_, end), (start, _) in pairwise(spans):
        assert end <= start, "two arguments share memory; pass one of them, and offsets"


def _built(source_files, names):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("kernels in CUDA C++ are emulated with g++, which is not installed")
    files = read_sources(source_files) | {path.name: path.read_text() for path in EMULATED.iterdir()}
    program = '#include "lanes.cuh"\n' + "".join(f'#include "{path.name}"\n' for path in source_files)
    program += "".join(f"ENTRY({number}, {name})\n" for number, name in enumerate(names))
    key = hashlib.sha256(repr((sorted(files.items()), program, FLAGS)).encode()).hexdigest()[:32]
    folder = Path(tempfile.gettempdir()) / f"makeway-emulated-{os.getuid()}"
    library = folder / f"{key}.so"
    if not library.exists():
        folder.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as place:
            _compile(compiler, Path(place), files, program=program)
            (Path(place) / "program.so").replace(library)
    return library


def _compile(compiler, place, files, *, program):
    """All files in one folder, the emulated lanes.cuh among them in the place of the real one."""
    for name, text in files.items():
        (place / name).write_text(text)
    (place / "program.cpp").write_text(program + '#include "emulate.cpp"\n')
    commands = [
        [compiler, *FLAGS, "-x", "c++", "-c", "program.cpp", "-o", "program.o"],
        [compiler, "-shared", "program.o", "-o", "program.so"],  # apart: -fsanitize would link its library
    ]
    for command in commands:
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[:6000]
