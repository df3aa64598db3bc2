"""What a step launches: names of kernels, how often each runs, and how long.

Owns one profiled run. Never times a step: with the profiler on everything is slower but the kernels themselves.
Hazard: on a CPU operations of torch are counted instead, and they nest.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity, profile

from makeway.errors import UserError


@dataclass(frozen=True)
class Launch:
    """A kernel: its name, launches, and seconds of all of them."""

    name: str
    n: int
    seconds: float


def launches(run: Callable[[], object], device: torch.device) -> list[Launch]:
    """Kernels that `run` launches on the device, those that take longest first. Raises UserError when the profiler
    sees none."""
    on_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]) as profiler:
        run()
        if on_gpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CUDA if on_gpu else DeviceType.CPU
    found = [
        Launch(e.key, e.count, (e.self_device_time_total if on_gpu else e.self_cpu_time_total) / 1e6)
        for e in profiler.key_averages()
        if e.device_type == wanted
    ]
    if not found:
        raise UserError("--launches: the profiler of torch sees no kernels here; leave the flag out")
    return sorted(found, key=lambda launch: (-launch.seconds, launch.name))
