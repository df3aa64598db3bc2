"""The indexer of sparse attention (QSA): which blocks of earlier tokens a query may attend to.

Owns no state: pooled keys live in the KV cache, raw keys of the last positions in the recurrent state.
Never scores an incomplete block: its tokens are the tail and always attended.
Hazard: a block's pooled key is the mean of *raw* keys, then normed, then roped at the block's first position.
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.kernels import KVLayer, Ops, Weight
from makeway.kv import Batch


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


def indexer_matrices(w: IndexerWeights, batch: Batch) -> tuple[Weight, ...]:
    """What the attention's input is multiplied by: for the new keys, and for the queries unless every row sees all
    keys anyway."""
    sees_all = batch.rows.max_keys // w.ratio <= w.n_select
    return (w.k_proj,) if sees_all else (w.k_proj, w.q_proj)


def write_keys(ops: Ops, w: IndexerWeights, raw: Tensor, *, kv: KVLayer, batch: Batch) -> None:
    """The new pooled and raw keys of raw f32 [n, dim], the product with `k_proj`."""
    ops.index_pool(raw, w.k_norm, kv=kv, rows=batch.rows, eps=w.eps, n_rot=w.n_rot, theta=w.theta)


def selected_blocks(ops: Ops, w: IndexerWeights, raw: Tensor, *, queries: Tensor, kv: KVLayer, batch: Batch) -> Tensor:
    """`write_keys`, and the blocks int32 [n, n_select] that each row may see besides its tail.

    queries f32 [n, heads * dim]: the product with `q_proj`.
    """
    q = ops.index_input(
        raw,
        queries.view(queries.shape[0], w.n_heads, w.dim),
        k_norm=w.k_norm,
        q_norm=w.q_norm,
        kv=kv,
        rows=batch.rows,
        eps=w.eps,
        n_rot=w.n_rot,
        theta=w.theta,
    )
    return ops.index_select(q, kv, rows=batch.rows, n_select=w.n_select)
