"""Kernels in CUDA C++: what decode runs on a GPU where Triton cannot say what the machine should do.

Owns the list of what is compiled ahead of time; imports no CUDA package, so it imports on every machine.
Hazard: an instantiation that is missing from `all_kernels` is compiled at its first use, and no test sees it before.
"""

from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent


def all_kernels() -> list[tuple[tuple[Path, ...], Sequence[str]]]:
    """(files, names of the kernels in C++) of each program that the wrappers use."""
    return []
