"""A launch passes what it was given: to a driver that stands in on every machine, and to the GPU where there is one."""

import ctypes
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from makeway.errors import EngineFailed
from makeway.kernels.cuda import launch
from makeway.kernels.cuda.compiler import Module, current_arch
from makeway.kernels.cuda.launch import Kernel
from tests.kernels.cuda.test_emulator import bytes_case, check_conversions

SELFTEST = Path(__file__).parent / "selftest.cu"
SIZES = [8, 4, 8, 4]  # of "pilf"
OVERLAPS = ("CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION", 1)

needs_bindings = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="launches need a GPU")


class Driver:
    """Notes what the driver is asked for; `sizes` are those of the compiled parameters."""

    def __init__(self, real, sizes):
        self.real, self.sizes = real, sizes
        self.result = real.CUresult.CUDA_SUCCESS
        self.launched, self.allowed = [], []

    def param_info(self, function, index):
        if index < len(self.sizes):
            return self.real.CUresult.CUDA_SUCCESS, 0, self.sizes[index]
        return self.real.CUresult.CUDA_ERROR_INVALID_VALUE, 0, 0

    def set_attribute(self, function, attribute, value):
        self.allowed.append(value)
        return (self.real.CUresult.CUDA_SUCCESS,)

    def launched_by(self):
        return ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self.launch)

    def values(self, packed):
        places = (ctypes.c_void_p * len(self.sizes)).from_address(packed)
        types = [ctypes.c_uint64, ctypes.c_int32, ctypes.c_int64, ctypes.c_float]
        return [kind.from_address(place).value for kind, place in zip(types, places, strict=True)]

    def launch(self, config, function, packed, extra):
        """cuLaunchKernelEx, reading what it is given as the bindings lay it out."""
        given = self.real.CUlaunchConfig(config)
        grid = [given.gridDimX, given.gridDimY, given.gridDimZ]
        block = [given.blockDimX, given.blockDimY, given.blockDimZ]
        assert given.numAttrs <= 1
        place = ctypes.c_void_p.from_address(config + 40).value  # the bindings do not read this one from memory
        attributes = [self.real.CUlaunchAttribute(place)] if given.numAttrs else []
        overlaps = [(a.id.name, a.value.programmaticStreamSerializationAllowed) for a in attributes]
        stream = int(given.hStream)
        self.launched.append((function, [*grid, *block, given.sharedMemBytes], stream, self.values(packed), overlaps))
        return int(self.result)


@pytest.fixture
def driver(monkeypatch):
    real = pytest.importorskip("cuda.bindings.driver")
    stand_in = Driver(real, SIZES)
    monkeypatch.setattr(real, "cuFuncGetParamInfo", stand_in.param_info)
    monkeypatch.setattr(real, "cuFuncSetAttribute", stand_in.set_attribute)
    monkeypatch.setattr(launch, "_library", lambda: SimpleNamespace(cuLaunchKernelEx=stand_in.launched_by()))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 70 + device, raising=False)
    return stand_in


def test_what_a_launch_passes(driver):
    tensor = torch.zeros(4)
    kernel = Kernel("kernel", 5, parameters="pilf")
    kernel.launch((2, 3, 4), 96, 100, (tensor, -3, 1 << 40, 0.5))
    kernel.launch((1, 1, 1), 32, 0, (1 << 63, 7, -1, 2.0), overlaps_previous=True)
    assert driver.launched == [
        (5, [2, 3, 4, 96, 1, 1, 100], 73, [tensor.data_ptr(), -3, 1 << 40, 0.5], []),
        (5, [1, 1, 1, 32, 1, 1, 0], 73, [1 << 63, 7, -1, 2.0], [OVERLAPS]),
    ]


def test_launches_do_not_overlap_before_hopper(driver, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 6))
    Kernel("kernel", 5, parameters="pilf").launch((1, 1, 1), 32, 0, (0, 0, 0, 0.0), overlaps_previous=True)
    assert driver.launched[0][-1] == []


def test_much_shared_memory_is_asked_for_once(driver):
    kernel = Kernel("kernel", 5, parameters="pilf")
    for n_bytes in (48 << 10, 60_000, 50_000, 90_000):
        kernel.launch((1, 1, 1), 32, n_bytes, (0, 0, 0, 0.0))
    assert driver.allowed == [60_000, 90_000]


@pytest.mark.parametrize("parameters", ["pillf", "piif", "pil"])
def test_parameters_that_were_not_compiled_are_refused(driver, parameters):
    with pytest.raises(EngineFailed, match="kernel"):
        Kernel("kernel", 5, parameters=parameters)


