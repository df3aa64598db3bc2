"""What an operation over a whole batch is told of its rows, and the memory it reads and writes.

Owns nothing: every tensor is a view of a pool. Never holds a sequence; it says only where a sequence's things lie.
Hazard: the reference walks `spans`, which live on the host, other kernels read `on_device`; both must say the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class Span:
    """Rows first..first+n-1 of a batch: tokens of one sequence from `position` on.

    `blocks`: its KV blocks, in order; `place`: its place in the state pool; `n_replay`: rows of its last verify step
    that stand but are not in its state yet.
    """

    first: int
    n: int
    position: int
    blocks: Sequence[int]
    place: int
    n_replay: int = 0

    @property
    def rows(self) -> slice:
        return slice(self.first, self.first + self.n)


@dataclass(frozen=True)
class DeviceRows:
    """The spans as tensors: positions int64 [n]; all others int32.

    row_segment [n]: the span of each row, -1 for a padding row (writes nothing). By span [n_segments]: first_row,
    n_rows, places, n_replay; block_tables [n_segments, max_blocks], of which each span reads as many as it needs.
    """

    positions: Tensor
    row_segment: Tensor
    first_row: Tensor
    n_rows: Tensor
    places: Tensor
    n_replay: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class Rows:
    """All rows of one batch. positions int64 [n] on the device; `max_keys`: no row sees more keys than this.

    `keep`: a verify step; recurrent state stays as it is before the rows, and their inputs are kept for a replay.
    `fixed`: device tensors made elsewhere (a captured graph); then there need be no spans.
    """

    positions: Tensor
    spans: tuple[Span, ...]
    max_keys: int
    keep: bool = False
    fixed: DeviceRows | None = None

    @cached_property
    def on_device(self) -> DeviceRows:
        """Made at the first use."""
        if self.fixed is not None:
            return self.fixed
        device, spans = self.positions.device, self.spans

        def int32(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        widest = max(len(s.blocks) for s in spans)
        padded = [[*s.blocks, *[0] * (widest - len(s.blocks))] for s in spans]
        return DeviceRows(
            positions=self.positions,
            row_segment=int32([i for i, s in enumerate(spans) for _ in range(s.n)]),
            first_row=int32([s.first for s in spans]),
            n_rows=int32([s.n for s in spans]),
            places=int32([s.place for s in spans]),
            n_replay=int32([s.n_replay for s in spans]),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).view(len(spans), widest),
        )


@dataclass(frozen=True)
class KVLayer:
    """The pools of one attention layer: keys, values [n_blocks, block tokens, kv_heads, dim], float32 or float16.

    With an indexer: pooled [n_blocks, block tokens / ratio, index_dim] of the same type, and ring float32
    [n_places, ring rows, index_dim], the raw keys of a sequence's last positions at position % ring rows.
    """

    keys: Tensor
    values: Tensor
    pooled: Tensor | None = None
    ring: Tensor | None = None

    @property
    def block_tokens(self) -> int:
        return self.keys.shape[1]

    @property
    def indexer(self) -> tuple[Tensor, Tensor, int]:
        """(pooled, ring, tokens of a pooled key) of a layer that has an indexer."""
        assert self.pooled is not None
        assert self.ring is not None
        return self.pooled, self.ring, self.block_tokens // self.pooled.shape[1]


@dataclass(frozen=True)
class DeltaState:
    """The delta rule's states of one layer, float32: state [n_places, v_heads, d_k, d_v].

    Kept rows: k [n_places, n_kept, k_heads, d_k], v [n_places, n_kept, v_heads, d_v], gates [n_places, n_kept, 2,
    v_heads] (decay, beta). `tiled`: V head j uses K head j mod k_heads, else j div (v_heads / k_heads).
    """

    state: Tensor
    k: Tensor
    v: Tensor
    gates: Tensor
    tiled: bool


@dataclass(frozen=True)
class ConvState:
    """The inputs before the next one that a causal convolution still needs: tail float32 [n_places, n_tail, channels],
    oldest first; kept rows [n_places, n_kept, channels]."""

    tail: Tensor
    kept: Tensor
