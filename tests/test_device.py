"""Memory is given and taken back to the byte, a fault is told, and copies and events keep their order."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch

from makeway import device as device_module
from makeway.device import CpuDevice, CudaDevice, HostCopy, HostMemory, open_device, runs
from makeway.errors import EngineFailed, UserError
from tests.devices import FlakyDevice, LazyDevice, OrderedDevice, RecordingDevice

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
CPUS = [CpuDevice, RecordingDevice, FlakyDevice, LazyDevice, OrderedDevice]


def pair(n=64):
    return torch.zeros(n, dtype=torch.uint8), torch.arange(n, dtype=torch.uint8)


def test_a_device_by_name(monkeypatch):
    made = open_device("cpu", 1000)
    assert isinstance(made, CpuDevice)
    assert (made.name, made.free_bytes()) == ("CPU", 1000)
    assert open_device("cpu", None).free_bytes() > 1 << 28
    assert open_device("cpu", 0).free_bytes() == 0
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert isinstance(open_device("auto", None), CpuDevice)
    with pytest.raises(UserError, match="--device cuda"):
        open_device("cuda", None)


@pytest.mark.parametrize("kind", CPUS)
def test_device_memory_ends_with_its_last_view(kind):
    made = kind(1000)
    memory = made.alloc(600)
    assert (memory.dtype, memory.shape) == (torch.uint8, (600,))
    assert made.free_bytes() == 400
    with pytest.raises(EngineFailed, match="401 bytes of device memory asked for, 400 free"):
        made.alloc(401)
    assert made.free_bytes() == 400
    view = memory[4:8].view(torch.int32)
    del memory
    assert made.free_bytes() == 400
    del view
    assert made.free_bytes() == 1000
    assert made.alloc(1000).numel() == 1000


@pytest.mark.parametrize("kind", CPUS)
def test_copies_are_counted_and_there_after_their_event(kind):
    made = kind()
    target, source = pair()
    made.copy(target, source)
    event = made.record_copies()
    made.copy(target[:8], source[8:16])
    event.wait()
    assert event.is_done()
    assert torch.equal(target[8:], source[8:])
    made.synchronize()
    assert torch.equal(target[:8], source[8:16])
    assert (made.n_copies, made.link_bytes) == (2, 72)
    with pytest.raises(AssertionError):
        made.copy(target[:3], source[:4])
    assert made.n_copies == 2
    made.compute_waits(made.record_compute())
    made.copies_wait(made.record_compute())


@pytest.mark.parametrize("kind", CPUS)
def test_parts_land_where_they_belong(kind):
    made, (target, source) = kind(), pair()
    made.copy_parts(target, source, to=np.array([0, 8, 32]), of=np.array([16, 24, 40]), n_bytes=np.array([8, 6, 8]))
    made.record_copies().wait()
    made.synchronize()
    assert target[:14].tolist() == list(range(16, 30))
    assert target[32:40].tolist() == list(range(40, 48))
    assert not target[14:32].any()
    assert (made.n_copies, made.link_bytes) == (3, 22)


@pytest.mark.parametrize("kind", CPUS)
def test_parts_move_inside_memory(kind):
    made, (_, memory) = kind(), pair()
    made.move_parts(memory, to=np.array([0, 16]), of=np.array([40, 32]), n_bytes=np.array([8, 4]))
    assert memory[:24].tolist() == [*range(40, 48), *range(8, 16), *range(32, 36), *range(20, 24)]
    assert made.n_copies == made.link_bytes == 0, "nothing crosses the link"


def test_parts_side_by_side_are_one_copy():
    to, of = np.array([0, 8, 16, 24, 40, 48]), np.array([80, 88, 96, 112, 120, 128])
    eights = np.full(6, 8)
    assert runs(to, of, eights) == [(0, 80, 24), (24, 112, 8), (40, 120, 16)]
    assert runs(to[:1], of[:1], eights[:1]) == [(0, 80, 8)]
    assert runs(to, of, np.array([8, 6, 8, 8, 8, 6])) == [(0, 80, 14), (16, 96, 8), (24, 112, 8), (40, 120, 14)]


def test_values_on_their_way_to_the_host():
    values = torch.arange(5)
    copy = HostCopy(values)
    values.zero_()
    assert copy.is_there()
    assert copy.get().tolist() == copy.take().tolist() == [0, 1, 2, 3, 4]


def test_host_memory_is_zero_and_lives_as_long_as_a_view():
    memory = CpuDevice().host_alloc(3 << 20)
    assert memory.tensor.shape == (3 << 20,)
    assert memory.nbytes == 3 << 20
    assert not memory.tensor.any()
    assert not memory.is_pinned
    view = memory.tensor[-4:]
    view.fill_(7)
    memory.close()
    memory.close()
    assert memory.nbytes == 0
    assert view.tolist() == [7] * 4
    with pytest.raises(EngineFailed, match="after close"):
        _ = memory.tensor
    assert HostMemory(0).tensor.numel() == 0


def test_memory_that_the_system_refuses():
    with pytest.raises(EngineFailed, match="refuses"):
        HostMemory(1 << 60)


def test_huge_pages_are_asked_for():
    memory = HostMemory(8 << 20)
    assert memory.has_huge_pages == Path("/sys/kernel/mm/transparent_hugepage").exists()


def policy_of(memory):
    """What the kernel says about the mapping's placement."""
    start = memory.tensor.data_ptr()
    for line in Path("/proc/self/numa_maps").read_text().splitlines():
        if int(line.split()[0], 16) == start:
            return line.split()[1]
    raise AssertionError("the mapping is not listed")


@pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="the kernel keeps no list of placements")
def test_interleaving_is_done_or_told(monkeypatch):
    monkeypatch.setattr(device_module, "_online_nodes", lambda: [0])
    memory = HostMemory(4 << 20)
    assert memory.placement == "one NUMA node"
    monkeypatch.setattr(device_module, "_online_nodes", lambda: [0, 1])
    memory = HostMemory(4 << 20)
    if memory.placement == "interleaved over 2 NUMA nodes":
        assert policy_of(memory).startswith("interleave:0")
    else:  # a container may forbid it
        assert memory.placement.startswith("not interleaved: mbind: ")
        assert policy_of(memory) == "default"
    monkeypatch.setattr(device_module, "_online_nodes", lambda: [0, 5000])
    assert re.fullmatch("not interleaved: mbind: (Invalid argument|Operation not permitted)", HostMemory(1).placement)
    monkeypatch.setattr(device_module.platform, "machine", lambda: "vax")
    assert HostMemory(1).placement == "not interleaved: mbind is unknown on vax"


def test_lists_of_nodes():
    assert device_module._listed("0\n") == [0]
    assert device_module._listed("0-2,5,7-8\n") == [0, 1, 2, 5, 7, 8]
    assert device_module._online_nodes()


def test_a_lazy_copy_comes_when_somebody_waits():
    made = LazyDevice()
    target, source = pair()
    made.copy(target, source)
    event = made.record_copies()
    assert not target.any()
    assert not event.is_done()
    assert not target.any()
    assert event.is_done(), "asked again"
    assert torch.equal(target, source)
    target.zero_()
    made.copy(target[:32], source[:32])
    first = made.record_copies()
    made.copy(target[32:], source[32:])
    made.compute_waits(first)
    assert torch.equal(target[:32], source[:32])
    assert not target[32:].any(), "behind the event"
    assert made.tally == made.link_bytes == 128


def test_a_flaky_device_fails_once_at_every_kind_of_call():
    def run(made):
        target, source = made.alloc(64), made.host_alloc(64).tensor
        made.copy(target, source)
        event = made.record_copies()
        event.is_done()
        event.wait()
        made.compute_waits(event)
        made.copies_wait(made.record_compute())
        made.synchronize()

    count = FlakyDevice()
    run(count)
    assert count.n_calls == 10
    for n in range(1, 11):
        made = FlakyDevice(fail_at=n)
        with pytest.raises(RuntimeError, match=f"call {n} "):
            run(made)
        run(made)


def test_an_ordered_device_sees_what_is_not_waited_for():
    made = OrderedDevice()
    target, source = pair()
    made.copy(target, source)
    made.copy(target[:8], source[:8])
    with pytest.raises(AssertionError, match="read too early"):
        made._read(target[4:6])
    made.compute_waits(made.record_copies())
    made._read(target[4:6])
    made.copy(target[6:8], source[6:8])
    with pytest.raises(AssertionError, match="overtakes"):
        made.copy(target[5:7], source[5:7])
    made.copies_wait(made.record_compute())
    made.copy(target[5:7], source[5:7])
    made.record_copies().wait()
    made._read(target)


@needs_cuda
def test_cuda_memory_copies_and_events():
    made = open_device("cuda", 8 << 30)
    assert isinstance(made, CudaDevice)
    free = made.free_bytes()
    assert 0 < free <= 8 << 30
    memory = made.alloc(256 << 20)
    assert memory.device.type == "cuda"
    assert free - made.free_bytes() == 256 << 20
    with pytest.raises(EngineFailed, match="device memory asked for"):
        made.alloc(9 << 30)
    host = made.host_alloc(256 << 20)
    assert host.is_pinned
    assert host.tensor.is_pinned()
    draw = torch.Generator().manual_seed(0)
    host.tensor.copy_(torch.randint(0, 256, (256 << 20,), dtype=torch.uint8, generator=draw))
    for part, source in zip(memory.split(32 << 20), host.tensor.split(32 << 20), strict=True):
        made.copy(part, source)
    copied = made.record_copies()
    made.compute_waits(copied)
    doubled = memory * 2
    made.copies_wait(made.record_compute())
    made.copy(memory, host.tensor.flip(0))
    assert torch.equal(doubled.cpu(), host.tensor * 2)
    assert copied.is_done()
    made.synchronize()
    assert torch.equal(memory.cpu(), host.tensor.flip(0))
    assert (made.n_copies, made.link_bytes) == (9, 512 << 20)
    host.close()
    host.close()
    del memory, doubled, part
    torch.cuda.empty_cache()
    assert made.free_bytes() >= free


@needs_cuda
def test_cuda_runs_copies_beside_the_computation():
    """A copy is not done when it is asked for, and does not wait for what computes."""
    made = open_device("cuda", None)
    memory, host = made.alloc(1 << 30), made.host_alloc(1 << 30)
    made.copy(memory, host.tensor)
    made.synchronize()
    a = torch.randn(8192, 8192, device="cuda")
    torch.cuda.synchronize()
    for _ in range(40):
        a @ a
    computed = made.record_compute()
    made.copy(memory[: 1 << 26], host.tensor[: 1 << 26])
    made.record_copies().wait()
    assert not computed.is_done()
    made.copy(memory, host.tensor)
    assert not made.record_copies().is_done()
    host.close()


@needs_cuda
def test_cuda_refuses_more_than_there_is():
    with pytest.raises(UserError, match="use at most that"):
        open_device("cuda", 1 << 50)
