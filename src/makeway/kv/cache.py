"""Keys, values and indexer keys of the attention layers, in blocks of 64 tokens.

Owns the pools (one pair of tensors a layer). Never decides which block a sequence gets (`blocks.py` does).
Hazard: every place of a block must hold a finite value, because masked keys are multiplied by exact zeros.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kv.blocks import BLOCK_TOKENS, BlockPool, BlockTable

RAW_RING = 16  # raw indexer keys kept per sequence: the incomplete block and what a rejected draft may undo


@dataclass(frozen=True)
class KVShape:
    """Sizes of one attention layer's cache. `index_dim` 0: no sparse indexer; `ratio` tokens a pooled key."""

    n_kv_heads: int
    key_dim: int
    value_dim: int
    index_dim: int = 0
    ratio: int = 0

    def bytes_per_token(self, item_bytes: int = 4) -> int:
        """KV bytes of a token, without the indexer's."""
        return self.n_kv_heads * (self.key_dim + self.value_dim) * item_bytes

    def index_bytes_per_block(self, item_bytes: int = 4) -> int:
        return BLOCK_TOKENS // self.ratio * self.index_dim * item_bytes if self.index_dim else 0


class KVCache:
    """Pools of keys, values and pooled indexer keys for all attention layers; float32."""

    def __init__(self, shapes: dict[int, KVShape], n_blocks: int, *, device: torch.device) -> None:
        self.shapes = shapes
        self.pool = BlockPool(n_blocks)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._pooled: dict[int, Tensor] = {}
        for layer, s in shapes.items():
            self._keys[layer] = torch.zeros((n_blocks, BLOCK_TOKENS, s.n_kv_heads, s.key_dim), device=device)
            self._values[layer] = torch.zeros((n_blocks, BLOCK_TOKENS, s.n_kv_heads, s.value_dim), device=device)
            if s.index_dim:
                assert BLOCK_TOKENS % s.ratio == 0
                shape = (n_blocks, BLOCK_TOKENS // s.ratio, s.index_dim)
                self._pooled[layer] = torch.zeros(shape, device=device)

    @property
    def nbytes(self) -> int:
        pools = (self._keys, self._values, self._pooled)
        return sum(t.numel() * t.element_size() for p in pools for t in p.values())

    def close(self) -> None:
        self._keys.clear()
        self._values.clear()
        self._pooled.clear()

    def write(self, layer: int, table: BlockTable, position: int, *, keys: Tensor, values: Tensor) -> None:
        """Stores keys [n, kv_heads, key_dim] and values of positions position..position+n-1."""
        for block, place, rows in _pieces(table, position, keys.shape[0]):
            self._keys[layer][block, place] = keys[rows]
            self._values[layer][block, place] = values[rows]

    def key_tile(self, layer: int, table: BlockTable, j: int) -> tuple[Tensor, Tensor]:
        """Keys and values [BLOCK_TOKENS, kv_heads, dim] of positions j*BLOCK_TOKENS onwards."""
        block = table.blocks[j]
        return self._keys[layer][block], self._values[layer][block]

    def write_pooled(self, layer: int, table: BlockTable, first: int, *, pooled: Tensor) -> None:
        """Stores pooled indexer keys [m, index_dim] of the indexer blocks first..first+m-1."""
        per_block = BLOCK_TOKENS // self.shapes[layer].ratio
        for i in range(pooled.shape[0]):
            block, place = divmod(first + i, per_block)
            self._pooled[layer][table.blocks[block], place] = pooled[i]

    def pooled_tile(self, layer: int, table: BlockTable, j: int) -> Tensor:
        """Pooled keys [BLOCK_TOKENS / ratio, index_dim] of the j-th KV block."""
        return self._pooled[layer][table.blocks[j]]


def _pieces(table: BlockTable, position: int, n: int) -> list[tuple[int, slice, slice]]:
    """(block, places in it, rows of the input) for n tokens from `position` on."""
    pieces = []
    done = 0
    while done < n:
        index, place = divmod(position + done, BLOCK_TOKENS)
        count = min(BLOCK_TOKENS - place, n - done)
        pieces.append((table.blocks[index], slice(place, place + count), slice(done, done + count)))
        done += count
    return pieces
