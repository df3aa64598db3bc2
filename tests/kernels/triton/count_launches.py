"""Counts what a step launches, without a GPU: nothing runs, kernels of Triton and operations of torch are only named.

`python -m tests.kernels.triton.count_launches FILE...` prints JSON: by golden model, by what multiplies ("cuda" as on a
GPU, or "triton"), by pass, and by layer (or what comes before and behind the layers) the names in their order.
"""

import json
import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton.backends.compiler import GPUTarget
from triton.runtime.jit import JITFunction

from makeway import EngineConfig
from makeway.device import CpuDevice
from makeway.engine.backend import TritonBackend
from makeway.engine.graphs import StepGraphs
from makeway.engine.memory import EngineMemory
from makeway.gguf import open_gguf
from makeway.kernels.cuda.linear import Linears
from makeway.kernels.triton import quick
from makeway.kernels.triton.ops import triton_ops
from tests.conftest import golden_path

HARMLESS = "view empty slice select split unbind unsqueeze squeeze expand alias detach t transpose permute as_strided"
"""Operations of torch that launch nothing, by how their names begin."""


class Count(TorchDispatchMode):
    """Writes the names of torch's operations into `log`."""

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self._log = log

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__.split(".")[0].lstrip("_").removeprefix("unsafe_").removeprefix("new_").removeprefix("re")
        if name.removesuffix("_like") not in HARMLESS.split() and name not in ("shape", "shape_alias", "empty_strided"):
            self._log.append(f"torch.{name}")
        return func(*args, **(kwargs or {}))


class NamedPrograms:
    """Kernels in CUDA C++ of which only the names are written into `log`."""

    def __init__(self, log: list[str]) -> None:
        self._log = log

    def kernel(self, source: Any, name: str, parameters: str) -> Any:
        return SimpleNamespace(launch=lambda *_, **__: self._log.append(f"cuda.{name.partition('<')[0]}"))

    def ahead(self) -> Any:
        return nullcontext()


class NamedBackend(TritonBackend):
    """With matrices and experts in CUDA C++, as on a GPU."""

    def __init__(self, place: CpuDevice, log: list[str]) -> None:
        super().__init__(place)
        self._programs: Any = NamedPrograms(log)
        self.ops = triton_ops(place.torch_device, Linears(place.torch_device, self._programs))


def passes(name: str, *, in_cuda: bool) -> dict[str, list[tuple[str, list[str]]]]:
    """Of a golden model: by pass, the places and what is launched there."""
    place, log = CpuDevice(), list[str]()
    backend = NamedBackend(place, log) if in_cuda else TritonBackend(place)
    file = open_gguf(golden_path(name))
    with_mtp = f"{file.metadata['general.architecture']}.nextn_predict_layers" in file.metadata
    config = EngineConfig(
        device="cpu",
        context=4096,
        parallel=1,
        slots=2,
        uploads_per_layer=1,
        guesses=False,  # run beside the step: six launches a layer
        drafter="mtp" if with_mtp else "none",
        draft_depth=3 if with_mtp else 0,
        prefix_ram=0,
    )
    memory = EngineMemory(file, backend, config, device=place)
    graphs, model = memory.graphs, memory.model
    assert isinstance(graphs, StepGraphs)
    for method in ("mix", "head"):
        inner = getattr(type(model), method)

        def marked(self: Any, *args: Any, inner: Any = inner, method: str = method, **options: Any) -> Any:
            log.append(f"# layer {args[0]}" if method == "mix" else "# head")
            return inner(self, *args, **options)

        setattr(model, method, marked.__get__(model))

    def launch(self: Any, *_: Any, **__: Any) -> None:
        assert "PDL" in self.arg_names, f"{self} runs in a step, and does not let the next kernel start early"
        log.append(self.fn.__name__)

    JITFunction.run = launch
    quick._place = lambda: (0, 0)
    runs = {"step": graphs._step(1, keeps_rows=False)}
    if with_mtp:
        runs |= {"verify": graphs._step(4, keeps_rows=True), "draft": graphs._draft(1), "remember": graphs._remember(2)}
    found = {}
    for kind, graph in runs.items():
        graph._compute()  # what is made at the first use
        log[:] = ["# before"]
        with Count(log):
            graph._compute()
        found[kind] = split(log)
    memory.close()
    file.close()
    return found


def split(log: list[str]) -> list[tuple[str, list[str]]]:
    places: list[tuple[str, list[str]]] = []
    for name in log:
        if name.startswith("# "):
            places.append((name[2:], []))
        else:
            places[-1][1].append(name)
    return places


def main(names: list[str]) -> None:
    driver = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    triton.runtime.driver.set_active(driver)
    torch.set_num_threads(1)
    by = {"cuda": True, "triton": False}
    print(json.dumps({name: {what: passes(name, in_cuda=is_it) for what, is_it in by.items()} for name in names}))


if __name__ == "__main__":
    main(sys.argv[1:])
