"""What a sequence keeps besides KV: delta-rule states, convolution tails, raw indexer keys, the n-gram window.

Owns these tensors for one sequence. Never truncates: a recurrent state has no past, so going back means
restoring a snapshot. Hazard: a snapshot is a deep copy; a shallow one would change under the caller.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class StateShape:
    """Sizes of a linear-attention layer's state."""

    n_heads: int
    key_dim: int
    value_dim: int
    conv_channels: int
    conv_taps: int

    @property
    def nbytes(self) -> int:
        """Bytes of one layer's state in float32."""
        return 4 * (self.n_heads * self.key_dim * self.value_dim + self.conv_channels * (self.conv_taps - 1))


@dataclass
class RecurrentState:
    """All recurrent state of one sequence; every tensor float32.

    delta[layer] [heads, d_k, d_v]; conv[layer] [taps - 1, channels]; ple_conv[layer] [tail, width];
    raw[layer] [RAW_RING, index_dim] (indexer keys of the last positions, at position % RAW_RING);
    windows[layer]: the last tokens before the next one, oldest first, for that layer's n-gram hash.
    """

    delta: dict[int, Tensor] = field(default_factory=dict)
    conv: dict[int, Tensor] = field(default_factory=dict)
    ple_conv: dict[int, Tensor] = field(default_factory=dict)
    raw: dict[int, Tensor] = field(default_factory=dict)
    windows: dict[int, tuple[int, ...]] = field(default_factory=dict)

    @classmethod
    def empty(
        cls,
        shapes: dict[int, StateShape],
        *,
        ple: dict[int, tuple[int, int]],
        raw: dict[int, tuple[int, int]],
        device: torch.device,
    ) -> "RecurrentState":
        """The state before the first token: zeros; `ple` and `raw` give [rows, width] by layer."""
        state = cls()
        for layer, s in shapes.items():
            state.delta[layer] = torch.zeros((s.n_heads, s.key_dim, s.value_dim), device=device)
            state.conv[layer] = torch.zeros((s.conv_taps - 1, s.conv_channels), device=device)
        for layer, shape in ple.items():
            state.ple_conv[layer] = torch.zeros(shape, device=device)
            state.windows[layer] = ()
        for layer, shape in raw.items():
            state.raw[layer] = torch.zeros(shape, device=device)
        return state

    def _groups(self) -> tuple[dict[int, Tensor], ...]:
        return self.delta, self.conv, self.ple_conv, self.raw

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for group in self._groups() for t in group.values())

    @property
    def can_truncate(self) -> bool:
        """True when there is nothing that a rejected token would have changed for good."""
        return not (self.delta or self.conv or self.ple_conv)

    def snapshot(self) -> "RecurrentState":
        """A deep copy that later tokens do not touch."""
        delta, conv, ple_conv, raw = ({i: t.clone() for i, t in g.items()} for g in self._groups())
        return RecurrentState(delta=delta, conv=conv, ple_conv=ple_conv, raw=raw, windows=dict(self.windows))

    def restore(self, snapshot: "RecurrentState") -> None:
        """Back to `snapshot`, which stays usable."""
        copy = snapshot.snapshot()
        self.delta, self.conv, self.ple_conv, self.raw = copy.delta, copy.conv, copy.ple_conv, copy.raw
        self.windows = copy.windows
