"""NVRTC compiles for GPUs that are not here, tells what a kernel needs, and is not asked twice."""

import importlib.util
import struct
import sys
from pathlib import Path

import pytest

from makeway.errors import EngineFailed, UserError
from makeway.kernels.cuda import compiler
from makeway.kernels.cuda.compiler import Module, Resources, parse_resources, read_sources

SELFTEST = Path(__file__).parent / "selftest.cu"
needs_nvrtc = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")


@needs_nvrtc
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
def test_kernels_compile_and_tell_what_they_need(arch, tmp_path):
    names = ["product_kernel", "sum_kernel<64>", "sum_kernel<128>"]
    module = Module.compile([SELFTEST], names, arch, cache_folder=tmp_path)
    assert list(module.resources) == names
    for needs in module.resources.values():
        assert 8 <= needs.registers <= 64
        assert (needs.shared_bytes, needs.stack_bytes, needs.spill_bytes) == (0, 0, 0)
    code = module._binary.code
    assert code[:4] == b"\x7fELF"
    assert struct.unpack_from("<H", code, 18) == (190,)  # EM_CUDA


@needs_nvrtc
def test_what_was_compiled_is_kept(tmp_path, monkeypatch):
    first = Module.compile([SELFTEST], ["product_kernel"], "sm_86", cache_folder=tmp_path)
    monkeypatch.setattr(compiler, "_compile", None)  # not needed any more
    again = Module.compile([SELFTEST], ["product_kernel"], "sm_86", cache_folder=tmp_path)
    assert again._binary == first._binary


@needs_nvrtc
def test_what_differs_is_compiled_anew(tmp_path):
    source = tmp_path / "one.cu"
    (tmp_path / "part.cuh").write_text("__device__ int part() { return 1; }\n")
    source.write_text('#include "lanes.cuh"\n#include "part.cuh"\nKERNEL(32) one(int* x) { *x = part() + ADDED; }\n')
    kept = tmp_path / "kept"

    def code(n=1, **options):
        return Module.compile(
            [source], ["one"], "sm_86", defines={"ADDED": n}, cache_folder=kept, **options
        )._binary.code

    codes = {code(), code(n=2)}
    (tmp_path / "part.cuh").write_text("__device__ int part() { return 5; }\n")
    codes.add(code())
    assert len(codes) == 3
    assert len(list(kept.iterdir())) == 3
    code(fast_math=True)
    assert len(list(kept.iterdir())) == 4


@needs_nvrtc
def test_an_error_shows_the_log(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong() { no_such_thing(); }\n")
    with pytest.raises(EngineFailed, match=r"(?s)wrong do not compile.*wrong.cu.*no_such_thing"):
        Module.compile([source], ["wrong"], "sm_86", cache_folder=tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


def test_without_the_bindings_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(UserError, match=r"makeway\[gpu\]"):
        Module.compile([SELFTEST], ["product_kernel"], "sm_86")


def test_sources_are_found_with_what_they_include(tmp_path):
    (tmp_path / "a.cu").write_text('#include "b.cuh"\n#include "lanes.cuh"\n')
    (tmp_path / "b.cuh").write_text('  #  include "lanes.cuh"\n')
    assert set(read_sources([tmp_path / "a.cu"])) == {"a.cu", "b.cuh", "lanes.cuh"}


def test_resources_are_read_from_the_log():
    log = """ptxas info    : Compiling entry function '_Z1aPf' for 'sm_86'
ptxas info    : Function properties for _Z1aPf
ptxas         .     40 bytes stack frame, 36 bytes spill stores, 44 bytes spill loads
ptxas info    : Used 168 registers, used 1 barriers, 40 bytes cumulative stack size, 512 bytes smem, 384 bytes cmem[0]
ptxas info    : Compiling entry function '_Z1bv' for 'sm_86'
ptxas info    : Used 8 registers"""
    assert parse_resources(log) == {"_Z1aPf": Resources(168, 512, 40, 80), "_Z1bv": Resources(8, 0, 0, 0)}
