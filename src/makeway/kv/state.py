"""What sequences keep besides KV: delta-rule states, convolution tails, raw indexer keys, the n-gram windows.

Owns the pool of places, one per open sequence, and each place's kept rows: the inputs of a verify step's rows, from
which the rows that stand are replayed. Never truncates: a recurrent state has no past, so going back otherwise means
restoring a snapshot. Hazard: a snapshot is a deep copy; a shallow one would change under the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from makeway.kernels import ConvState, DeltaState, Ops, Rows
from makeway.kv.blocks import Places
from makeway.kv.cache import KVShape
from makeway.memory.workspace import Room, padded_bytes

Key = tuple[str, int]
"""(kind, layer) of a tensor."""


@dataclass(frozen=True)
class StateShape:
    """Sizes of a linear-attention layer's state."""

    n_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_taps: int
    n_k_heads: int
    tiled: bool  # V head j uses K head j mod n_k_heads, else j div (n_heads / n_k_heads)


@dataclass(frozen=True)
class StateShapes:
    """What one sequence keeps, by layer: (kind, layer) -> shape of a float32 tensor.

    `shapes`, kinds: "delta" [heads, d_k, d_v]; "conv" [taps - 1, channels]; "ple_conv" [tail, width]; "raw" [ring
    rows, index_dim] (indexer keys of the last positions, at position % ring rows); "draft" (what the MTP block needs of
    the trunk for the last token, which its next input is made of). `kept`, what a verify step keeps of
    each row: "k" [k_heads, d_k], "v" [heads, d_v], "gates" [2, heads] (decay, beta), "conv" [channels], "ple_conv"
    [width]. Raw indexer keys, like KV, are overwritten by position and need no replay: the ring is long enough.
    """

    shapes: Mapping[Key, tuple[int, ...]]
    kept: Mapping[Key, tuple[int, ...]]
    tiled: Mapping[int, bool]

    @classmethod
    def of(
        cls,
        linear: Mapping[int, StateShape],
        *,
        kv: Mapping[int, KVShape],
        ple: Mapping[int, tuple[int, int]],
        draft: Mapping[int, tuple[int, ...]] | None = None,
    ) -> "StateShapes":
        """From a model's facts: linear-attention layers, attention layers (for their indexers), PLE tails, and, when
        it drafts, its MTP block."""
        shapes: dict[Key, tuple[int, ...]] = {}
        kept: dict[Key, tuple[int, ...]] = {}
        for layer, s in linear.items():
            shapes["delta", layer] = (s.n_heads, s.key_dim, s.value_dim)
            shapes["conv", layer] = (s.conv_taps - 1, s.conv_channels)
            kept["k", layer] = (s.n_k_heads, s.key_dim)
            kept["v", layer] = (s.n_heads, s.value_dim)
            kept["gates", layer] = (2, s.n_heads)
            kept["conv", layer] = (s.conv_channels,)
        for layer, (n_tail, width) in ple.items():
            shapes["ple_conv", layer] = (n_tail, width)
            kept["ple_conv", layer] = (width,)
        shapes |= {("raw", layer): (k.ring_rows, k.index_dim) for layer, k in kv.items() if k.index_dim}
        shapes |= {("draft", layer): shape for layer, shape in (draft or {}).items()}
        return cls(shapes, kept, {layer: s.tiled for layer, s in linear.items()})

    @property
    def is_recurrent(self) -> bool:
        """True when a rejected token would have changed something for good."""
        return bool(self.kept)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one place in the pool, each tensor aligned."""
        return sum(padded_bytes(shape) for shape in self.shapes.values())

    @property
    def bytes_per_kept_row(self) -> int:
        """Bytes that a verify step keeps of each row, each tensor aligned."""
        return sum(padded_bytes(shape) for shape in self.kept.values())


@dataclass
class RecurrentState:
    """All recurrent state of one sequence: views of its place in the pool, or the deep copies of a snapshot.

    `tensors` as in `StateShapes`; windows[layer]: the last tokens before the next one, oldest first, for that
    layer's n-gram hash; kept_windows[layer]: what the window is if 0, 1, ... rows of a verify step stand.
    """

    tensors: dict[Key, Tensor]
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)
    kept_windows: dict[int, tuple[tuple[int, ...], ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def zero(self) -> None:
        """The state before the first token."""
        for t in self.tensors.values():
            t.zero_()
        self.windows = {layer: () for kind, layer in self.tensors if kind == "ple_conv"}

    def accept(self, n_rows: int) -> None:
        """The first `n_rows` rows of the verify step stand: moves the windows, which need no replay."""
        self.windows |= {layer: windows[n_rows] for layer, windows in self.kept_windows.items()}
        self.kept_windows.clear()

    def snapshot(self, device: torch.device | None = None) -> "RecurrentState":
        """A deep copy, on `device` when given, that later tokens do not touch."""
        copies = {key: t.to(device or t.device, copy=True) for key, t in self.tensors.items()}
        return RecurrentState(copies, dict(self.windows))

    def restore(self, snapshot: "RecurrentState") -> None:
        """Back to `snapshot`, which stays usable."""
        for key, t in self.tensors.items():
            t.copy_(snapshot.tensors[key])
        self.windows = dict(snapshot.windows)
        self.kept_windows.clear()


class StatePool:
    """Room for the state of `n_sequences` sequences, `tensors` [n_sequences, ...], and for the kept rows of verify
    steps of at most `n_kept` rows, `kept` [n_sequences, n_kept, ...]; all float32.

    In `room` and `kept_room` (u8, the plan's "recurrent state" and "replay rows"), else in memory of its own. A place
    holds anything until it is opened.
    """

    def __init__(
        self,
        shapes: StateShapes,
        n_sequences: int,
        *,
        device: torch.device,
        room: Tensor | None = None,
        n_kept: int = 0,
        kept_room: Tensor | None = None,
    ) -> None:
        self.shapes = shapes
        self.places = Places(n_sequences)
        self.n_kept = n_kept
        n_bytes = n_sequences * shapes.bytes_per_sequence
        n_kept_bytes = n_sequences * n_kept * shapes.bytes_per_kept_row
        self.nbytes = n_bytes + n_kept_bytes
        space = Room(n_bytes, device=device, room=room)
        self.tensors = {key: space.take_items((n_sequences,), shape) for key, shape in shapes.shapes.items()}
        assert space.full
        space = Room(n_kept_bytes, device=device, room=kept_room)
        self.kept = {key: space.take_items((n_sequences, n_kept), shape) for key, shape in shapes.kept.items()}
        assert space.full

    def open(self) -> tuple[int, RecurrentState]:
        """A free place and its state, zeroed; raises UserError when every place is taken."""
        place = self.places.take()
        state = RecurrentState({key: t[place] for key, t in self.tensors.items()})
        state.zero()
        return place, state

    def delta(self, layer: int) -> DeltaState:
        """The delta-rule states of a linear-attention layer, for the kernels."""
        k, v, gates = (self.kept[kind, layer] for kind in ("k", "v", "gates"))
        return DeltaState(self.tensors["delta", layer], k, v, gates, self.shapes.tiled[layer])

    def conv(self, kind: str, layer: int) -> ConvState:
        """The tails of a convolution, kind "conv" or "ple_conv", for the kernels."""
        return ConvState(self.tensors[kind, layer], self.kept[kind, layer])

    def ring(self, layer: int) -> Tensor | None:
        """The raw indexer keys of an attention layer, None where there is no indexer."""
        return self.tensors.get(("raw", layer))

    def replay(self, ops: Ops, rows: Rows) -> None:
        """Moves all states on by the kept rows that stand, for the sequences of `rows` (their own rows do not run)."""
        for kind, layer in self.tensors:
            if kind == "delta":
                ops.replay_delta(self.delta(layer), rows)
            elif kind in ("conv", "ple_conv"):
                ops.replay_conv(self.conv(kind, layer), rows)

    def close(self) -> None:
        self.tensors.clear()
        self.kept.clear()
        self.nbytes = 0
