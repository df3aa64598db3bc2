"""Compiling many kernels at once: what runs inside `compiling_ahead` launches no kernel that is not compiled yet, and
no `quick` one at all.

Owns the compiler's threads, while it is open; they load what they have compiled onto the GPU. Never leaves a kernel
behind that does nothing: at the end each is the compiled one, or, after a fault, unknown again.
Hazard: what is computed inside is garbage, so nothing may be read from it, and nothing may depend on its values.
"""

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from triton import AsyncCompileMode
from triton.runtime._async_compile import active_mode

from makeway.kernels.cuda.programs import Programs

MOST_THREADS = 16


class _NotYet:
    """Stands for a kernel that is being compiled: a launch of it does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *arguments: Any) -> None:
        return None

    def run(self, *arguments: Any) -> None:
        return None


def _compiled_and_loaded(compile_one: Callable[[], Any], device: int) -> Any:
    """Ready to be launched on a GPU (-1: none): Triton loads a kernel at its first launch, and up to 3.6 has a C
    compiler make the launcher then."""
    kernel = compile_one()
    with torch.cuda.device(device):  # a thread begins on the first GPU, whatever its maker's is
        _ = kernel.run
    return kernel


class _Ahead(AsyncCompileMode):  # type: ignore[misc]
    """Triton's mode for compiling in threads, in which a launch waits for its kernel; here it does not."""

    def __init__(self, executor: ThreadPoolExecutor) -> None:
        super().__init__(executor)
        self._jobs: dict[Any, Future[Any]] = {}
        self._ends: list[tuple[Callable[[Any], None], Future[Any]]] = []

    def submit(self, key: Any, compile_one: Callable[[], Any], finish: Callable[[Any], None], *_: Any) -> _NotYet:
        """`finish(kernel)` makes the kernel known; several launches may share a key, each with its own `finish`."""
        if key not in self._jobs:
            device = torch.cuda.current_device() if torch.cuda.is_available() else -1
            self._jobs[key] = self.executor.submit(_compiled_and_loaded, compile_one, device)
        self._ends.append((finish, self._jobs[key]))
        return _NotYet()

    def __exit__(self, *fault: Any) -> None:
        super().__exit__(*fault)
        ends, self._ends, self._jobs = self._ends, [], {}
        failed = []
        for finish, job in ends:
            if job.exception():
                finish(None)  # the next launch compiles it again
                failed.append(job)
            else:
                finish(job.result())
        if failed and fault[0] is None:
            try:
                failed[0].result()
            finally:  # a fault holds the frames it passed, with the engine's memory: none of them may hold it
                del ends, failed, job


def is_ahead() -> bool:
    """Whether this is inside `compiling_ahead`."""
    return isinstance(active_mode.get(), _Ahead)


@contextmanager
def compiling_ahead(programs: Programs | None = None) -> Iterator[None]:
    """Kernels that are launched inside for the first time, those of `programs` too, are not run; all of them are
    compiled at its end. Raises what the compilers raise."""
    others = nullcontext() if programs is None else programs.ahead()
    with ThreadPoolExecutor(min(MOST_THREADS, os.cpu_count() or 1)) as executor, _Ahead(executor), others:
        yield
