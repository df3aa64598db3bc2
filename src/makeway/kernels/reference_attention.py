"""Attention and sparse selection in plain torch: the specification, and the CPU backend.

Owns no state. Never touches a key beyond a query's own position. Keys are read in tiles of `KEY_TILE` at absolute
positions and queries in tiles of `ROW_TILE`, so bits depend neither on chunk size nor on cache size: a tile in
which a row sees no key leaves its running maximum, sum and output untouched, bit for bit.
Hazard: unused places of a key tile must hold finite values (the cache is zeroed when allocated).
"""

from collections.abc import Callable

import torch
from torch import Tensor

from makeway.kernels.reference import KEY_TILE, ROW_TILE

KeyTile = Callable[[int], tuple[Tensor, Tensor]]


def attention(q: Tensor, positions: Tensor, *, n_keys: int, key_tile: KeyTile, allowed: Tensor | None = None) -> Tensor:
    """Causal attention with an online softmax over key tiles.

    q f32 [n, heads, d] (already scaled); positions int64 [n], ascending; `key_tile(j)` gives keys and values
    f32 [KEY_TILE, kv_heads, d] of positions j*KEY_TILE...; allowed bool [n, n_keys] or None (all earlier keys).
    Returns f32 [n, heads, d].
    """
    n, n_heads, d = q.shape
    out = torch.empty_like(q)
    for first in range(0, n, ROW_TILE):
        rows = slice(first, min(first + ROW_TILE, n))
        n_rows = rows.stop - rows.start
        tile_q = q.new_zeros((ROW_TILE, n_heads, d))
        tile_q[:n_rows] = q[rows]
        tile_positions = positions.new_full((ROW_TILE,), -1)
        tile_positions[:n_rows] = positions[rows]
        tile_allowed = None
        if allowed is not None:
            tile_allowed = allowed.new_zeros((ROW_TILE, -(-n_keys // KEY_TILE) * KEY_TILE))
            tile_allowed[:n_rows, :n_keys] = allowed[rows]
        out[rows] = _attend_tile(tile_q, tile_positions, key_tile, tile_allowed)[:n_rows]
    return out


def _attend_tile(q: Tensor, positions: Tensor, key_tile: KeyTile, allowed: Tensor | None) -> Tensor:
    n_rows, n_heads, d = q.shape
    last = int(positions.max())
    best = total = acc = queries = None
    for j in range(last // KEY_TILE + 1):
        visible = torch.arange(j * KEY_TILE, (j + 1) * KEY_TILE, device=q.device)[None] <= positions[:, None]
        if allowed is not None:
            visible = visible & allowed[:, j * KEY_TILE : (j + 1) * KEY_TILE]
            if not bool(visible.any()):
                continue
        keys, values = key_tile(j)
        if queries is None:
            n_kv = keys.shape[1]
            group = n_heads // n_kv
            queries = q.view(n_rows, n_kv, group, d).permute(1, 2, 0, 3).reshape(n_kv, group * n_rows, d)
            best = q.new_full((n_kv, group * n_rows, 1), -torch.inf)
            total = q.new_zeros((n_kv, group * n_rows, 1))
            acc = q.new_zeros((n_kv, group * n_rows, values.shape[2]))
        assert best is not None
        assert total is not None
        assert acc is not None
        scores = torch.bmm(queries, keys.permute(1, 2, 0).contiguous())
        hidden = ~visible.repeat(queries.shape[1] // n_rows, 1)[None]
        scores = scores.masked_fill(hidden, -torch.inf)
        new_best = torch.maximum(best, scores.amax(-1, keepdim=True))
        # A row that has seen no key yet has a maximum of -inf; exp(-inf - -inf) must be 0, not NaN.
        shift = torch.where(new_best == -torch.inf, 0.0, new_best)
        weights = torch.exp(scores - shift)
        scale = torch.exp(best - shift)
        total = total * scale + weights.sum(-1, keepdim=True)
        acc = acc * scale + torch.bmm(weights, values.permute(1, 0, 2).contiguous())
        best = new_best
    assert acc is not None
    assert total is not None
    n_kv = acc.shape[0]
    out = acc / torch.where(total == 0.0, 1.0, total)
    return out.view(n_kv, n_heads // n_kv, n_rows, -1).permute(2, 0, 1, 3).reshape(n_rows, n_heads, -1)


def block_scores(q: Tensor, *, n_blocks: int, pooled_tile: Callable[[int], Tensor], blocks_per_tile: int) -> Tensor:
    """Scores of the sparse indexer: sum over heads of relu(q . k) / sqrt(d).

    q f32 [n, heads, d]; `pooled_tile(j)` gives pooled keys f32 [blocks_per_tile, d] of blocks j*blocks_per_tile...
    Returns f32 [n, n_blocks].
    """
    n, n_heads, d = q.shape
    n_row_tiles, n_key_tiles = -(-n // ROW_TILE), -(-n_blocks // blocks_per_tile)
    padded = q.new_zeros((n_row_tiles * ROW_TILE, n_heads, d))
    padded[:n] = q
    out = q.new_empty((n_row_tiles * ROW_TILE, n_key_tiles * blocks_per_tile))
    for j in range(n_key_tiles):
        keys = pooled_tile(j).t().contiguous()
        for i in range(n_row_tiles):
            rows = slice(i * ROW_TILE, (i + 1) * ROW_TILE)
            products = (padded[rows].reshape(ROW_TILE * n_heads, d) @ keys).view(ROW_TILE, n_heads, -1)
            positive = products.clamp(min=0.0)
            score = positive[:, 0]
            for head in range(1, n_heads):
                score = score + positive[:, head]
            out[rows, j * blocks_per_tile : (j + 1) * blocks_per_tile] = score * d**-0.5
    return out[:n, :n_blocks]


def select_blocks(scores: Tensor, positions: Tensor, *, ratio: int, n_select: int) -> Tensor:
    """Which tokens a query may attend to: its best `n_select` complete blocks of `ratio` tokens, and its tail.

    scores f32 [n, n_blocks]; positions int64 [n]. Equal scores go to the lower block. With at most `n_select`
    complete blocks everything is allowed. Returns bool [n, n_keys], n_keys = last position + 1.
    """
    n_keys = int(positions.max()) + 1
    n_complete = (positions + 1) // ratio
    blocks = torch.arange(scores.shape[1], device=scores.device)
    scores = scores.masked_fill(blocks[None] >= n_complete[:, None], -torch.inf)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :n_select]
    chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(1, order, True)
    chosen &= blocks[None] < n_complete[:, None]
    keys = torch.arange(n_keys, device=scores.device)
    tail = keys[None] >= (n_complete * ratio)[:, None]
    allowed = tail.clone()
    n_block_keys = min(scores.shape[1] * ratio, n_keys)
    allowed[:, :n_block_keys] |= chosen.repeat_interleave(ratio, dim=1)[:, :n_block_keys]
    return allowed & (keys[None] <= positions[:, None])
