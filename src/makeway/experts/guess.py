"""Misses of the next layer, guessed and fetched while this layer's experts and the next mixer run.

Owns two streams beside the step's own, the lists of guesses, and how many a layer may make. Never decides what runs:
the next layer's plan takes from the list what it needs and fetches the rest.
Hazard: a wrong guess costs the link as much as a right one, so a layer that is wrong more often than right stops, and
tries again now and then.

The guess is what the next layer's router says of this layer's input: the residual changes little from one layer to the
next. Known from Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading, section 3.2.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.kernels import Weight
from makeway.kernels.triton.fetch import Source, fetch_guesses
from makeway.kernels.triton.guess import Guesses, guess_step
from makeway.kernels.triton.small import route

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
    """Guesses are found beside this layer's plan, and fetched behind its misses. Lists and rooms are there twice: one
    layer's are read while the next one's are filled."""

    def __init__(self, n: int, *, rooms_at: int, room_bytes: int, multiply: Multiply, device: torch.device) -> None:
        """`n` guesses a layer, a power of two; 2 n rooms of `room_bytes` lie at byte `rooms_at` of the arena.
        `multiply`: by a router, on any stream."""
        self._n, self._rooms_at, self._room_bytes = n, rooms_at, room_bytes
        self._multiply = multiply
        self._lists = tuple(Guesses.empty(n, device) for _ in range(2))
        self._open: dict[int, Tensor] = {}  # layers that nobody has joined, and their inputs, which must stay meanwhile
        self._asks, self._fetches = _Beside(device), _Beside(device)

    def ask(
        self,
        layer: int,
        x: Tensor,
        router: Weight,
        *,
        top_k: int,
        told: Told,
        slots: tuple[int, int],
        live: Tensor | None,
    ) -> None:
        """Guess `layer`'s misses from x f32 [n, hidden], which the current stream has made. slots: where the layer's
        slot 0 lies in the arena, and how far the next one is."""
        place = layer % 2
        self._open[layer] = x
        self._asks.wait_for_current()
        self._asks.wait_for(self._fetches, place)  # the list's copies two layers back
        with self._asks.running(place):
            ids, _ = route(self._multiply(x, router), top_k)
            guess_step(
                self._lists[place],
                ids,
                slot_of=told.slot_of,
                wanted=told.wanted,
                spares=told.spares,
                limit=told.limit,
                told=told.guessed,
                slots=slots,
                rooms=(self._rooms_at + place * self._n * self._room_bytes, self._room_bytes),
                live=live,
            )

    def fetch(self, layer: int, source: Source) -> None:
        """Fetch what was guessed, once the current stream has got here: its own misses go first."""
        place = layer % 2
        guesses = self._lists[place]
        self._fetches.wait_for(self._asks, place)
        self._fetches.wait_for_current()
        with self._fetches.running(place):
            fetch_guesses(source, guesses.experts, guesses.offsets, arrived=guesses.arrived)

    def join(self, layer: int) -> Guesses | None:
        """The current stream waits for the list of `layer`'s guesses, not for the copies; None when nobody made any."""
        if self._open.pop(layer, None) is None:
            return None
        self._asks.let_current_wait(layer % 2)
        return self._lists[layer % 2]

    def end_pass(self) -> None:
        """The current stream waits for all copies."""
        for place in range(2):
            self._fetches.let_current_wait(place)
        self.forget()

    def forget(self) -> None:
        """Before a pass: nobody takes what one that broke off began, and a captured one waits for nothing outside."""
        self._open.clear()
        self._asks.forget()
        self._fetches.forget()


class _Beside:
    """A stream beside the current one, and what ran on it last for each of two places; without a GPU everything runs
    in line."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._done: list[torch.cuda.Event | None] = [None, None]

    @contextmanager
    def running(self, place: int) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        self._done[place] = self._stream.record_event()

    def wait_for_current(self) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())

    def wait_for(self, other: "_Beside", place: int) -> None:
        done = other._done[place]
        if self._stream is not None and done is not None:
            self._stream.wait_event(done)

    def let_current_wait(self, place: int) -> None:
        done = self._done[place]
        if done is not None:
            torch.cuda.current_stream().wait_event(done)

    def forget(self) -> None:
        self._done = [None, None]
