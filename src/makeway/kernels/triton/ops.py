"""The operations of a model on a GPU: which kernel serves which call, and the scratch that the kernels share.

Owns the scratch, made at the first use and then kept for good, for captured graphs hold its address. Never falls back
in silence: a matrix that only the reference can multiply is named in `Ops.notes`.
Hazard: the scratch serves one launch at a time, so all operations of one instance run on one stream.
"""

import torch
from torch import Tensor

from makeway.kernels import Ops, reference
from makeway.kernels.rows import DeltaState, KVLayer, Rows
from makeway.kernels.triton import chunk_linear as chunks
from makeway.kernels.triton import delta, index, linear, small
from makeway.kernels.triton.attend import attend, write_kv
from makeway.kernels.triton.chunk_delta import DeltaScratch
from makeway.kernels.weight import Weight

LINEAR_BYTES = 64 << 20  # of decoded weights at a time, for chunks
DELTA_TOKENS = 512  # prepared at a time, for chunks
INDEX_ROWS = 64  # of a chunk whose scores are there together
LEAST_BLOCKS = 1 << 12  # of the scratch for scores; its sizes are powers of two, so all of them together are < 2 x one


class TritonOps:
    """Steps of at most MAX_ROWS rows and chunks of a prompt, on one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._rows = linear.Scratch(device)
        self._chunks: chunks.LinearScratch | None = None
        self._delta: dict[tuple[int, ...], DeltaScratch] = {}
        self._index: dict[tuple[int, int], index.IndexScratch] = {}
        self.notes: dict[str, str] = {}

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """f32 [n, n_rows]; more than MAX_ROWS rows are rounded to bf16, and so are the weights then."""
        x = x.contiguous()
        n = x.shape[0]
        if n <= linear.MAX_ROWS and linear.can_multiply(weight):
            if n == 0:
                return x.new_empty((0, weight.n_rows))
            return linear.linear(x, weight, scratch=self._rows)
        if n > linear.MAX_ROWS and chunks.can_multiply(weight):
            out = torch.empty((n, weight.n_rows), dtype=torch.float32, device=x.device)
            chunks.chunk_linear(x.bfloat16(), weight, out=out, scratch=self._chunk_scratch())
            return out
        self.notes[f"linear {weight.type.name} of {weight.n_cols}"] = "reference"
        return reference.linear(x, weight)

    def expert_ffn(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        hidden = small.pointwise(small.SWIGLU, self.linear(x, gate), self.linear(x, up))
        return self.linear(hidden, down)

    def index_select(self, q: Tensor, kv: KVLayer, *, rows: Rows, n_select: int) -> Tensor:
        n_blocks = max(LEAST_BLOCKS, 1 << (rows.max_keys // kv.indexer[2]).bit_length())
        n_rows = linear.MAX_ROWS if q.shape[0] <= linear.MAX_ROWS else INDEX_ROWS
        scratch = self._index.get((n_blocks, n_rows))
        if scratch is None:
            scratch = index.IndexScratch(self._device, n_blocks=n_blocks, n_rows=n_rows)
            self._index[n_blocks, n_rows] = scratch
        return index.index_select(q, kv, rows=rows, n_select=n_select, scratch=scratch)

    def delta_step(
        self, q: Tensor, k: Tensor, *, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows
    ) -> Tensor:
        scratch = self._delta_scratch(state) if v.shape[0] > linear.MAX_ROWS else None
        return delta.delta_step(q, k, v=v, decay=decay, beta=beta, state=state, rows=rows, scratch=scratch)

    def _chunk_scratch(self) -> chunks.LinearScratch:
        if self._chunks is None:
            self._chunks = chunks.LinearScratch.of(torch.empty(LINEAR_BYTES, dtype=torch.uint8, device=self._device))
        return self._chunks

    def _delta_scratch(self, state: DeltaState) -> DeltaScratch:
        _, n_heads, d_k, d_v = shape = tuple(state.state.shape)
        if shape not in self._delta:
            n_bytes = DeltaScratch.nbytes(DELTA_TOKENS, n_heads, d_k=d_k, d_v=d_v)
            room = torch.empty(n_bytes, dtype=torch.uint8, device=self._device)
            self._delta[shape] = DeltaScratch.of(room, n_heads, d_k=d_k, d_v=d_v)
        return self._delta[shape]


def triton_ops(device: torch.device) -> Ops:
    """Kernels for everything, on `device`."""
    ops = TritonOps(device)
    return Ops(
        "triton",
        linear=ops.linear,
        sigmoid=lambda x: small.pointwise(small.SIGMOID, x),
        silu=lambda x: small.pointwise(small.SILU, x),
        softplus=lambda x: small.pointwise(small.SOFTPLUS, x),
        rms_norm=small.rms_norm,
        l2_norm=small.l2_norm,
        rope=small.rope,
        route=small.route,
        expert_ffn=ops.expert_ffn,
        write_kv=write_kv,
        attend=attend,
        index_pool=index.index_pool,
        index_select=ops.index_select,
        conv_step=delta.conv_step,
        delta_step=ops.delta_step,
        replay_conv=delta.replay_conv,
        replay_delta=delta.replay_delta,
        notes=ops.notes,
    )
