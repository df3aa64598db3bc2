"""The compiled kernels of one device, each made when it is first asked for, or many at once, ahead of their use.

Owns the loaded modules, and the compiler's threads inside `ahead`. Never launches.
Hazard: a kernel's first use compiles it (seconds), or reads it from the disk; inside `ahead` no launch does anything.
"""

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from makeway.kernels.cuda.compiler import Module, current_arch

MOST_THREADS = 16


class Launchable(Protocol):
    """A kernel that can be launched (`makeway.kernels.cuda.launch.Kernel`)."""

    def launch(self, *arguments: Any, **options: Any) -> None: ...


class _NotYet:
    """Stands for a kernel that is being compiled, or whose inputs would be garbage."""

    def launch(self, *arguments: Any, **options: Any) -> None:
        return None


class Programs:
    """Kernels by file and C++ name, for torch's current GPU."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Path, str], Launchable] = {}
        self._threads: ThreadPoolExecutor | None = None  # inside `ahead`
        self._coming: dict[tuple[Path, str], tuple[Future[Module], str]] = {}

    def kernel(self, source: Path, name: str, parameters: str) -> Launchable:
        """The kernel of this C++ name in `source`; `parameters` as in `launch.Kernel`.

        Raises UserError when NVRTC is not installed, EngineFailed when it rejects the program.
        """
        key = (source, name)
        if self._threads is not None:
            if key not in self._kernels and key not in self._coming:
                job = self._threads.submit(Module.compile, [source], [name], current_arch())
                self._coming[key] = job, parameters
            return _NotYet()
        if key not in self._kernels:
            self._kernels[key] = Module.compile([source], [name], current_arch()).kernel(name, parameters)
        return self._kernels[key]

    @contextmanager
    def ahead(self) -> Iterator[None]:
        """Kernels that are asked for inside do nothing when they are launched; all of them are compiled, in threads,
        and loaded at its end. Raises what `kernel` raises; what was not compiled then is unknown as before."""
        assert self._threads is None
        try:
            with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as self._threads:
                yield
        finally:
            self._threads, coming, self._coming = None, self._coming, {}
        while coming:
            (source, name), (job, parameters) = coming.popitem()
            try:
                self._kernels[source, name] = job.result().kernel(name, parameters)
            finally:
                del job  # a fault holds the frames it passed, with the engine's memory: none of them may hold it
