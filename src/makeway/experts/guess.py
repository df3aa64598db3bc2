"""Misses of the next layer, guessed and fetched while this layer's experts and the next mixer run.

Owns the stream beside the step's own, the lists of guesses, and how many a layer may make. Never decides what runs:
the next layer's plan takes from the list what it needs and fetches the rest.
Hazard: a wrong guess costs the link as much as a right one, so a layer that is wrong more often than right stops, and
tries again now and then.

The guess is what the next layer's router says of this layer's input: the residual changes little from one layer to the
next. Known from Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading, section 3.2.
"""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.kernels import Weight
from makeway.kernels.triton.guess import Guesses, guess_step
from makeway.kernels.triton.small import route
from makeway.kernels.triton.step_plan import Rooms, Source, fetch_missing

LEAST_RIGHT = 0.5  # share of a layer's guesses: a right one hides a copy, a wrong one delays another by as much
MEMORY = 0.97  # weight that a step's guesses keep until the next
TRY_EVERY = 32  # steps, of a layer that has stopped
Multiply = Callable[[Tensor, Weight], Tensor]


class Limits:
    """How many guesses each layer may make in the next step: int32 [layers], in place in `limits`."""

    def __init__(self, limits: NDArray[np.int32], most: int) -> None:
        self.limits, self._most = limits, most
        self._right, self._made = np.zeros((2, len(limits)))
        self._n_steps = 0
        limits[...] = most

    def observe(self, made: NDArray[np.int64], right: NDArray[np.int64]) -> None:
        """By layer, of one step: how many guesses there were, and how many of them were needed."""
        self._n_steps += 1
        self._made = MEMORY * self._made + made
        self._right = MEMORY * self._right + right
        pays = self._right >= LEAST_RIGHT * self._made
        self.limits[...] = np.where(pays | (self._n_steps % TRY_EVERY == 0), self._most, 0)


@dataclass(frozen=True)
class Told:
    """What a layer's guesses are told and tell, on the device: the slot table's row, wanted misses, spares, the limit
    int32 [1], and what was guessed int32 [G]."""

    slot_of: Tensor
    wanted: Tensor
    spares: Tensor
    limit: Tensor
    guessed: Tensor


class Guesser:
    """One list for even layers and one for odd ones: a layer's guesses are read while the next one's are fetched."""

    def __init__(self, n: int, *, rooms_at: int, room_bytes: int, multiply: Multiply, device: torch.device) -> None:
        """`n` guesses a layer, a power of two; 2 n rooms of `room_bytes` lie at byte `rooms_at` of the arena.
        `multiply`: by a router, on any stream."""
        self.n = n
        self._rooms_at, self._room_bytes = rooms_at, room_bytes
        self._multiply = multiply
        self._lists = tuple(Guesses.empty(n, device) for _ in range(2))
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._open: tuple[int, Tensor] | None = None  # the layer, and its input, which nobody may overwrite meanwhile

    def begin(
        self,
        layer: int,
        x: Tensor,
        router: Weight,
        *,
        top_k: int,
        told: Told,
        rooms: Rooms,
        source: Source,
        live: Tensor | None,
    ) -> None:
        """Behind what the current stream has got so far: guess `layer`'s misses from x f32 [n, hidden], fetch them."""
        assert self._open is None
        self._open = (layer, x)
        place = layer % 2
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            ids, _ = route(self._multiply(x, router), top_k)
            guess_step(
                self._lists[place],
                ids,
                slot_of=told.slot_of,
                wanted=told.wanted,
                spares=told.spares,
                limit=told.limit,
                told=told.guessed,
                slots=(rooms.slots_at, rooms.slot_stride),
                rooms=(self._rooms_at + place * self.n * self._room_bytes, self._room_bytes),
                live=live,
            )
            fetch_missing(self._lists[place], source)

    def join(self, layer: int) -> Guesses | None:
        """The current stream waits for `layer`'s guesses; None when nobody made any."""
        if self._open is None:
            return None
        assert self._open[0] == layer
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)
        self._open = None
        return self._lists[layer % 2]
