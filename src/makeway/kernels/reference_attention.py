"""Attention and sparse selection in plain torch: the specification, and the CPU backend.

Owns no state. Never touches a key beyond a query's own position. Keys are read in tiles of `KEY_TILE` at absolute
positions and queries in tiles of `ROW_TILE`, so bits depend neither on chunk size nor on cache size: a tile in
which a row sees no key leaves its running maximum, sum and output untouched, bit for bit.
Hazard: unused places of a key tile must hold finite values (the cache is zeroed when allocated).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from makeway.kernels.reference import KEY_TILE, ROW_TILE, rms_norm, rope, sigmoid
from makeway.kernels.rows import KVLayer, Rows

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


def best_blocks(scores: Tensor, positions: Tensor, *, ratio: int, n_select: int) -> Tensor:
    """Which complete blocks of `ratio` tokens a query attends to: its best `n_select`, or all when there are no more.

    scores f32 [n, n_blocks]; positions int64 [n]. Equal scores go to the lower block. Returns int32 [n, n_select]:
    block numbers, ascending, then -1.
    """
    n, n_blocks = scores.shape
    blocks = torch.arange(n_blocks, device=scores.device)
    complete = blocks[None] < ((positions + 1) // ratio)[:, None]
    scores = scores.masked_fill(~complete, -torch.inf)
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :n_select]
    chosen = torch.zeros_like(complete).scatter_(1, order, True) & complete
    numbers = torch.where(chosen, blocks[None], n_blocks).sort(dim=-1).values[:, :n_select]
    out = torch.full((n, n_select), -1, dtype=torch.int32, device=scores.device)
    out[:, : numbers.shape[1]] = numbers.masked_fill(numbers == n_blocks, -1)
    return out


def allowed_keys(selected: Tensor, positions: Tensor, *, n_keys: int, ratio: int) -> Tensor:
    """bool [n, n_keys] of the keys a query may see: its selected blocks (int32 [n, n_select], -1: none) and the
    incomplete block at its end."""
    n = positions.shape[0]
    chosen = torch.zeros((n, n_keys // ratio + 2), dtype=torch.bool, device=positions.device)
    chosen.scatter_(1, selected.long() + 1, True)  # column 0 takes the -1s
    keys = torch.arange(n_keys, device=positions.device)
    tail = keys[None] >= ((positions + 1) // ratio * ratio)[:, None]
    allowed = chosen[:, 1:].repeat_interleave(ratio, dim=1)[:, :n_keys] | tail
    return allowed & (keys[None] <= positions[:, None])


def write_kv(keys: Tensor, values: Tensor, *, kv: KVLayer, rows: Rows) -> None:
    """Stores keys [n, kv_heads, key_dim] and values of all rows at their positions in their sequences' blocks."""
    tokens = kv.block_tokens
    for s in rows.spans:
        done = 0
        while done < s.n:
            index, place = divmod(s.position + done, tokens)
            count = min(tokens - place, s.n - done)
            block, part = s.blocks[index], slice(s.first + done, s.first + done + count)
            kv.keys[block, place : place + count] = keys[part]
            kv.values[block, place : place + count] = values[part]
            done += count


def attend(q: Tensor, kv: KVLayer, *, rows: Rows, selected: Tensor | None = None, gate: Tensor | None = None) -> Tensor:
    """Attention of every row over the keys of its sequence up to its own position, times sigmoid(gate) if there is one.

    q f32 [n, heads, d], scaled; selected int32 [n, n_select] as `best_blocks` gives, or None: all keys; gate like q.
    Returns f32 [n, heads, d].
    """
    out = torch.empty_like(q)
    for s in rows.spans:
        positions, n_keys = rows.positions[s.rows], s.position + s.n
        allowed = None
        if selected is not None:
            allowed = allowed_keys(selected[s.rows], positions, n_keys=n_keys, ratio=kv.indexer[2])

        def key_tile(j: int, blocks: Sequence[int] = s.blocks) -> tuple[Tensor, Tensor]:
            return kv.keys[blocks[j]].float(), kv.values[blocks[j]].float()

        out[s.rows] = attention(q[s.rows], positions, n_keys=n_keys, key_tile=key_tile, allowed=allowed)
    return out if gate is None else out * sigmoid(gate)


def index_pool(raw: Tensor, gamma: Tensor, *, kv: KVLayer, rows: Rows, eps: float, n_rot: int, theta: float) -> None:
    """Stores the pooled keys of the indexer blocks that the rows complete, and the raw keys in the ring.

    raw f32 [n, index_dim]; gamma f32 [index_dim]. Pooled: the mean of a block's raw keys, normed, then roped at the
    block's first position.
    """
    pooled, ring, ratio = kv.indexer
    per_block = pooled.shape[1]
    for s in rows.spans:
        own, new = ring[s.place], raw[s.rows]
        n_ring, first = own.shape[0], s.position // ratio
        kept = [own[p % n_ring] for p in range(first * ratio, s.position)]
        both = torch.cat((torch.stack(kept), new)) if kept else new
        n_complete = both.shape[0] // ratio
        if n_complete:
            blocks = both[: n_complete * ratio].view(n_complete, ratio, -1)
            total = blocks[:, 0]
            for i in range(1, ratio):
                total = total + blocks[:, i]
            starts = torch.arange(first, first + n_complete, device=raw.device) * ratio
            keys = rope(rms_norm(total / ratio, gamma, eps)[:, None], starts, n_rot=n_rot, theta=theta)[:, 0]
            for i in range(n_complete):
                block, place = divmod(first + i, per_block)
                pooled[s.blocks[block], place] = keys[i]
        for i in range(max(0, s.n - n_ring), s.n):
            own[(s.position + i) % n_ring] = new[i]


def index_select(q: Tensor, kv: KVLayer, *, rows: Rows, n_select: int) -> Tensor:
    """`best_blocks` of every row by `block_scores` over its sequence's pooled keys; q f32 [n, heads, index_dim].

    Returns int32 [n, n_select].
    """
    pooled, _, ratio = kv.indexer
    out = torch.full((q.shape[0], n_select), -1, dtype=torch.int32, device=q.device)
    for s in rows.spans:
        n_blocks = (s.position + s.n) // ratio
        if not n_blocks:
            continue

        def pooled_tile(j: int, blocks: Sequence[int] = s.blocks) -> Tensor:
            return pooled[blocks[j]].float()

        scores = block_scores(q[s.rows], n_blocks=n_blocks, pooled_tile=pooled_tile, blocks_per_tile=pooled.shape[1])
        out[s.rows] = best_blocks(scores, rows.positions[s.rows], ratio=ratio, n_select=n_select)
    return out
