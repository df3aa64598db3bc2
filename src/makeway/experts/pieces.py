"""How a sweep runs the experts of a piece, once their bytes are on the device.

Owns nothing of the cache: it is told where each expert's bytes lie. Never changes the order of the sum: pieces come in
ascending order, and inside one the experts do.
Hazard: `start` and `place` come once for each layer, in this order, before its first piece.
"""

from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from makeway.experts.executors import add_expert
from makeway.experts.routed import RoutedInput
from makeway.experts.store import ExpertStore, uses
from makeway.kernels import Ops


class Uses(Protocol):
    """How many rows of a layer chose each expert."""

    def is_there(self) -> bool:
        """Whether `get` need not wait for the device."""
        ...

    def get(self) -> NDArray[np.int64]:
        """[experts of the layer]; waits for the layer's routing, not for what is computed behind it."""
        ...


class Pieces(Protocol):
    """Adds the outputs of routed experts to the `acc` of the layer's input."""

    def start(self, layer: int, moe: RoutedInput) -> Uses:
        """What the next pieces run on."""
        ...

    def place(self, where: NDArray[np.int64]) -> None:
        """Where each expert of the layer lies: bytes into the arena; anything for experts that nobody chose."""
        ...

    def add(self, experts: range) -> None:
        """Run those of `experts` that somebody chose, ascending. If the host had asked for the uses before `place`,
        pieces are of so many chosen experts, else of so many experts."""
        ...

    def ask_for_kernels(self, layer: int, moe: RoutedInput) -> None:
        """Launches what any piece of the layer may launch, where launches do nothing; `moe` holds anything."""
        ...


class KnownUses:
    """Uses that the host has counted."""

    def __init__(self, counts: NDArray[np.int64]) -> None:
        self._counts = counts

    def is_there(self) -> bool:
        return True

    def get(self) -> NDArray[np.int64]:
        return self._counts


class ReferencePieces:
    """One expert after the other."""

    def __init__(self, store: ExpertStore, ops: Ops, *, arena: Tensor) -> None:
        """`arena` u8: all of it."""
        self._store, self._ops, self._arena = store, ops, arena
        self._layer = 0
        self._moe: RoutedInput | None = None
        self._counts = self._where = np.zeros(0, dtype=np.int64)

    def start(self, layer: int, moe: RoutedInput) -> Uses:
        self._layer, self._moe = layer, moe
        n_experts = self._store.layers[layer].n_experts
        self._counts = np.array(uses(moe.ids, n_experts=n_experts), dtype=np.int64)
        return KnownUses(self._counts)

    def ask_for_kernels(self, layer: int, moe: RoutedInput) -> None:
        return None

    def place(self, where: NDArray[np.int64]) -> None:
        self._where = where

    def add(self, experts: range) -> None:
        assert self._moe is not None
        stored = self._store.layers[self._layer]
        for expert in experts:
            if self._counts[expert]:
                begin = int(self._where[expert])
                room = self._arena[begin : begin + stored.expert_bytes]
                add_expert(self._ops, self._moe, expert, weights=stored.weights_in(room))
