"""Launches of Triton kernels without what Triton finds out anew each time.

Owns, by kernel, which binary serves which arguments. Never compiles and never decides how arguments are specialised:
the first launch of a kind is Triton's own. Hazard: two launches of one kind must get one binary from Triton, so what a
kind is tells arguments apart at least as finely as Triton does.

A launch of Triton's takes the host 20 to 50 us (binding names, describing every argument, looking for options and
hooks), a prompt of 119,000 tokens some 40,000 launches.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton import knobs
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from makeway.kernels.triton.ahead import is_ahead

Grid = tuple[int, ...]


def kind_of(argument: Any) -> Any:
    """What Triton may specialise a kernel on: type; of an integer whether it is 1, a multiple of 16, one of 32 bits; of
    a pointer whether it is a multiple of 16 (`specialize_impl` in triton/runtime/jit.py)."""
    kind = type(argument)
    if kind is Tensor:
        return argument.dtype, argument.data_ptr() % 16 == 0
    if kind is int:
        return argument == 1, argument % 16 == 0, -(1 << 31) <= argument < 1 << 31, argument >= 1 << 63
    if kind is TensorDescriptor:
        base = argument.base
        return base.dtype, tuple(argument.block_shape), getattr(argument, "padding", None), base.data_ptr() % 16 == 0
    assert kind in (float, bool), f"an argument of type {kind.__name__}"
    return argument if kind is bool else kind


class Quick:
    """A kernel; `kernel[grid](*arguments, **constants)` as Triton has it, the constants (and options) by name."""

    def __init__(self, jit: "JITFunction[Any]") -> None:
        self.jit = jit
        self.__name__ = jit.__name__
        self._known: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def __getitem__(self, grid: Grid) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: Grid, *arguments: Any, **constants: Any) -> None:
        if is_ahead():  # its inputs are garbage: a kernel that is compiled already must not run either
            self.jit.run(*arguments, grid=grid, warmup=True, **constants)
            return
        device, stream = _place()
        key = (device, tuple(map(kind_of, arguments)), tuple(constants.items()))
        known = self._known.get(key)
        if known is None or knobs.runtime.launch_enter_hook.calls:  # a profiler wants what Triton tells
            compiled = self.jit[grid](*arguments, **constants)
            if getattr(compiled, "function", None) is not None:  # else it is still being compiled
                rest = self.jit.params[len(arguments) :]
                assert all(parameter.is_constexpr for parameter in rest), f"{self.__name__}: what varies goes by place"
                self._known[key] = (compiled, tuple(constants[parameter.name] for parameter in rest))
            return
        compiled, rest = known
        x, y, z = (*grid, 1, 1)[:3]
        where = (stream, compiled.function, compiled.packed_metadata)
        compiled.run(x, y, z, *where, None, None, None, *arguments, *rest)


def _place() -> tuple[int, int]:
    """Torch's current GPU and the handle of its current stream."""
    device = torch.cuda.current_device()
    return device, torch._C._cuda_getCurrentRawStream(device)


def quick(kernel: Any) -> Any:
    """A kernel made by `triton.jit`, launched so; Triton's interpreter has its own way."""
    return Quick(kernel) if isinstance(kernel, JITFunction) else kernel
