"""What sequences keep besides KV: delta-rule states, convolution tails, raw indexer keys, the n-gram windows.

Owns the pool of places, one per open sequence. Never truncates: a recurrent state has no past, so going back means
restoring a snapshot. Hazard: a snapshot is a deep copy; a shallow one would change under the caller.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from makeway.kv.blocks import Places
from makeway.kv.cache import KVShape
from makeway.kv.room import Room, padded_bytes


@dataclass(frozen=True)
class StateShape:
    """Sizes of a linear-attention layer's state."""

    n_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_taps: int


@dataclass(frozen=True)
class StateShapes:
    """What one sequence keeps, by layer: (kind, layer) -> shape of a float32 tensor.

    Kinds: "delta" [heads, d_k, d_v]; "conv" [taps - 1, channels]; "ple_conv" [tail, width]; "raw" [ring rows,
    index_dim] (indexer keys of the last positions, at position % ring rows).
    """

    shapes: Mapping[tuple[str, int], tuple[int, ...]]

    @classmethod
    def of(
        cls, linear: Mapping[int, StateShape], *, kv: Mapping[int, KVShape], ple: Mapping[int, tuple[int, int]]
    ) -> "StateShapes":
        """From a model's facts: linear-attention layers, attention layers (for their indexers), PLE tails."""
        shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        for layer, s in linear.items():
            shapes["delta", layer] = (s.n_heads, s.key_dim, s.value_dim)
            shapes["conv", layer] = (s.conv_taps - 1, s.conv_channels)
        shapes |= {("ple_conv", layer): tail for layer, tail in ple.items()}
        shapes |= {("raw", layer): (k.ring_rows, k.index_dim) for layer, k in kv.items() if k.index_dim}
        return cls(shapes)

    @property
    def is_recurrent(self) -> bool:
        """True when a rejected token would have changed something for good."""
        return any(kind != "raw" for kind, _ in self.shapes)

    @property
    def bytes_per_sequence(self) -> int:
        """Bytes of one place in the pool, each tensor aligned."""
        return sum(padded_bytes(shape) for shape in self.shapes.values())


@dataclass
class RecurrentState:
    """All recurrent state of one sequence: views of its place in the pool, or the deep copies of a snapshot.

    `tensors` as in `StateShapes`; windows[layer]: the last tokens before the next one, oldest first, for that
    layer's n-gram hash.
    """

    tensors: dict[tuple[str, int], Tensor]
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in self.tensors.values())

    def zero(self) -> None:
        """The state before the first token."""
        for t in self.tensors.values():
            t.zero_()
        self.windows = {layer: () for kind, layer in self.tensors if kind == "ple_conv"}

    def snapshot(self, device: torch.device | None = None) -> "RecurrentState":
        """A deep copy, on `device` when given, that later tokens do not touch."""
        copies = {key: t.to(device or t.device, copy=True) for key, t in self.tensors.items()}
        return RecurrentState(copies, dict(self.windows))

    def restore(self, snapshot: "RecurrentState") -> None:
        """Back to `snapshot`, which stays usable."""
        for key, t in self.tensors.items():
            t.copy_(snapshot.tensors[key])
        self.windows = dict(snapshot.windows)


class StatePool:
    """Room for the state of `n_sequences` sequences: [n_sequences, ...] float32 for each tensor of `shapes`.

    In `room` (u8, the plan's "recurrent state"), else in memory of its own. A place holds anything until it is opened.
    """

    def __init__(
        self, shapes: StateShapes, n_sequences: int, *, device: torch.device, room: Tensor | None = None
    ) -> None:
        self.shapes = shapes
        self.places = Places(n_sequences)
        self.nbytes = n_sequences * shapes.bytes_per_sequence
        space = Room(self.nbytes, device=device, room=room)
        self.tensors = {key: space.take_items((n_sequences,), shape) for key, shape in shapes.shapes.items()}
        assert space.full

    def open(self) -> tuple[int, RecurrentState]:
        """A free place and its state, zeroed; raises UserError when every place is taken."""
        place = self.places.take()
        state = RecurrentState({key: t[place] for key, t in self.tensors.items()})
        state.zero()
        return place, state

    def close(self) -> None:
        self.tensors.clear()
        self.nbytes = 0
