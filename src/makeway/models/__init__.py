"""The model architectures makeway runs: one file each, found by the GGUF's `general.architecture`."""

from collections.abc import Callable

import torch

from makeway.errors import UserError
from makeway.gguf import GGUFFile
from makeway.kernels import Ops
from makeway.models.base import Model, ModelFacts
from makeway.models.qwen3moe import Qwen3Moe
from makeway.models.qwen3next import Qwen3Next
from makeway.models.qwen4exp import Qwen4Exp
from makeway.models.qwen35moe import Qwen35Moe

ARCHITECTURES: dict[str, Callable[[GGUFFile, Ops, torch.device], Model]] = {
    "qwen3moe": Qwen3Moe,
    "qwen3next": Qwen3Next,
    "qwen35moe": Qwen35Moe,
    "qwen4exp": Qwen4Exp,
}


def load_model(file: GGUFFile, ops: Ops, *, device: torch.device) -> Model:
    """The model of a file; raises UserError naming the supported architectures when it is none of them."""
    architecture = file.get_str("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{file.paths[0]}: architecture '{architecture}' is not supported; makeway runs {supported}")
    return ARCHITECTURES[architecture](file, ops, device)


__all__ = ["ARCHITECTURES", "Model", "ModelFacts", "load_model"]
