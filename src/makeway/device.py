"""Where tensors live and work runs: device memory, host memory, copies over the link, and what waits for what.

Owns the choice of a device, both kinds of memory and the copy stream. Never falls back in silence: `auto` says what it
took, `cuda` without a GPU is an error, host memory that is not placed as wished says so.
Hazard: a copy is complete only when its event is; everything above this file must also be right where it is late.
"""

import ctypes
import mmap
import os
import platform
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.config import DeviceName
from makeway.errors import EngineFailed, UserError

_MBIND = {"x86_64": 237, "aarch64": 235}  # system call numbers, asm/unistd.h
_MPOL_INTERLEAVE = 3  # linux/mempolicy.h
_TOUCH_BYTES = 64 << 20

Ints = NDArray[np.int64]


def pick_device(name: DeviceName) -> torch.device:
    """The torch device for a name; raises UserError when CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device cuda: no CUDA device is visible to torch; use --device cpu, or install a CUDA torch")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def open_device(name: DeviceName, vram_bytes: int | None) -> "Device":
    """The device for a name, with at most `vram_bytes` of memory (None: all of it). Raises UserError."""
    torch_device = pick_device(name)
    return CpuDevice(vram_bytes) if torch_device.type == "cpu" else CudaDevice(torch_device, vram_bytes)


def zeros_and_copy(shape: tuple[int, ...], dtype: torch.dtype, *, device: torch.device) -> tuple[Tensor, Tensor]:
    """A tensor of zeros on the device, and one on the host to fill it from or read it into: pinned where that helps."""
    on_host = torch.zeros(shape, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, copy=True), on_host


class Event(Protocol):
    """A point in a stream of copies or of computation."""

    def is_done(self) -> bool:
        """Whether everything before the point is complete; never waits."""
        ...

    def wait(self) -> None:
        """Block the calling thread until it is."""
        ...


class HostMemory:
    """`nbytes` of host memory in one anonymous mapping, `tensor` u8 [nbytes]; zero until written.

    `is_pinned`: registered with CUDA. `has_huge_pages`: the kernel agreed to use them. `placement`: what became of
    interleaving over NUMA nodes, in words.
    """

    def __init__(self, n_bytes: int) -> None:
        """Raises EngineFailed when the system refuses the mapping."""
        try:
            mapping = mmap.mmap(-1, max(n_bytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise EngineFailed(f"host memory: the system refuses {n_bytes} bytes: {error.strerror}") from error
        self.has_huge_pages = True
        try:
            mapping.madvise(mmap.MADV_HUGEPAGE)
        except OSError:  # a kernel without them
            self.has_huge_pages = False
        self.nbytes = n_bytes
        self.is_pinned = False
        # The tensor keeps the mapping: it ends with the last view, so a late reader finds bytes, not a fault.
        self._tensor: Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)[:n_bytes]
        self.placement = _interleave(self._tensor.data_ptr(), len(mapping), nodes=_online_nodes())

    @property
    def tensor(self) -> Tensor:
        """u8 [nbytes]. Raises EngineFailed after `close`."""
        if self._tensor is None:
            raise EngineFailed("host memory was used after close()")
        return self._tensor

    def pin(self) -> None:
        """Register the memory with CUDA; raises EngineFailed when CUDA refuses."""
        stripes = torch.split(self.tensor, _TOUCH_BYTES)
        with ThreadPoolExecutor(os.cpu_count()) as threads:  # registering untouched pages takes nine times as long
            list(threads.map(Tensor.zero_, stripes))
        code = int(_cudart().cudaHostRegister(self.tensor.data_ptr(), self.nbytes, 0))
        if code != 0:
            raise EngineFailed(f"host memory: CUDA cannot register {self.nbytes} bytes (error {code})")
        self.is_pinned = True

    def close(self) -> None:
        """Unregister and let go; again is harmless. The bytes live on as long as somebody holds a view of them."""
        if self.is_pinned:
            torch.cuda.synchronize()  # no copy may still be reading
            code = int(_cudart().cudaHostUnregister(self.tensor.data_ptr()))
            if code != 0:
                raise EngineFailed(f"host memory: CUDA cannot unregister it (error {code})")
        self.is_pinned = False
        self._tensor = None
        self.nbytes = 0


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def runs(to: Ints, of: Ints, n_bytes: Ints) -> list[tuple[int, int, int]]:
    """(to, of, bytes) of parts, those that lie side by side in both put together."""
    begins = np.flatnonzero(np.r_[True, (np.diff(to) != n_bytes[:-1]) | (np.diff(of) != n_bytes[:-1])])
    sizes = np.add.reduceat(n_bytes, begins)
    return list(zip(to[begins].tolist(), of[begins].tolist(), sizes.tolist(), strict=True))


@cache
def _host_to_device() -> Any:
    """The driver's copy over the link, asked for by address: a tensor's own copy costs the host ten times as much."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyHtoDAsync_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    return copy


