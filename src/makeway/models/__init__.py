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
from makeway.models.weights import Place

ARCHITECTURES: dict[str, Callable[[GGUFFile, Ops, torch.device, Place | None], Model]] = {
    "qwen3moe": Qwen3Moe,
    "qwen3next": Qwen3Next,
    "qwen35moe": Qwen35Moe,
    "qwen4exp": Qwen4Exp,
}


def load_model(file: GGUFFile, ops: Ops, *, device: torch.device, place: Place | None = None) -> Model:
    """The model of a file; raises UserError naming the supported architectures when it is none of them.

    `place` puts weights where the plan wants them; without it they stay views of the mapped file.
    """
    architecture = file.get_str("general.architecture")
    if architecture not in ARCHITECTURES:
        supported = ", ".join(sorted(ARCHITECTURES))
        raise UserError(f"{file.paths[0]}: architecture '{architecture}' is not supported; makeway runs {supported}")
    return ARCHITECTURES[architecture](file, ops, device, place)


__all__ = ["ARCHITECTURES", "Model", "ModelFacts", "load_model"]
