"""The sweep's executor: experts stream through a ring, piece by piece; those in slots are used in place.

Owns the ring's buffers while a sweep runs, and what crosses the link ahead of the computation. Never publishes, evicts
or learns: the cache is as it was afterwards.
Hazard: one call is one crossing of the layer's experts, so a sweep must call each layer once with all its tokens.
"""

from collections import deque
from dataclasses import dataclass

from torch import Tensor

from makeway.device import Event
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.pieces import Pieces
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.experts.store import uses
from makeway.memory.arena import View


@dataclass(frozen=True)
class _Piece:
    """Consecutive experts of a layer, and those among them that are to cross the link."""

    layer: int
    experts: range
    absent: list[int]


@dataclass(frozen=True)
class _Staged:
    """A piece whose copies into a buffer were asked for. `copied`: when they are complete; None: nothing is absent."""

    piece: _Piece
    buffer: int
    copied: Event | None


class StreamedExperts:
    """Pieces of `piece_experts` consecutive ids. `copies_all`: every expert that is not in a slot crosses the link,
    else only those that were routed."""

    def __init__(self, cache: ExpertCache, pieces: Pieces, *, ring: View, piece_experts: int, copies_all: bool) -> None:
        """`pieces` runs what is there. Raises EngineFailed when the ring has no room for one piece."""
        self._cache = cache
        self._device = cache.device
        self._pieces = pieces
        self._ring = ring
        self._piece_experts = piece_experts
        self._copies_all = copies_all
        self._buffer_bytes = piece_experts * cache.plan.sizes.stride_bytes
        self._n_buffers = ring.region.n_bytes // self._buffer_bytes
        if self._n_buffers < 1:
            raise EngineFailed(
                f"a piece of {piece_experts} experts does not fit the ring of {ring.region.n_bytes} bytes"
            )
        self._n_full = 0  # buffers whose piece has not run
        self._next_buffer = 0
        self._read: list[Event | None] = [None] * self._n_buffers  # when what was in a buffer had been used
        self._coming: deque[_Piece] = deque()  # in the order in which they will run; not asked for yet
        self._staged: deque[_Staged] = deque()
        # The ring was slots before, and this region's next owner is not the last one to use the link.
        self._device.copies_wait(self._device.record_compute())
        self._device.compute_waits(self._device.record_copies())

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """Every piece of the layer; while one computes, the next ones are on their way as far as the ring has room."""
        counts = uses(moe.ids, n_experts=self._cache.store.layers[layer].n_experts)
        used = {expert for expert, n in enumerate(counts) if n}
        if not self._is_coming(layer):
            self._announce(layer, used)
        self._pieces.start(layer, moe, counts)
        n_experts = self._cache.store.layers[layer].n_experts
        for _ in range(0, n_experts, self._piece_experts):
            self._stage()
            self._run(layer, self._staged.popleft(), used)
        self._stage()

    def prefetch(self, layer: int) -> None:
        """`layer` runs next after those announced before: its first pieces may cross the link already.

        Without effect when only routed experts cross, for these are known when the layer runs; twice is harmless.
        """
        if self._copies_all and not self._is_coming(layer):
            self._announce(layer, set())
            self._stage()

    def close(self) -> None:
        """The sweep is over, or was given up: what is computed from now on waits for the copies under way."""
        self._coming.clear()
        self._staged.clear()
        self._device.compute_waits(self._device.record_copies())

    def _is_coming(self, layer: int) -> bool:
        staged = (staged.piece for staged in self._staged)
        return any(piece.layer == layer for piece in (*staged, *self._coming))

    def _announce(self, layer: int, used: set[int]) -> None:
        n_experts = self._cache.store.layers[layer].n_experts
        slots = self._cache.table.slot_of[layer].tolist()
        for first in range(0, n_experts, self._piece_experts):
            experts = range(first, min(first + self._piece_experts, n_experts))
            absent = [e for e in experts if slots[e] == NONE and (self._copies_all or e in used)]
            self._coming.append(_Piece(layer, experts, absent))

    def _stage(self) -> None:
        """Ask for the copies of pieces to come while there are buffers; a piece that is all in slots needs none."""
        while self._coming and not (self._coming[0].absent and self._n_full == self._n_buffers):
            piece = self._coming.popleft()
            if not piece.absent:
                self._staged.append(_Staged(piece, NONE, None))
                continue
            buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % self._n_buffers
            self._n_full += 1
            was_read = self._read[buffer]
            if was_read is not None:
                self._device.copies_wait(was_read)
            for i, expert in enumerate(piece.absent):
                self._cache.fetch(piece.layer, expert, self._room(piece.layer, buffer, i=i))
            self._staged.append(_Staged(piece, buffer, self._device.record_copies()))

    def _room(self, layer: int, buffer: int, *, i: int) -> Tensor:
        """Where the `i`-th absent expert of a piece lies in its buffer, u8 [expert bytes]."""
        start = buffer * self._buffer_bytes + i * self._cache.plan.layers[layer].stride_bytes
        return self._ring.tensor[start : start + self._cache.store.layers[layer].expert_bytes]

    def _run(self, layer: int, staged: _Staged, used: set[int]) -> None:
        piece = staged.piece
        if piece.layer != layer:
            raise EngineFailed(f"layer {piece.layer} was announced to run next, not layer {layer}")
        if staged.copied is not None:
            self._device.compute_waits(staged.copied)
        experts = [expert for expert in piece.experts if expert in used]
        if experts:
            self._pieces.add(experts, [self._bytes(staged, expert) for expert in experts])
        if staged.copied is not None:
            self._read[staged.buffer] = self._device.record_compute()
            self._n_full -= 1

    def _bytes(self, staged: _Staged, expert: int) -> Tensor:
        """Where a routed expert lies, u8 [expert bytes]."""
        cache, layer = self._cache, staged.piece.layer
        if expert in staged.piece.absent:
            cache.counters.misses += 1
            i = staged.piece.absent.index(expert)
            return self._room(layer, staged.buffer, i=i)
        slot = int(cache.table.slot_of[layer, expert])
        if slot == NONE:
            raise EngineFailed(f"expert {expert} of layer {layer} left its slot while a sweep counted on it")
        cache.counters.hits += 1
        cache.counters.served_bytes += cache.plan.layers[layer].expert_bytes
        return cache.slot_bytes(layer, slot)
