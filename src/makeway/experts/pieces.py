"""How a sweep runs the experts of a piece, once their bytes are on the device.

Owns nothing of the cache: it is told where each expert's bytes lie. Never changes the order of the sum: pieces come in
ascending order, and inside one the experts do.
Hazard: `start` comes once for each layer, before its first piece.
"""

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from makeway.experts.executors import add_expert
from makeway.experts.routed import RoutedInput
from makeway.experts.store import ExpertStore
from makeway.kernels import Ops


class Pieces(Protocol):
    """Adds the outputs of routed experts to the `acc` of the layer's input."""

    def start(self, layer: int, moe: RoutedInput, counts: Sequence[int]) -> None:
        """What the next pieces run on; `counts`: rows that chose each expert of the layer."""
        ...

    def add(self, experts: Sequence[int], rooms: Sequence[Tensor]) -> None:
        """Run `experts`, ascending, whose bytes lie in `rooms`, u8 [expert bytes] each."""
        ...


class ReferencePieces:
    """One expert after the other."""

    def __init__(self, store: ExpertStore, ops: Ops) -> None:
        self._store, self._ops = store, ops
        self._layer = 0
        self._moe: RoutedInput | None = None

    def start(self, layer: int, moe: RoutedInput, counts: Sequence[int]) -> None:
        self._layer, self._moe = layer, moe

    def add(self, experts: Sequence[int], rooms: Sequence[Tensor]) -> None:
        assert self._moe is not None
        stored = self._store.layers[self._layer]
        for expert, room in zip(experts, rooms, strict=True):
            add_expert(self._ops, self._moe, expert, weights=stored.weights_in(room))
