"""Full attention with Q/K norms, partial rope, an optional output gate and an optional sparse indexer.

Owns no state: keys and values go to the KV cache of each segment's sequence. Never looks past a query's position.
Hazard: with an indexer the pooled keys must be written before the blocks are scored.
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.kernels import Ops, Weight
from makeway.kv import Batch
from makeway.layers.sparse_attention import IndexerWeights, selected_blocks, write_keys


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
    n, d = x.shape[0], shape.head_dim
    q = ops.linear(x, w.q).view(n, shape.n_heads, -1)
    gate = q[..., d:] if shape.gated else None
    q = _turned(ops, shape, q[..., :d], w.q_norm, batch, scale=d**-0.5)
    remember(ops, shape, w, layer=layer, x=x, batch=batch)
    kv = batch.kv(layer)
    selected = None
    if w.indexer is not None:
        selected = selected_blocks(ops, w.indexer, kv=kv, x=x, batch=batch)
    out = ops.attend(q, kv, rows=batch.rows, selected=selected, gate=gate)
    return ops.linear(out.reshape(n, -1), w.output)


def remember(ops: Ops, shape: AttentionShape, w: AttentionWeights, *, layer: int, x: Tensor, batch: Batch) -> None:
    """Writes the keys and values, and the indexer's keys, of x f32 [n, hidden], as `attention` does, and no more."""
    n, d = x.shape[0], shape.head_dim
    keys, values = ops.linears(x, (w.k, w.v))
    k = _turned(ops, shape, keys.view(n, shape.n_kv_heads, d), w.k_norm, batch)
    ops.write_kv(k, values.view(n, shape.n_kv_heads, -1), kv=batch.kv(layer), rows=batch.rows)
    if w.indexer is not None:
        write_keys(ops, w.indexer, kv=batch.kv(layer), x=x, batch=batch)


def _turned(
    ops: Ops, shape: AttentionShape, heads: Tensor, gamma: Tensor, batch: Batch, *, scale: float = 1.0
) -> Tensor:
    return ops.norm_rope(
        heads, gamma, positions=batch.positions, eps=shape.eps, n_rot=shape.n_rot, theta=shape.theta, scale=scale
    )
