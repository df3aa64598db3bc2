"""The compiled kernels of one device, each made when it is first asked for.

Owns the loaded modules. Never launches. Hazard: a kernel's first use compiles it (seconds), or reads it from the disk.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from makeway.kernels.cuda.compiler import Module, current_arch


class Launchable(Protocol):
    """A kernel that can be launched (`makeway.kernels.cuda.launch.Kernel`)."""

    launch: Callable[..., None]


class Programs:
    """Kernels by file and C++ name, for torch's current GPU."""

    def __init__(self) -> None:
        self._kernels: dict[tuple[Path, str], Any] = {}

    def kernel(self, source: Path, name: str, parameters: str) -> Launchable:
        """The kernel of this C++ name in `source`; `parameters` as in `launch.Kernel`.

        Raises UserError when NVRTC is not installed, EngineFailed when it rejects the program.
        """
        key = (source, name)
        if key not in self._kernels:
            module = Module.compile([source], [name], current_arch())
            self._kernels[key] = module.kernel(name, parameters)
        found: Launchable = self._kernels[key]
        return found
