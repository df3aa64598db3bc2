"""Fills the expert store from the file: large reads by several threads, straight into place.

Owns the threads and file descriptors while it runs. Never maps, buffers or keeps what it read: the page cache is
dropped behind the reader, so that the host needs room for the experts once.
Hazard: an interrupt must find no thread that still writes; the memory is given back only after all have stopped.
"""

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from makeway.device import Device
from makeway.experts.store import ExpertStore, FileLayer, StoredLayer
from makeway.gguf import GGUFFile
from makeway.gguf.faults import TRUNCATED, fault

READ_BYTES = 32 << 20
PAGE_BLOCK_BYTES = 4 << 20  # at least the largest block in which the page cache holds a file
MAX_THREADS = 16
IOV_MAX = os.sysconf("SC_IOV_MAX")

Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class _Read:
    """Experts first..last-1 of one tensor: one run of the file at `offset`, `n_bytes` each, which go to byte `at` of
    every expert of `layer`."""

    path: Path
    tensor: str
    offset: int
    n_bytes: int
    layer: StoredLayer
    first: int
    last: int
    at: int

    @property
    def total_bytes(self) -> int:
        return (self.last - self.first) * self.n_bytes


def load_experts(
    file: GGUFFile, layers: Sequence[FileLayer], device: Device, *, progress: Progress | None = None
) -> ExpertStore:
    """A store with the experts of `layers`, whose tensors are in `file`.

    `progress(done_bytes, total_bytes)` is called in this thread after every read; what it raises stops the loading, as
    an interrupt does. Raises UserError when the file cannot be read or is cut short, EngineFailed without memory.
    """
    store = ExpertStore(layers, device)
    try:
        reads = [read for i, layer in enumerate(layers) for read in _reads_of(file, layer, store.layers[i])]
        _run(sorted(reads, key=lambda read: (read.path, read.offset)), progress)
    except BaseException:
        store.close()
        raise
    return store


def _reads_of(file: GGUFFile, layer: FileLayer, stored: StoredLayer) -> Iterator[_Read]:
    at = 0
    for name in layer.tensors:
        info = file.get_tensor(name)
        n_bytes = info.n_bytes // layer.n_experts
        step = max(1, min(READ_BYTES // n_bytes, IOV_MAX))
        for first in range(0, layer.n_experts, step):
            last = min(first + step, layer.n_experts)
            yield _Read(info.path, name, info.offset + first * n_bytes, n_bytes, stored, first, last, at)
        at += n_bytes
    assert at == stored.expert_bytes


def _run(reads: list[_Read], progress: Progress | None) -> None:
    total = sum(read.total_bytes for read in reads)
    done = 0
    stop = threading.Event()
    descriptors: dict[Path, int] = {}
    try:
        for path in {read.path for read in reads}:
            descriptors[path] = _open(path)
        with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as threads:
            try:
                futures = [threads.submit(_read, descriptors[read.path], read, stop) for read in reads]
                for future in as_completed(futures):
                    done += future.result()
                    if progress is not None:
                        progress(done, total)
            finally:
                stop.set()  # reads that wait return at once; leaving `with` waits for those under way
        for read in reads:  # the system forgets no block of pages that reaches into the next read, so once more
            first = max(0, read.offset - PAGE_BLOCK_BYTES)
            _drop(descriptors[read.path], first, read.offset - first + read.total_bytes + PAGE_BLOCK_BYTES)
    finally:
        for descriptor in descriptors.values():
            os.close(descriptor)


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDONLY)
    except OSError as error:
        raise fault(path, f"cannot be opened: {error.strerror}", do="check that it still exists") from error


def _read(descriptor: int, read: _Read, stop: threading.Event) -> int:
    """Do one read, however many system calls it takes; returns its bytes, or 0 when it was stopped."""
    start = offset = read.offset
    rows = read.layer.raw.numpy()[read.first : read.last, read.at : read.at + read.n_bytes]
    open_rows = [memoryview(row) for row in rows]
    while open_rows:
        if stop.is_set():
            return 0
        try:
            n = os.preadv(descriptor, open_rows, offset)
        except OSError as error:
            what = f"tensor '{read.tensor}' cannot be read: {error.strerror}"
            raise fault(read.path, what, at=offset, do="check the disk, or copy the file again") from error
        if n == 0:
            raise fault(read.path, f"it ends inside tensor '{read.tensor}'", at=offset, do=TRUNCATED)
        offset += n
        while open_rows and n >= open_rows[0].nbytes:
            n -= open_rows.pop(0).nbytes
        if n:
            open_rows[0] = open_rows[0][n:]
    _drop(descriptor, start, offset - start)
    return offset - start


def _drop(descriptor: int, offset: int, n_bytes: int) -> None:
    """Let the system forget a range of the file."""
    os.posix_fadvise(descriptor, offset, n_bytes, os.POSIX_FADV_DONTNEED)
