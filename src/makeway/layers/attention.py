"""Full attention with Q/K norms, partial rope, an optional output gate and an optional sparse indexer.

Owns no state: keys and values go to the KV cache of each segment's sequence. Never looks past a query's position.
Hazard: with an indexer the pooled keys must be written before the blocks are scored.
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.kernels import Ops, Weight
from makeway.kv import Batch
from makeway.layers.sparse_attention import IndexerWeights, indexer_matrices, selected_blocks, write_keys


@dataclass(frozen=True)
class AttentionShape:
    """Heads and rope of an attention layer; `gated`: attn_q holds [query | gate] per head."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int
    theta: float
    eps: float
    gated: bool


@dataclass(frozen=True)
class AttentionWeights:
    q: Weight
    k: Weight
    v: Weight
    output: Weight
    q_norm: Tensor
    k_norm: Tensor
    indexer: IndexerWeights | None = None


def attention(ops: Ops, shape: AttentionShape, w: AttentionWeights, *, layer: int, x: Tensor, batch: Batch) -> Tensor:
    """x f32 [n, hidden] (normed input) -> f32 [n, hidden]; writes the new keys and values."""
    n, d, kv = x.shape[0], shape.head_dim, batch.kv(layer)
    extra = () if w.indexer is None else indexer_matrices(w.indexer, batch)
    queries, keys, values, *indexed = ops.linears(x, (w.q, w.k, w.v, *extra))
    both = queries.view(n, shape.n_heads, -1)
    q = ops.attend_input(
        both[..., :d],
        keys.view(n, shape.n_kv_heads, d),
        v=values.view(n, shape.n_kv_heads, d),
        q_norm=w.q_norm,
        k_norm=w.k_norm,
        kv=kv,
        rows=batch.rows,
        eps=shape.eps,
        n_rot=shape.n_rot,
        theta=shape.theta,
    )
    selected = None
    if w.indexer is not None and len(indexed) == 1:
        write_keys(ops, w.indexer, indexed[0], kv=kv, batch=batch)
    elif w.indexer is not None:
        selected = selected_blocks(ops, w.indexer, indexed[0], queries=indexed[1], kv=kv, batch=batch)
    out = ops.attend(q, kv, rows=batch.rows, selected=selected, gate=both[..., d:] if shape.gated else None)
    return ops.linear(out.reshape(n, -1), w.output)


def remember(ops: Ops, shape: AttentionShape, w: AttentionWeights, *, layer: int, x: Tensor, batch: Batch) -> None:
    """Writes the keys and values, and the indexer's keys, of x f32 [n, hidden], as `attention` does, and no more."""
    n, d, kv = x.shape[0], shape.head_dim, batch.kv(layer)
    keys, values, *indexed = ops.linears(x, (w.k, w.v, *(() if w.indexer is None else (w.indexer.k_proj,))))
    k = ops.norm_rope(
        keys.view(n, shape.n_kv_heads, d),
        w.k_norm,
        positions=batch.positions,
        eps=shape.eps,
        n_rot=shape.n_rot,
        theta=shape.theta,
    )
    ops.write_kv(k, values.view(n, shape.n_kv_heads, d), kv=kv, rows=batch.rows)
    if w.indexer is not None:
        write_keys(ops, w.indexer, indexed[0], kv=kv, batch=batch)
