"""The experts of all layers, bytes exactly as in the file: the truth that caches copy from.

Owns views of the mapped file. Never decodes or copies. Hazard: views die with the file.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.kernels import Weight


@dataclass(frozen=True)
class ExpertMatrix:
    """One of gate, up or down for all experts of a layer: raw u8 [n_experts, n_rows, row bytes]."""

    raw: Tensor
    type: GGMLType
    n_cols: int

    def of(self, expert: int) -> Weight:
        return Weight(self.raw[expert], self.type, self.n_cols)

    @property
    def expert_bytes(self) -> int:
        return self.raw[0].numel()


@dataclass(frozen=True)
class LayerExperts:
    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix

    @property
    def n_experts(self) -> int:
        return self.gate.raw.shape[0]

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down together."""
        return self.gate.expert_bytes + self.up.expert_bytes + self.down.expert_bytes

    def of(self, expert: int) -> tuple[Weight, Weight, Weight]:
        return self.gate.of(expert), self.up.of(expert), self.down.of(expert)


class ExpertStore:
    """`layers[i]`: the experts of layer i; the MTP block is one more layer at the end."""

    def __init__(self, layers: list[LayerExperts]) -> None:
        self.layers = layers

    @property
    def nbytes(self) -> int:
        return sum(layer.expert_bytes * layer.n_experts for layer in self.layers)


def used_experts(ids: Tensor) -> list[int]:
    """The routed experts, ascending; ids int64 [n, top_k], -1 where a row is padding."""
    return [int(e) for e in torch.unique(ids).tolist() if e >= 0]
