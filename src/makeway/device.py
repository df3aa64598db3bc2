"""Where tensors live and work runs.

Owns the choice of a device. Never falls back in silence: `auto` says what it took, `cuda` without a GPU is an error.
Hazard: everything above this file must run unmodified on a CPU.
"""

import torch

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
