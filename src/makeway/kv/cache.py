"""Keys, values and indexer keys of the attention layers, in blocks of 64 tokens.

Owns the pools (one pair of tensors a layer). Never decides which block a sequence gets (`blocks.py` does).
Hazard: every place of a block must hold a finite value, because masked keys are multiplied by exact zeros.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kernels import KVLayer
from makeway.kv.blocks import BLOCK_TOKENS, BlockPool
from makeway.memory.sizes import MAX_ROWS
from makeway.memory.workspace import Room

KV_TYPES: dict[str, torch.dtype] = {"f16": torch.float16, "f32": torch.float32}
"""Item types of keys, values and pooled indexer keys, by the name of `--kv-type`."""


@dataclass(frozen=True)
class KVShape:
    """Sizes of one attention layer's cache. `index_dim` 0: no sparse indexer; `ratio` tokens a pooled key."""

    n_kv_heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    ratio: int = 0

    def bytes_per_token(self, item_bytes: int) -> int:
        """KV bytes of a token, without the indexer's."""
        return self.n_kv_heads * (self.key_dim + self.value_dim) * item_bytes

    def index_bytes_per_token(self, item_bytes: int) -> int:
        """Bytes of pooled indexer keys per token, rounded up."""
        return -(-self.index_dim * item_bytes // self.ratio) if self.index_dim else 0

    @property
    def ring_rows(self) -> int:
        """Raw indexer keys kept per sequence, at position % ring_rows: those of the incomplete block, and of the
        `MAX_ROWS` rows of a step that may be undone; a power of two. 0 without an indexer."""
        return 1 << (self.ratio + MAX_ROWS - 2).bit_length() if self.index_dim else 0


@dataclass(frozen=True)
class KVRoom:
    """Memory for the pools of `layers`, in this order: u8 views of the plan's "KV cache" and "indexer keys", None where
    the layers need no bytes of that kind."""

    layers: Sequence[int]
    keys_values: Tensor | None
    indexer: Tensor | None = None


class KVCache:
    """Pools of keys, values and pooled indexer keys, `item_type` each: [n_blocks, BLOCK_TOKENS, kv_heads, dim] and
    [n_blocks, BLOCK_TOKENS / ratio, index_dim] by layer. In `rooms` (together they hold every layer), else in memory
    of its own; zeroed."""

    def __init__(
        self,
        shapes: Mapping[int, KVShape],
        n_blocks: int,
        *,
        device: torch.device,
        item_type: torch.dtype = torch.float32,
        rooms: Sequence[KVRoom] | None = None,
    ) -> None:
        self.shapes = dict(shapes)
        self.item_type = item_type
        self.pool = BlockPool(n_blocks)
        self.nbytes = 0
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._pooled: dict[int, Tensor] = {}
        if rooms is None:
            n_bytes, n_index_bytes = self._bytes_of(self.shapes)
            own = [torch.empty(n, dtype=torch.uint8, device=device) for n in (n_bytes, n_index_bytes)]
            rooms = [KVRoom(tuple(self.shapes), *own)]
        for room in rooms:
            self._carve(room, device)
        assert set(self._keys) == set(self.shapes), "the rooms must hold every layer"

    def _bytes_of(self, layers: Collection[int]) -> tuple[int, int]:
        """(keys and values, pooled indexer keys) of these layers."""
        shapes = [self.shapes[i] for i in layers]
        n_tokens, size = self.pool.n_blocks * BLOCK_TOKENS, self.item_type.itemsize
        return (
            n_tokens * sum(s.bytes_per_token(size) for s in shapes),
            n_tokens * sum(s.index_bytes_per_token(size) for s in shapes),
        )

    def _carve(self, room: KVRoom, device: torch.device) -> None:
        n, dtype = self.pool.n_blocks, self.item_type
        n_bytes, n_index_bytes = self._bytes_of(room.layers)
        assert room.keys_values is not None or not n_bytes, "no room for keys and values"
        assert room.indexer is not None or not n_index_bytes, "no room for indexer keys"
        main = Room(n_bytes, device=device, room=room.keys_values)
        index = Room(n_index_bytes, device=device, room=room.indexer)
        for layer in room.layers:
            s = self.shapes[layer]
            per_head = n * BLOCK_TOKENS * s.n_kv_heads * dtype.itemsize
            for pools, dim in ((self._keys, s.key_dim), (self._values, s.value_dim)):
                pools[layer] = main.take((n, BLOCK_TOKENS, s.n_kv_heads, dim), dtype, n_bytes=per_head * dim).zero_()
            if s.index_dim:
                assert BLOCK_TOKENS % s.ratio == 0
                n_pool = n * BLOCK_TOKENS * s.index_bytes_per_token(dtype.itemsize)
                pooled = index.take((n, BLOCK_TOKENS // s.ratio, s.index_dim), dtype, n_bytes=n_pool)
                self._pooled[layer] = pooled.zero_()
        assert main.full
        assert index.full
        self.nbytes += n_bytes + n_index_bytes

    def close(self) -> None:
        self._keys.clear()
        self._values.clear()
        self._pooled.clear()
        self.nbytes = 0

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        return self.nbytes // self.pool.n_blocks

    def read_block(self, block: int) -> Tensor:
        """A copy on the host of what a block holds in every layer, u8 [block_bytes]."""
        parts = [pools[layer][block].contiguous().view(torch.uint8).flatten() for pools, layer in self._pools()]
        return torch.cat(parts).cpu()

    def write_block(self, block: int, content: Tensor) -> None:
        """Puts back what `read_block` gave, into this or another block."""
        on_device, at = content.to(next(iter(self._keys.values())).device), 0
        for pools, layer in self._pools():
            target = pools[layer][block]
            n_bytes = target.numel() * target.element_size()
            target.copy_(on_device[at : at + n_bytes].view(target.dtype).view(target.shape))
            at += n_bytes

    def _pools(self) -> list[tuple[dict[int, Tensor], int]]:
        return [(pools, layer) for pools in (self._keys, self._values, self._pooled) for layer in pools]

    def layer(self, layer: int, ring: Tensor | None = None) -> KVLayer:
        """One layer's pools for the kernels; `ring`: its raw indexer keys, which the state pool holds."""
        return KVLayer(self._keys[layer], self._values[layer], self._pooled.get(layer), ring)
