"""PLE: hashed n-gram embeddings, gated into every residual stream of one layer.

Owns no state: the n-gram window and the convolution's tail live with each sequence. Never loads the table: rows are
read singly from the mapped file. Hazard: the hash is exact 64-bit integer arithmetic.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.kernels import Ops, Weight
from makeway.kv import Batch


@dataclass(frozen=True)
class PleHash:
    """Constants of the hash. multipliers [ngram]; offsets, sizes [n_heads]: the 2-grams' heads, then the 3-grams'."""

    multipliers: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    heads_per_ngram: int
    eos: int

    @property
    def ngram(self) -> int:
        return len(self.multipliers)

    @cached_property
    def _sizes(self) -> NDArray[np.int64]:
        return np.asarray(self.sizes, dtype=np.int64)

    @cached_property
    def _offsets(self) -> NDArray[np.int64]:
        return np.asarray(self.offsets, dtype=np.int64)

    def rows(self, tokens: tuple[int, ...], window: tuple[int, ...]) -> NDArray[np.int64]:
        """Table rows int64 [n, n_heads] of `tokens`, whose predecessors end with `window` (oldest first).

        A missing predecessor, and everything before an EOS predecessor, counts as EOS.
        """
        seen = (self.eos,) * (self.ngram - 1) + window[-(self.ngram - 1) :] + tokens
        tokens_seen = np.asarray(seen, dtype=np.int64)
        n, start = len(tokens), len(seen) - len(tokens)
        mixed = tokens_seen[start:] * np.int64(self.multipliers[0])
        cut = np.zeros(n, dtype=bool)
        columns = []
        for back in range(1, self.ngram):
            previous = tokens_seen[start - back : len(seen) - back]
            cut |= previous == self.eos
            mixed = mixed ^ (np.where(cut, self.eos, previous) * np.int64(self.multipliers[back]))
            heads = slice((back - 1) * self.heads_per_ngram, back * self.heads_per_ngram)
            columns.append(mixed[:, None] % self._sizes[heads] + self._offsets[heads])
        return np.concatenate(columns, axis=1)

    def next_window(self, tokens: tuple[int, ...], window: tuple[int, ...]) -> tuple[int, ...]:
        return (window + tokens)[-(self.ngram - 1) :]


@dataclass(frozen=True)
class PleWeights:
    table: Weight
    key: Weight
    value: Weight
    norm_key: Tensor
    norm_query: Tensor
    norm_conv: Tensor
    conv: Tensor


def ple(ops: Ops, w: PleWeights, hashes: PleHash, *, layer: int, h: Tensor, batch: Batch, eps: float) -> Tensor:
    """What is added to the residual h f32 [n, streams, hidden]; moves each sequence's tail on, and its window
    unless the table's rows were gathered ahead."""
    n, n_streams, hidden = h.shape
    rows = batch.gathered.get(layer)
    if rows is None:
        rows = gather(w.table, hashes, layer=layer, batch=batch, device=h.device)
    key, value = ops.linears(ops.decode(rows).view(n, -1), (w.key, w.value))
    gated, normed = ops.ple_gate(
        key.view(n, n_streams, hidden),
        h,
        value,
        norm_key=w.norm_key,
        norm_query=w.norm_query,
        norm_conv=w.norm_conv,
        eps=eps,
    )
    state = batch.states.conv("ple_conv", layer)
    convolved = ops.silu(ops.conv_step(normed, w.conv, state=state, rows=batch.rows, dilation=hashes.ngram))
    return gated + convolved.view_as(gated)


def gather(table: Weight, hashes: PleHash, *, layer: int, batch: Batch, device: torch.device) -> Weight:
    """The table's rows of the batch's tokens, [n * heads, row], on `device`; moves the windows on, or keeps what they
    would become after each row of a verify step."""
    rows = []
    for s in batch.segments:
        state, tokens = s.sequence.state, batch.host_tokens[s.rows]
        window = state.windows[layer]
        rows.append(hashes.rows(tokens, window))
        if batch.rows.keep:
            state.kept_windows[layer] = tuple(hashes.next_window(tokens[:n], window) for n in range(s.n + 1))
        else:
            state.windows[layer] = hashes.next_window(tokens, window)
    return table.pick(torch.from_numpy(np.concatenate(rows).reshape(-1)), device)
