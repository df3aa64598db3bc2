"""The indexer of sparse attention (QSA): which blocks of earlier tokens a query may attend to.

Owns no state: pooled keys live in the KV cache, raw keys of the last positions in the recurrent state.
Never scores an incomplete block: its tokens are the tail and always attended.
Hazard: a block's pooled key is the mean of *raw* keys, then normed, then roped at the block's first position.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.kernels import Ops, Weight
from makeway.kv import BLOCK_TOKENS, Segment


@dataclass(frozen=True)
class IndexerWeights:
    """`ratio` tokens a block, `n_select` blocks of a query's choice."""

    q_proj: Weight
    k_proj: Weight
    q_norm: Tensor
    k_norm: Tensor
    n_heads: int
    dim: int
    ratio: int
    n_select: int
    n_rot: int
    theta: float
    eps: float


def allowed_keys(
    ops: Ops, w: IndexerWeights, *, layer: int, x: Tensor, segment: Segment, positions: Tensor
) -> Tensor | None:
    """Bool [n, n_keys] of the keys each of the segment's rows may see; None where every row sees all.

    x f32 [n, hidden]: the attention's own input; positions int64 [n]. Writes the new pooled keys.
    """
    _pool_new_blocks(ops, w, layer=layer, x=x, segment=segment)
    n_blocks = (segment.position + segment.n) // w.ratio
    if n_blocks <= w.n_select:
        return None
    n = x.shape[0]
    q = ops.rms_norm(ops.linear(x, w.q_proj).view(n, w.n_heads, w.dim), w.q_norm, w.eps)
    q = ops.rope(q, positions, n_rot=w.n_rot, theta=w.theta)
    cache, table = segment.sequence.cache, segment.sequence.table
    scores = ops.block_scores(
        q,
        n_blocks=n_blocks,
        pooled_tile=lambda j: cache.pooled_tile(layer, table, j),
        blocks_per_tile=BLOCK_TOKENS // w.ratio,
    )
    return ops.select_blocks(scores, positions, ratio=w.ratio, n_select=w.n_select)


def _pool_new_blocks(ops: Ops, w: IndexerWeights, *, layer: int, x: Tensor, segment: Segment) -> None:
    """Pools the blocks that the segment's rows complete and keeps the raw keys of the last positions."""
    sequence = segment.sequence
    ring = sequence.state.tensors["raw", layer]
    n_ring = ring.shape[0]
    new = ops.linear(x, w.k_proj)
    first = segment.position // w.ratio
    kept = [ring[p % n_ring] for p in range(first * w.ratio, segment.position)]
    raw = torch.cat((torch.stack(kept), new)) if kept else new
    n_complete = raw.shape[0] // w.ratio
    if n_complete:
        blocks = raw[: n_complete * w.ratio].view(n_complete, w.ratio, w.dim)
        total = blocks[:, 0]
        for i in range(1, w.ratio):
            total = total + blocks[:, i]
        starts = torch.arange(first, first + n_complete, device=x.device) * w.ratio
        pooled = ops.rms_norm(total / w.ratio, w.k_norm, w.eps)
        pooled = ops.rope(pooled[:, None], starts, n_rot=w.n_rot, theta=w.theta)[:, 0]
        sequence.cache.write_pooled(layer, sequence.table, first, pooled=pooled)
    for i in range(max(0, segment.n - n_ring), segment.n):
        ring[(segment.position + i) % n_ring] = new[i]
