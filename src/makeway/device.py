"""Where tensors live and work runs.

Owns the choice of a device and the copies over the link. Never falls back in silence: `auto` says what it took,
`cuda` without a GPU is an error.
Hazard: everything above this file must run unmodified on a CPU.
"""

import torch
from torch import Tensor

from makeway.config import DeviceName
from makeway.errors import UserError


def pick_device(name: DeviceName) -> torch.device:
    """The torch device for a name; raises UserError when CUDA is asked for and there is none."""
    available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise UserError("--device cuda: no CUDA device is visible to torch; use --device cpu, or install a CUDA torch")
    if name == "cpu" or not available:
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


class CpuDevice:
    """A device whose link is a copy in RAM: what is copied is complete when `copy` returns."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.n_copies = 0
        self.link_bytes = 0

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Host bytes `source` over the link to `target`; both u8, of the same number of elements."""
        assert target.numel() == source.numel()
        target.copy_(source.reshape(target.shape))
        self.n_copies += 1
        self.link_bytes += source.numel()
