"""Where the bytes of all experts are: in the mapped file, and in the store, the truth that caches copy from.

Owns the store's host memory and the order of an expert's bytes there (gate, up, down; as in the file). Never decodes
and never changes a byte once loaded.
Hazard: a `Weight` of either is a view; it dies with the file or with `close()` of the store.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from makeway.device import Device
from makeway.errors import EngineFailed
from makeway.gguf.types import GGMLType, row_bytes
from makeway.kernels import Weight
from makeway.memory.facts import align_up

Weights = tuple[Weight, Weight, Weight]


class ExpertsOfLayer(Protocol):
    """The experts of one layer, wherever they are."""

    @property
    def n_experts(self) -> int: ...

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert: gate, up and down together."""
        ...

    def of(self, expert: int) -> Weights:
        """gate, up, down of one expert, in place."""
        ...


class AnyExperts(Protocol):
    """The experts of all layers; the MTP block is one more layer at the end."""

    @property
    def layers(self) -> Sequence[ExpertsOfLayer]: ...


@dataclass(frozen=True)
class MatrixShape:
    """One expert's gate, up or down: [n_rows, n_cols] values of `type`."""

    n_rows: int
    n_cols: int
    type: GGMLType

    @property
    def n_bytes(self) -> int:
        return self.n_rows * row_bytes(self.type, self.n_cols)


@dataclass(frozen=True)
class ExpertMatrix:
    """One of gate, up or down for all experts of a layer in the file: raw u8 [n_experts, n_rows, row bytes]."""

    raw: Tensor
    type: GGMLType
    n_cols: int

    def of(self, expert: int) -> Weight:
        return Weight(self.raw[expert], self.type, self.n_cols)

    @property
    def shape(self) -> MatrixShape:
        return MatrixShape(self.raw.shape[1], self.n_cols, self.type)


@dataclass(frozen=True)
class FileLayer:
    """A layer's experts in the mapped file. `tensors`: names of the tensors that hold them, which put together in this
    order, expert by expert, are gate, up, down (a fused tensor holds an expert's gate, then its up)."""

    gate: ExpertMatrix
    up: ExpertMatrix
    down: ExpertMatrix
    tensors: tuple[str, ...]

    @property
    def n_experts(self) -> int:
        return self.gate.raw.shape[0]

    @property
    def shapes(self) -> tuple[MatrixShape, MatrixShape, MatrixShape]:
        return self.gate.shape, self.up.shape, self.down.shape

    @property
    def expert_bytes(self) -> int:
        return sum(shape.n_bytes for shape in self.shapes)

    def of(self, expert: int) -> Weights:
        return self.gate.of(expert), self.up.of(expert), self.down.of(expert)


class FileExperts:
    """Experts as views of the mapped file: read page by page as they are used, and never over the link."""

    def __init__(self, layers: Sequence[FileLayer]) -> None:
        self.layers = list(layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.expert_bytes * layer.n_experts for layer in self.layers)


@dataclass(frozen=True)
class StoredLayer:
    """A layer's experts in the store: raw u8 [n_experts, stride bytes], of which the first `expert_bytes` are used."""

    raw: Tensor
    shapes: tuple[MatrixShape, MatrixShape, MatrixShape]

    @property
    def n_experts(self) -> int:
        return self.raw.shape[0]

    @property
    def expert_bytes(self) -> int:
        return sum(shape.n_bytes for shape in self.shapes)

    def bytes_of(self, expert: int) -> Tensor:
        """u8 [expert bytes], in place."""
        return self.raw[expert, : self.expert_bytes]

    def of(self, expert: int) -> Weights:
        return self.weights_in(self.bytes_of(expert))

    def weights_in(self, room: Tensor) -> Weights:
        """gate, up, down of an expert of this layer whose bytes lie in `room`, u8 [expert bytes] on any device."""
        parts = torch.split(room, [shape.n_bytes for shape in self.shapes])
        gate, up, down = (
            Weight(part.view(shape.n_rows, -1), shape.type, shape.n_cols)
            for part, shape in zip(parts, self.shapes, strict=True)
        )
        return gate, up, down


class ExpertStore:
    """All experts in one run of host memory: layer by layer, an expert every stride, aligned as slots are.

    `layers[i]`: the experts of layer i; the MTP block is one more layer at the end. `memory`: how it is placed.
    """

    def __init__(self, layers: Sequence[FileLayer], device: Device) -> None:
        """Room for these experts, not filled; use `load_experts`. Raises EngineFailed when there is no memory."""
        sizes = [(layer.n_experts, align_up(layer.expert_bytes)) for layer in layers]
        self.memory = device.host_alloc(sum(n * stride for n, stride in sizes))
        parts = torch.split(self.memory.tensor, [n * stride for n, stride in sizes])
        self.layers = [
            StoredLayer(part.view(n, stride), layer.shapes)
            for part, (n, stride), layer in zip(parts, sizes, layers, strict=True)
        ]

    @property
    def nbytes(self) -> int:
        """Host memory taken; 0 after `close`."""
        return self.memory.nbytes

    def bytes_of(self, layer: int, expert: int) -> Tensor:
        """The expert's bytes, u8 [expert bytes], in place. Raises EngineFailed after `close`."""
        if not self.layers:
            raise EngineFailed("the expert store was used after close()")
        return self.layers[layer].bytes_of(expert)

    def close(self) -> None:
        """Give the memory back; again is harmless."""
        self.layers = []
        self.memory.close()


def used_experts(ids: Tensor) -> list[int]:
    """The routed experts, ascending; ids int32 or int64 [n, top_k], -1 where a row is padding."""
    return [int(e) for e in torch.unique(ids).tolist() if e >= 0]


def uses(ids: Tensor, *, n_experts: int) -> list[int]:
    """Rows that chose each expert; ids as above."""
    counts = torch.bincount(ids.reshape(-1).long() + 1, minlength=n_experts + 1)
    return [int(n) for n in counts[1:].tolist()]
