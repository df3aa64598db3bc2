"""The sweep's executor: experts stream through a ring, piece by piece; those in slots are used in place.

Owns the ring's buffers while a sweep runs, and what crosses the link ahead of the computation. Never publishes, evicts
or learns: the cache is as it was afterwards.
Hazard: one call is one crossing of the layer's experts, so a sweep must call each layer once with all its tokens.
"""

from collections import deque
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from makeway.device import Event
from makeway.errors import EngineFailed
from makeway.experts.cache import ExpertCache
from makeway.experts.pieces import Pieces, Uses
from makeway.experts.routed import RoutedInput
from makeway.experts.slots import NONE
from makeway.memory.arena import View

Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class _Piece:
    """Experts of a layer; those that are `absent` cross the link into `buffer`, to the bytes `to` of the ring, all in
    ascending order."""

    layer: int
    experts: range
    absent: Ints
    to: Ints
    buffer: int


@dataclass(frozen=True)
class _Places:
    """Where a layer's experts are, or will be: the slot of each when it was announced, and its first byte's place in
    the arena; and how many pieces they are."""

    slots: Ints
    where: Ints
    n_pieces: int


@dataclass(frozen=True)
class _Staged:
    """A piece whose copies into its buffer were asked for. `copied`: when they are complete; None: none are needed."""

    piece: _Piece
    copied: Event | None


class StreamedExperts:
    """`copies_all`: every expert that is not in a slot crosses the link, in pieces of `piece_experts` consecutive ids;
    else only those that were routed do, and pieces are of so many of these."""

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
        self._places: dict[int, _Places] = {}  # of the layers that are coming
        self._coming: deque[_Piece] = deque()  # in the order in which they will run; not asked for yet
        self._staged: deque[_Staged] = deque()
        self._uncounted: deque[tuple[int, Flags, Uses]] = deque()
        # The ring was slots before, and this region's next owner is not the last one to use the link.
        self._device.copies_wait(self._device.record_compute())
        self._device.compute_waits(self._device.record_copies())

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        """Every piece of the layer; while one computes, the next ones are on their way as far as the ring has room."""
        uses = self._pieces.start(layer, moe)
        if layer not in self._places:
            self._announce(layer, None if self._copies_all else uses.get() > 0)
        places = self._places.pop(layer)
        self._check(layer, places.slots)
        self._stage()  # the link may have been idle until now: nothing comes before it
        self._pieces.place(places.where)
        for _ in range(places.n_pieces):
            self._stage()
            self._run(layer, self._staged.popleft())
        self._stage()
        self._uncounted.append((layer, places.slots != NONE, uses))
        self._count(all_of_them=False)

    def prefetch(self, layer: int) -> None:
        """`layer` runs next after those announced before: its first pieces may cross the link already.

        Without effect when only routed experts cross, for these are known when the layer runs; twice is harmless.
        """
        if self._copies_all and layer not in self._places:
            self._announce(layer, None)
            self._stage()

    def close(self) -> None:
        """The sweep is over, or was given up: what is computed from now on waits for the copies under way."""
        self._coming.clear()
        self._staged.clear()
        self._places.clear()
        self._device.compute_waits(self._device.record_copies())
        self._count(all_of_them=True)

    def _slots(self, layer: int) -> Ints:
        """The slot of each expert of the layer, or NONE."""
        n_experts = self._cache.store.layers[layer].n_experts
        return self._cache.table.slot_of[layer, :n_experts].astype(np.int64)

    def _check(self, layer: int, slots: Ints) -> None:
        """What was in slots when the layer was announced still is. Raises EngineFailed."""
        gone = np.flatnonzero((self._slots(layer) != slots) & (slots != NONE))
        if gone.size:
            raise EngineFailed(f"expert {gone[0]} of layer {layer} left its slot while a sweep counted on it")

    def _announce(self, layer: int, used: Flags | None) -> None:
        """`used`: the experts that were routed, where no others cross the link."""
        slots = self._slots(layer)
        resident = slots != NONE
        wanted = ~resident if used is None else used & ~resident
        where = np.zeros(slots.size, dtype=np.int64)
        where[resident] = self._cache.slot_offsets(layer, slots[resident])
        stride = self._cache.plan.layers[layer].stride_bytes
        ids = np.arange(slots.size) if used is None else np.flatnonzero(used)
        pieces = np.split(ids, range(self._piece_experts, ids.size, self._piece_experts)) if ids.size else []
        for piece in pieces:
            absent = piece[wanted[piece]]
            buffer, to = NONE, absent
            if absent.size:
                buffer, self._next_buffer = self._next_buffer, (self._next_buffer + 1) % self._n_buffers
                to = buffer * self._buffer_bytes + np.arange(absent.size) * stride
                where[absent] = self._ring.region.offset + to
            self._coming.append(_Piece(layer, range(int(piece[0]), int(piece[-1]) + 1), absent, to, buffer))
        self._places[layer] = _Places(slots, where, len(pieces))

    def _stage(self) -> None:
        """Ask for the copies of pieces to come while there are buffers; a piece that is all in slots needs none."""
        while self._coming and not (self._coming[0].absent.size and self._n_full == self._n_buffers):
            piece = self._coming.popleft()
            if not piece.absent.size:
                self._staged.append(_Staged(piece, None))
                continue
            self._n_full += 1
            was_read = self._read[piece.buffer]
            if was_read is not None:
                self._device.copies_wait(was_read)
            self._cache.fetch_all(piece.layer, piece.absent, self._ring.tensor, to=piece.to)
            self._staged.append(_Staged(piece, self._device.record_copies()))

    def _run(self, layer: int, staged: _Staged) -> None:
        piece = staged.piece
        if piece.layer != layer:
            raise EngineFailed(f"layer {piece.layer} was announced to run next, not layer {layer}")
        if staged.copied is not None:
            self._device.compute_waits(staged.copied)
        self._pieces.add(piece.experts)
        if staged.copied is not None:
            self._read[piece.buffer] = self._device.record_compute()
            self._n_full -= 1

    def _count(self, *, all_of_them: bool) -> None:
        """Hits and misses of the layers whose routing the host knows by now, or of all that ran."""
        counters = self._cache.counters
        while self._uncounted and (all_of_them or self._uncounted[0][2].is_there()):
            layer, resident, uses = self._uncounted.popleft()
            used = uses.get() > 0
            n_hits = int((used & resident).sum())
            counters.hits += n_hits
            counters.misses += int(used.sum()) - n_hits
            counters.served_bytes += n_hits * self._cache.plan.layers[layer].expert_bytes
