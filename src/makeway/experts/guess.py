"""Misses of the layers ahead, guessed and fetched while this layer's experts and the mixers behind it run.

Owns two streams beside the step's own, the lists of guesses, and how many a layer may make. Never decides what runs:
a layer's plan takes from its list what it needs and fetches the rest.
Hazard: a wrong guess costs the link as much as a right one, so a layer that is wrong more often than right stops, and
tries again now and then.

The guess is what a later layer's router says of this layer's input: the residual changes little from one layer to the
next. It is made in rounds: two layers ahead, when a copy has time, and again one layer ahead, of what was not guessed
then. Known from Eliseev and Mazur, Fast Inference of Mixture-of-Experts Language Models with Offloading, section 3.2.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.experts.slots import NONE
from makeway.kernels import Weight
from makeway.kernels.triton.fetch import Source, fetch_guesses
from makeway.kernels.triton.guess import Guesses, guess_step
from makeway.kernels.triton.small import route
from makeway.memory.sizes import GUESS_LISTS, GUESS_ROUNDS

LEAST_RIGHT = 0.5  # share of a layer's guesses: a right one hides a copy, a wrong one delays another by as much
MEMORY = 0.97  # weight that a step's guesses keep until the next
TRY_EVERY = 32  # steps, of a layer that has stopped
Multiply = Callable[[Tensor, Sequence[Weight]], Sequence[Tensor]]


class Limits:
    """How many guesses each layer may make in a round of the next step: `limits` int32 [layers]."""

    def __init__(self, n_layers: int, most: int) -> None:
        self.limits: NDArray[np.int32] = np.full(n_layers, most, dtype=np.int32)
        self._most = most
        self._right, self._made = np.zeros((2, n_layers))
        self._n_steps = 0

    def observe(self, made: NDArray[np.int64], right: NDArray[np.int64]) -> None:
        """By layer, of one step: how many guesses there were, and how many of them were needed."""
        self._n_steps += 1
        self._made = MEMORY * self._made + made
        self._right = MEMORY * self._right + right
        pays = self._right >= LEAST_RIGHT * self._made
        self.limits[...] = np.where(pays | (self._n_steps % TRY_EVERY == 0), self._most, 0)


@dataclass(frozen=True)
class Ahead:
    """A round of a later layer's guesses: the layer, the round's number, the router and how many it chooses, where its
    experts are fetched from; what guesses are told and tell, on the device: the slot table's row, wanted misses,
    spares, the limit int32 [1], and what was guessed int32 [G]. slots: where the layer's slot 0 lies in the arena, and
    how far the next one is."""

    layer: int
    turn: int
    router: Weight
    top_k: int
    source: Source
    slot_of: Tensor
    wanted: Tensor
    spares: Tensor
    limit: Tensor
    guessed: Tensor
    slots: tuple[int, int]


def rounds_from(layer: int, n_layers: int) -> list[tuple[int, int]]:
    """Layers to be guessed from a layer's input, the next one first, and the number of the round. Layers that have no
    layer so far ahead of them have but the later rounds."""
    rounds = [(layer + ahead, i) for i, ahead in enumerate(GUESS_ROUNDS)]
    return [(target, i) for target, i in reversed(rounds) if target < n_layers]


class Guesser:
    """Guesses are found beside this layer's plan, and fetched behind its misses. A layer's list and rooms are those of
    the layer GUESS_LISTS before: one layer's are read while the next ones' are filled."""

    def __init__(self, n: int, *, rooms_at: int, room_bytes: int, multiply: Multiply, device: torch.device) -> None:
        """`n` guesses a layer, a power of two in each round; GUESS_LISTS n rooms of `room_bytes` lie at byte `rooms_at`
        of the arena. `multiply`: by routers, on any stream."""
        assert n % len(GUESS_ROUNDS) == 0
        self._n, self._of_round, self._rooms_at, self._room_bytes = n, n // len(GUESS_ROUNDS), rooms_at, room_bytes
        self._multiply = multiply
        self._lists = tuple(Guesses.empty(n, device) for _ in range(GUESS_LISTS))
        self._open: dict[int, list[Tensor]] = {}  # layers nobody has joined, and what was asked with, which must stay
        self._asks, self._fetches = _Beside(device), _Beside(device)

    def ask(self, x: Tensor, ahead: Sequence[Ahead], *, live: Tensor | None) -> None:
        """Guess misses from x f32 [n, hidden], which the current stream has made: rounds of different layers."""
        self._asks.wait_for_current()
        is_first = [one.layer not in self._open for one in ahead]
        for one, first in zip(ahead, is_first, strict=True):
            self._open.setdefault(one.layer, []).append(x)
            if first:
                self._asks.wait_for(self._fetches, self._place(one))  # the copies of the layer that had the list before
        with self._asks.running(*map(self._place, ahead)):
            for one, first, logits in zip(ahead, is_first, self._multiply(x, [a.router for a in ahead]), strict=True):
                self._ask(one, route(logits, one.top_k)[0], is_first=first, live=live)

    def _ask(self, one: Ahead, ids: Tensor, *, is_first: bool, live: Tensor | None) -> None:
        place, begin = self._place(one), one.turn * self._of_round
        guesses = self._lists[place]
        if is_first:  # rounds that had no layer to be asked from
            guesses.part(0, begin).clear()
            one.guessed[:begin].fill_(NONE)
        guess_step(
            self._part(one),
            ids,
            slot_of=one.slot_of,
            wanted=one.wanted,
            spares=one.spares,
            limit=one.limit,
            told=one.guessed[begin : begin + self._of_round],
            slots=one.slots,
            rooms=(self._rooms_at + (place * self._n + begin) * self._room_bytes, self._room_bytes),
            live=live,
            earlier=guesses.part(0, begin) if begin else None,
        )

    def fetch(self, ahead: Sequence[Ahead]) -> None:
        """Fetch what `ask` guessed, once the current stream has got here: its own misses go first."""
        for one in ahead:
            self._fetches.wait_for(self._asks, self._place(one))
        self._fetches.wait_for_current()
        with self._fetches.running(*map(self._place, ahead)):
            lists = [(one.source, self._part(one)) for one in ahead]
            fetch_guesses([(source, part.experts, part.offsets, part.arrived) for source, part in lists])

    @staticmethod
    def _place(one: Ahead) -> int:
        return one.layer % GUESS_LISTS

    def _part(self, one: Ahead) -> Guesses:
        """Of the layer's list, what this round makes."""
        begin = one.turn * self._of_round
        return self._lists[self._place(one)].part(begin, begin + self._of_round)

    def join(self, layer: int) -> Guesses | None:
        """The current stream waits for the list of `layer`'s guesses, not for the copies; None when nobody made any."""
        if self._open.pop(layer, None) is None:
            return None
        self._asks.let_current_wait(layer % GUESS_LISTS)
        return self._lists[layer % GUESS_LISTS]

    def end_pass(self) -> None:
        """The current stream waits for all copies."""
        for place in range(GUESS_LISTS):
            self._fetches.let_current_wait(place)
        self.forget()

    def forget(self) -> None:
        """Before a pass: nobody takes what one that broke off began, and a captured one waits for nothing outside."""
        self._open.clear()
        self._asks.forget()
        self._fetches.forget()


class _Beside:
    """A stream beside the current one, and what ran on it last for each list; without a GPU everything runs in line."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._done: list[torch.cuda.Event | None] = [None] * GUESS_LISTS

    @contextmanager
    def running(self, *places: int) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.stream(self._stream):
            yield
        done = self._stream.record_event()
        for place in places:
            self._done[place] = done

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
        self._done = [None] * GUESS_LISTS
