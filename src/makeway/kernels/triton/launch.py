"""Launches that may begin while the kernel before them still runs (CUDA's programmatic dependent launches).

Owns the rule that keeps them right: such a kernel calls `begin` before its first store or return, in every program, and
before it loads anything that a kernel of the same pass has written. What was there before the pass (whose rows these
are, block tables, a recurrent state that nobody else touches) may be on its way while the kernel waits. Never lets a
kernel start early where the GPU cannot make it wait.
Hazard: a kernel that skips the wait ends before those in front of it have, and the next one's wait covers it alone.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def begin(PDL: tl.constexpr):
    """Where PDL: waits until every kernel before has ended and its stores are visible, then lets the next one start
    (which waits in turn). In every kernel that is launched with `overlap`."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()


@cache
def overlap(device: torch.device, *, joins: bool = False) -> dict[str, bool]:
    """Keyword arguments of a launch of a kernel that calls `begin(PDL)`: whether it may start early on this device,
    which takes compute capability 9.0 (PTX ISA, "griddepcontrol"). `joins`: it waits for another stream too, and so
    starts when both have ended."""
    can = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"PDL": can, "launch_pdl": can and not joins}
