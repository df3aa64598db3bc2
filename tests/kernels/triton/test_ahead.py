"""Compiling ahead, in a process of its own with a driver that has no GPU: the tests' own process interprets kernels."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")

SCRIPT = """
import gc, weakref
import pytest, torch, triton, triton.language as tl
from types import SimpleNamespace
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from makeway.kernels.triton.ahead import compiling_ahead
from makeway.kernels.triton.launch import begin

triton.runtime.driver.set_active(SimpleNamespace(
    get_current_device=lambda: 0, get_current_stream=lambda device: 0,
    get_current_target=lambda: GPUTarget("cuda", 90, 32),
    launcher_cls=lambda source, metadata: lambda *arguments: None,
    utils=SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 1 << 17, "warpSize": 32},
        load_binary=lambda name, *_: ("module", name, 32, 0, 1024),
    ),
))

@triton.jit
def double_kernel(x, n, BLOCK: tl.constexpr):
    i = tl.arange(0, BLOCK)
    tl.store(x + i, 2 * tl.load(x + i, mask=i < n), mask=i < n)

@triton.jit
def early_kernel(x, PDL: tl.constexpr):
    begin(PDL)
    tl.store(x, 1.0)

@triton.jit
def wrong_kernel(x, BLOCK: tl.constexpr):
    tl.store(x + tl.arange(0, BLOCK), no_such_name)

def known(kernel):
    return [k for k in kernel.device_caches[0][0].values() if k is not None]

x = torch.ones(16)
with compiling_ahead():
    for _ in range(2):
        double_kernel[(1,)](x, 5, BLOCK=16)
        double_kernel[(1,)](x, 16, BLOCK=32)
    for early in (False, True):
        early_kernel[(1,)](x, PDL=early, launch_pdl=early)
assert torch.equal(x, torch.ones(16)), "something ran"
assert len(known(double_kernel)) == 2
assert all(isinstance(k, CompiledKernel) for k in known(double_kernel))
assert all(k.function == "double_kernel" for k in known(double_kernel)), "they are not loaded"
assert [k.metadata.launch_pdl for k in known(early_kernel)] == [False, True]
assert ["griddepcontrol.wait" in k.asm["ptx"] for k in known(early_kernel)] == [False, True]

with pytest.raises(triton.CompilationError):
    with compiling_ahead():
        double_kernel[(1,)](x, 7, BLOCK=64)
        wrong_kernel[(1,)](x, BLOCK=16)
assert len(known(double_kernel)) == 3 and not known(wrong_kernel)

with pytest.raises(KeyError):
    with compiling_ahead():
        double_kernel[(1,)](x, 7, BLOCK=128)
        raise KeyError
assert all(isinstance(k, CompiledKernel) for k in known(double_kernel))

class Memory:
    pass

def cannot_compile():
    memory = Memory()
    with pytest.raises(triton.CompilationError), compiling_ahead():
        wrong_kernel[(1,)](x, BLOCK=16)
    return weakref.ref(memory)

gc.disable()
assert cannot_compile()() is None, "the fault is in a cycle with frames that it passed"

from triton.runtime._async_compile import active_mode
assert active_mode.get() is None
"""


def test_kernels_are_compiled_and_none_runs(tmp_path):
    path = tmp_path / "script.py"  # a kernel's source is read from its file
    path.write_text(SCRIPT)
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, path], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