@cache
def _inside_device() -> Any:
    """The driver's copy from device memory to device memory."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpyDtoDAsync_v2
    copy.argtypes = [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t, ctypes.c_void_p]
    return copy


def _interleave(address: int, n_bytes: int, *, nodes: list[int]) -> str:
    """Spread pages that nobody has touched over NUMA nodes, where there are several; says in words what happened."""
    if len(nodes) < 2:
        return "one NUMA node"
    number = _MBIND.get(platform.machine())
    if number is None:
        return f"not interleaved: mbind is unknown on {platform.machine()}"
    n_words = max(nodes) // 64 + 1
    mask = (ctypes.c_uint64 * n_words)()
    for node in nodes:
        mask[node // 64] |= 1 << (node % 64)
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = (ctypes.c_void_p(address), ctypes.c_ulong(n_bytes), ctypes.c_int(_MPOL_INTERLEAVE), mask)
    # The kernel reads one bit less than it is told.
    failed = libc.syscall(ctypes.c_long(number), *arguments, ctypes.c_ulong(64 * n_words + 1), ctypes.c_uint(0))
    if failed:
        return f"not interleaved: mbind: {os.strerror(ctypes.get_errno())}"
    return f"interleaved over {len(nodes)} NUMA nodes"


def _online_nodes() -> list[int]:
    path = Path("/sys/devices/system/node/online")
    return _listed(path.read_text()) if path.exists() else [0]


def _listed(text: str) -> list[int]:
    """Numbers of a kernel list such as "0-1,4"."""
    ranges = [(int(a), int(b or a)) for a, b in re.findall(r"(\d+)(?:-(\d+))?", text)]
    return [node for first, last in ranges for node in range(first, last + 1)]


class HostCopy:
    """A tensor's values, on their way to the host from where the computation stands now."""

    def __init__(self, source: Tensor) -> None:
        self._values = source.to("cpu", non_blocking=True, copy=True)  # pinned, when it comes from a GPU
        self._event: torch.cuda.Event | None = None
        if source.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def is_there(self) -> bool:
        """Whether `get` need not wait."""
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def get(self) -> Tensor:
        """Waits for this copy alone; on the host."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return self._values

    def take(self) -> Tensor:
        """As `get`, to be kept: in memory that is not pinned."""
        values = self.get()
        return values.clone() if values.is_pinned() else values


class Device(Protocol):
    """One place that computes, its memory, and the link to it. Copies run beside the computation, in their own order.

    `n_copies`, `link_bytes`: what was asked of the link so far. All bytes are u8 tensors.
    """

    torch_device: torch.device
    name: str
    n_copies: int
    link_bytes: int

    def alloc(self, n_bytes: int) -> Tensor:
        """u8 [n_bytes] of device memory, not cleared; given back with its last view. Raises EngineFailed."""
        ...

    def host_alloc(self, n_bytes: int) -> HostMemory:
        """Host memory that the link reads at full speed. Raises EngineFailed."""
        ...

    def free_bytes(self) -> int:
        """Device memory that `alloc` can still give."""
        ...

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Ask for host bytes `source` to be put into `target` of the device, behind all earlier copies."""
        ...

    def copy_parts(self, target: Tensor, source: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        """Ask for several copies in order, from the bytes `of` of the source to those `to` of the target."""
        ...

    def move_parts(self, memory: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        """Copies inside device memory, u8, in the order of the computation; what one reads, no other writes."""
        ...

    def record_copies(self) -> Event:
        """Done when all copies asked for so far are."""
        ...

    def record_compute(self) -> Event:
        """Done when everything computed so far is."""
        ...

    def compute_waits(self, event: Event) -> None:
        """What is computed from now on waits for the event; the caller does not."""
        ...

    def copies_wait(self, event: Event) -> None:
        """Copies asked for from now on wait for the event; the caller does not."""
        ...

    def synchronize(self) -> None:
        """Block until everything asked for is complete."""
        ...


class _Done:
    """The event of a device that does everything at once."""

    def is_done(self) -> bool:
        return True

    def wait(self) -> None:
        return None


class CpuDevice:
    """A device whose link is a copy in RAM, complete when `copy` returns, and whose memory is a part of RAM."""

    def __init__(self, vram_bytes: int | None = None) -> None:
        """`vram_bytes`: the device memory that it pretends to have; None: as much as the machine has RAM."""
        self.torch_device = torch.device("cpu")
        self.name = "CPU"
        self.n_copies = 0
        self.link_bytes = 0
        ram_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        self.vram_bytes = ram_bytes if vram_bytes is None else vram_bytes
        self._taken_bytes = 0

    def alloc(self, n_bytes: int) -> Tensor:
        if n_bytes > self.free_bytes():
            raise EngineFailed(f"{self.name}: {n_bytes} bytes of device memory asked for, {self.free_bytes()} free")
        memory = np.empty(n_bytes, dtype=np.uint8)  # lives as long as the tensor or a view of it
        self._taken_bytes += n_bytes
        weakref.finalize(memory, self._give_back, n_bytes).atexit = False
        return torch.from_numpy(memory)

    def _give_back(self, n_bytes: int) -> None:
        self._taken_bytes -= n_bytes

    def host_alloc(self, n_bytes: int) -> HostMemory:
        return HostMemory(n_bytes)

    def free_bytes(self) -> int:
        return self.vram_bytes - self._taken_bytes

    def copy(self, target: Tensor, source: Tensor) -> None:
        self._count(target, source)
        target.copy_(source)

    def copy_parts(self, target: Tensor, source: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        for t, s, n in zip(to.tolist(), of.tolist(), n_bytes.tolist(), strict=True):
            self.copy(target[t : t + n], source[s : s + n])

    def move_parts(self, memory: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        for t, s, n in zip(to.tolist(), of.tolist(), n_bytes.tolist(), strict=True):
            memory[t : t + n].copy_(memory[s : s + n])

    def _count(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        self.n_copies += 1
        self.link_bytes += source.numel()

    def record_copies(self) -> Event:
        return _Done()

    def record_compute(self) -> Event:
        return _Done()

    def compute_waits(self, event: Event) -> None:
        event.wait()

    def copies_wait(self, event: Event) -> None:
        event.wait()

    def synchronize(self) -> None:
        return None


class _CudaEvent:
    """An event of a CUDA stream."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.event.record(stream)

    def is_done(self) -> bool:
        return bool(self.event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self.event.synchronize()


class CudaDevice:
    """A GPU. Computation runs on the stream that is current for the caller, copies on one of their own."""

    def __init__(self, torch_device: torch.device, vram_bytes: int | None = None) -> None:
        """`vram_bytes` caps what this process may take of the memory. Raises UserError when there is less."""
        self.torch_device = torch_device
        self.name = torch.cuda.get_device_name(torch_device)
        self.n_copies = 0
        self.link_bytes = 0
        total = torch.cuda.get_device_properties(torch_device).total_memory
        self.vram_bytes = total if vram_bytes is None else vram_bytes
        if self.vram_bytes > total:
            raise UserError(f"--vram {vram_bytes}: {self.name} has {total} bytes; use at most that")
        torch.cuda.set_per_process_memory_fraction(self.vram_bytes / total, torch_device)
        self._copy_stream = torch.cuda.Stream(torch_device)  # type: ignore[no-untyped-call]

    def alloc(self, n_bytes: int) -> Tensor:
        try:
            return torch.empty(n_bytes, dtype=torch.uint8, device=self.torch_device)
        except torch.OutOfMemoryError as error:
            raise EngineFailed(f"{self.name}: {n_bytes} bytes of device memory asked for: {error}") from error

    def host_alloc(self, n_bytes: int) -> HostMemory:
        memory = HostMemory(n_bytes)
        try:
            memory.pin()
        except BaseException:
            memory.close()
            raise
        return memory

    def free_bytes(self) -> int:
        free, _ = torch.cuda.mem_get_info(self.torch_device)
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return min(free + reserved, self.vram_bytes) - torch.cuda.memory_allocated(self.torch_device)

    def copy(self, target: Tensor, source: Tensor) -> None:
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        with torch.cuda.stream(self._copy_stream):
            target.copy_(source, non_blocking=True)
        self.n_copies += 1
        self.link_bytes += source.numel()

    def copy_parts(self, target: Tensor, source: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        """Parts that lie side by side in both are one copy. Raises EngineFailed when CUDA refuses."""
        if not to.size:
            return
        assert target.dtype == source.dtype == torch.uint8
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert min(int(to.min()), int(of.min())) >= 0
        assert int((to + n_bytes).max()) <= target.numel()
        assert int((of + n_bytes).max()) <= source.numel()
        copy, stream = _host_to_device(), self._copy_stream.cuda_stream
        targets, sources = target.data_ptr(), source.data_ptr()
        for t, s, size in runs(to, of, n_bytes):
            code = copy(targets + t, sources + s, size, stream)
            if code != 0:
                raise EngineFailed(f"{self.name}: CUDA refuses to copy {size} bytes over the link (error {code})")
        self.n_copies += int(to.size)
        self.link_bytes += int(n_bytes.sum())

    def move_parts(self, memory: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
        """Raises EngineFailed when CUDA refuses."""
        if not to.size:
            return
        assert memory.dtype == torch.uint8
        assert memory.is_contiguous()
        assert int((np.maximum(to, of) + n_bytes).max()) <= memory.numel()
        move, base = _inside_device(), memory.data_ptr()
        stream = torch.cuda.current_stream(self.torch_device).cuda_stream
        for t, s, n in zip(to.tolist(), of.tolist(), n_bytes.tolist(), strict=True):
            code = move(base + t, base + s, n, stream)
            if code != 0:
                raise EngineFailed(f"{self.name}: CUDA refuses to copy {n} bytes of its memory (error {code})")

    def record_copies(self) -> Event:
        return _CudaEvent(self._copy_stream)

    def record_compute(self) -> Event:
        return _CudaEvent(torch.cuda.current_stream(self.torch_device))

    def compute_waits(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        torch.cuda.current_stream(self.torch_device).wait_event(event.event)

    def copies_wait(self, event: Event) -> None:
        assert isinstance(event, _CudaEvent)
        self._copy_stream.wait_event(event.event)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