def test_arguments_that_do_not_fit_are_refused(driver):
    kernel = Kernel("kernel", 5, parameters="pilf")
    for arguments in [(0, 1 << 31, 0, 0.0), (0, 1, 0), (0, 1.5, 0, 0.0)]:
        with pytest.raises(EngineFailed, match="are not those of kernel"):
            kernel.launch((1, 1, 1), 32, 0, arguments)
    assert driver.launched == []


def test_what_the_driver_refuses_is_told(driver):
    driver.result = driver.real.CUresult.CUDA_ERROR_INVALID_VALUE
    with pytest.raises(EngineFailed, match=r"kernel, grid \(9, 1, 1\), 32 threads, 0 bytes.*INVALID_VALUE"):
        Kernel("kernel", 5, parameters="pilf").launch((9, 1, 1), 32, 0, (0, 0, 0, 0.0))


@pytest.fixture(scope="module")
def module(tmp_path_factory):
    names = [
        "product_kernel",
        "bytes_kernel",
        "shuffle_kernel",
        "sum_kernel<64>",
        "sum_kernel<1024>",
        "convert_kernel",
        "copy_kernel",
    ]
    names.append("chain_kernel")
    return Module.compile([SELFTEST], names, current_arch(), cache_folder=tmp_path_factory.mktemp("kernels"))


@needs_gpu
def test_a_gpu_does_what_the_emulation_does(module):
    a, b, c = torch.randn(16, 16), torch.randn(8, 16), torch.randn(16, 8)
    a, b = a.bfloat16(), b.bfloat16()
    out = c.cuda()
    module.kernel("product_kernel", "ppp").launch((1, 1, 1), 32, 0, (out, a.cuda(), b.cuda()))
    torch.testing.assert_close(out.cpu().double(), c.double() + a.double() @ b.double().T, rtol=1e-5, atol=1e-5)

    a, b, c, want = (torch.from_numpy(array) for array in bytes_case())
    out = c.cuda()
    module.kernel("bytes_kernel", "ppp").launch((1, 1, 1), 32, 0, (out, a.cuda(), b.cuda()))
    assert torch.equal(out.cpu(), want)

    values = torch.arange(128.0) ** 2
    out = torch.zeros(384, device="cuda")
    module.kernel("shuffle_kernel", "ppii").launch((1, 1, 1), 128, 0, (out, values.cuda(), 128, 5))
    warps = values.reshape(4, 32)
    want = torch.cat([each.repeat_interleave(32) for each in (warps.sum(dim=1), warps[:, 5], warps.amax(dim=1))])
    assert torch.equal(out.cpu(), want)

    words = np.random.default_rng(2).integers(0, 2**32, 4096, dtype=np.uint32)
    out = torch.zeros(4096, 9, dtype=torch.int32, device="cuda")
    arguments = (out, torch.from_numpy(words.view(np.int32)).cuda(), 4096, 1e-3)
    module.kernel("convert_kernel", "ppif").launch((1, 1, 1), 32, 0, arguments)
    check_conversions(out.cpu().numpy().view(np.uint32), words, 1e-3)

    words = torch.arange(1024, dtype=torch.int32)
    out = torch.zeros(512, dtype=torch.int32, device="cuda")
    module.kernel("copy_kernel", "pp").launch((1, 1, 1), 32, 4096, (out, words.cuda()))
    assert torch.equal(out.cpu(), words[:512].flip(0) + words[512:])


@needs_gpu
@pytest.mark.parametrize(
    ("name", "threads", "shared"), [("sum_kernel<64>", 64, 256), ("sum_kernel<1024>", 1024, 90_000)]
)
def test_many_blocks_arrive(module, name, threads, shared):
    values = torch.arange(100_000, device="cuda", dtype=torch.float32) % 8
    n_blocks = -(-100_000 // threads)
    total, parts = torch.zeros(1, device="cuda"), torch.zeros(n_blocks, device="cuda")
    counter = torch.zeros(1, device="cuda", dtype=torch.int32)
    kernel = module.kernel(name, "ppppl")
    for _ in range(20):
        total.zero_()
        kernel.launch((n_blocks, 1, 1), threads, shared, (total, parts, counter, values, 100_000))
        assert total.item() == 350_000
        assert counter.item() == 0


@needs_gpu
@pytest.mark.parametrize("overlaps", [False, True])
def test_launches_in_a_graph_keep_their_order(module, overlaps):
    kernel = module.kernel("chain_kernel", "pii")
    values = torch.zeros(1 << 20, dtype=torch.int32, device="cuda")

    def chain():
        for step in range(50):
            kernel.launch((4096, 1, 1), 256, 0, (values, values.numel(), step), overlaps_previous=overlaps)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    want = 0
    for step in 4 * list(range(50)):
        want = (want * 5 + step) % 65536
    assert (values == want).all()
