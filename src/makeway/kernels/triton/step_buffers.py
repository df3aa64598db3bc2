"""What passes from kernel to kernel within a layer of a decode step, and what its plan is told and tells.

Owns that memory; the plan (`step_plan.py`) fills it. Never knows what an entry's bytes are.
Hazard: the buffers are reused by the next layer and step on the same stream; a `Report` belongs to the caller.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from makeway.kernels.triton.linear import MAX_ROWS


@dataclass(frozen=True)
class Rooms:
    """Where experts of one layer lie in the arena, in bytes from its start: slot s at slots_at + s * slot_stride; miss
    number t that takes no spare at transient_at + t * transient_stride. All multiples of 16.
    """

    slots_at: int
    slot_stride: int
    transient_at: int
    transient_stride: int


class StepBuffers:
    """What passes from kernel to kernel within a step's layer: entries (see the module) and intermediate values."""

    def __init__(self, device: torch.device, *, n: int, top_k: int, hidden: int, width: int) -> None:
        """For n <= 8 rows."""
        assert 0 < n <= MAX_ROWS
        entries = n * top_k
        self.n = n
        self.top_k = top_k
        self._hidden, self._width = hidden, width
        self.experts = torch.full((entries,), -1, dtype=torch.int32, device=device)
        self.offsets = torch.zeros(entries, dtype=torch.int64, device=device)
        self.missing = torch.zeros(entries, dtype=torch.int32, device=device)
        self.chosen_by = torch.zeros(entries, dtype=torch.int32, device=device)
        self.weights = torch.zeros((entries, MAX_ROWS), dtype=torch.float32, device=device)
        self.count = torch.zeros(1, dtype=torch.int32, device=device)

    @cached_property
    def hidden(self) -> Tensor:
        """Between Triton's two kernels; those in CUDA C++ have their own."""
        shape = (2, self.n_entries, self.n, self._width)
        return torch.empty(shape, dtype=torch.bfloat16, device=self.experts.device)

    @cached_property
    def outputs(self) -> Tensor:
        """Of each entry, before Triton's second kernel adds them."""
        return torch.empty((self.n_entries, self.n, self._hidden), dtype=torch.float32, device=self.experts.device)

    @property
    def n_entries(self) -> int:
        """Most entries there can be."""
        return self.experts.numel()

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, Tensor))


@dataclass(frozen=True)
class Report:
    """What the plan of a layer tells the host, int32: routed [rows, top_k], from row first [1] on the ids (-1: none);
    fetched [n_spares], the expert in each spare or -1."""

    first: Tensor
    routed: Tensor
    fetched: Tensor
