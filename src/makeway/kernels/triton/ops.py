"""The operations of a model on a GPU: which kernel serves which call, and the scratch that the kernels share.

Owns the scratch, made at the first use and then kept for good, for captured graphs hold its address. Never falls back
in silence: a matrix that only the reference can multiply is named in `Ops.notes`.
Hazard: the scratch serves one launch at a time, so all operations of one instance run on one stream.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from makeway.kernels import MixerWeights, Ops, reference
from makeway.kernels.rows import DeltaState, KVLayer, Rows
from makeway.kernels.triton import chunk_linear as chunks
from makeway.kernels.triton import conv, delta, fused, index, linear, small, streams
from makeway.kernels.triton.attend import attend, write_kv
from makeway.kernels.triton.attend_input import attend_input
from makeway.kernels.triton.choose import IndexScratch
from makeway.kernels.triton.chunk_delta import DeltaScratch
from makeway.kernels.triton.gated_delta import gated_delta
from makeway.kernels.triton.linears import linears
from makeway.kernels.triton.moe_input import choice_and_swiglu, choice_and_zeros
from makeway.kernels.triton.rows import decode
from makeway.kernels.weight import Weight

LINEAR_BYTES = 192 << 20  # of decoded weights at a time, for chunks: a layer's, so that each is decoded once a layer
DELTA_TOKENS = 2048  # prepared at a time, for chunks
INDEX_ROWS = 256  # of a chunk whose scores are there together: enough to fill a GPU
CHUNK_ROWS = (*range(1, linear.MAX_ROWS + 2), chunks.FEW, chunks.FEW + 1)
"""Rows of chunks that take different kernels: a step's matrices have one for each number of rows, the rest goes by what
fits a ring of raw keys and by the tile."""
LEAST_BLOCKS = 1 << 12  # of the scratch for scores; its sizes are powers of two, so all of them together are < 2 x one


class StepLinears(Protocol):
    """Matrices of decode steps (`makeway.kernels.cuda.linear.Linears`)."""

    def can_multiply(self, weight: Weight) -> bool: ...

    def __call__(
        self,
        x: Tensor,
        weights: Sequence[Weight],
        *,
        up: Tensor | None = None,
        gate: Tensor | None = None,
        silu_scale: float | None = None,
    ) -> list[Tensor]: ...

    def can_mix(self, up: Weight, n_streams: int) -> bool: ...

    def mix(
        self, low: Tensor, up: Weight, *, normed: Tensor, raw_inject: Tensor | None, n_streams: int
    ) -> tuple[Tensor, Tensor | None]: ...


class TritonOps:
    """Steps of at most MAX_ROWS rows and chunks of a prompt, on one device.

    Matrices of a step are multiplied in CUDA C++ where that has their type (`step`: on a GPU), else in Triton, whose
    kernels want activations as two bf16 parts; CUDA's take them as they are.
    """

    def __init__(self, device: torch.device, step: StepLinears | None = None) -> None:
        self._device = device
        self._step = step
        self._rows = linear.Scratch(device)
        self._chunks: chunks.LinearScratch | None = None
        self._delta: dict[tuple[int, ...], DeltaScratch] = {}
        self._index: dict[tuple[int, int], IndexScratch] = {}
        self._known: tuple[Tensor, tuple[int, bool], Tensor] | None = None
        self.notes: dict[str, str] = {}

    def linear(self, x: Tensor, weight: Weight) -> Tensor:
        """f32 [n, n_rows]; more than MAX_ROWS rows are rounded to bf16, and so are the weights then."""
        if x.shape[0] == 0:
            return x.new_empty((0, weight.n_rows))
        if self._in_cuda(x.shape[0], (weight,)):
            return self._steps(x, (weight,))[0]
        if self._has_kernel(x.shape[0], weight):
            return self._multiply(self._parts_of(x), weight)
        return self._reference(x, weight)

    def decode(self, rows: Weight) -> Tensor:
        if linear.can_multiply(rows):
            return decode(rows)
        self.notes[f"decode {rows.type.name} of {rows.n_cols}"] = "reference"
        return reference.decode(rows)

    def linears(self, x: Tensor, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
        n = x.shape[0]
        if self._in_cuda(n, weights):
            return tuple(self._steps(x, weights))
        if self._step is None and 0 < n <= linear.MAX_ROWS and all(linear.can_multiply(w) for w in weights):
            return tuple(linears(self._parts_of(x), weights, scratch=self._rows))
        if n > linear.MAX_ROWS and all(chunks.can_multiply(w) for w in weights):
            return self._chunk_linears(self._parts_of(x)[0], weights)
        return tuple(self.linear(x, w) for w in weights)

    def _chunk_linears(self, x: Tensor, weights: Sequence[Weight]) -> tuple[Tensor, ...]:
        """Views of a few products: rows may be strided."""
        scratch, found = self._chunk_scratch(), list[Tensor]()
        for group in chunks.together(weights, scratch):
            some = [weights[i] for i in group]
            sizes = [w.n_rows for w in some]
            out = torch.empty((x.shape[0], sum(sizes)), dtype=torch.float32, device=x.device)
            chunks.chunk_linears(x, some, out=out, scratch=scratch)
            found += out.split(sizes, dim=1)
        return tuple(found)

    def add_norm(self, h: Tensor, added: Tensor | None, *, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        h, x, parts = fused.add_norm(h, added, gamma=gamma, eps=eps, n_parts=self._n_parts(h.shape[0]))
        self._remember(x, parts)
        return h, x

    def expert_ffn(self, x: Tensor, gate: Weight, up: Weight, down: Weight) -> Tensor:
        gated, straight = self.linears(x, (gate, up))
        if self._in_cuda(x.shape[0], (down,)):
            return self._steps(gated, (down,), up=straight)[0]
        parts = fused.swiglu_parts(gated, straight, n_parts=_n_parts(x.shape[0]))
        return self._multiply_or(parts, down)

    def hc_mix(
        self, h: Tensor, w: MixerWeights, *, eps: float, added: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        n, n_streams, _ = h.shape
        n_parts = self._n_parts(n)
        h, normed, parts = streams.stream_norm(h, w.norm, eps=eps, n_parts=n_parts, added=added)
        self._remember(normed, parts)
        low, *rest = self.linears(normed, (w.down,) if w.inject is None else (w.down, w.inject))
        raw_inject = rest[0] if rest else None
        if self._step is not None and self._in_cuda(n, (w.up,)) and self._step.can_mix(w.up, n_streams):
            return h, *self._step.mix(low, w.up, normed=normed, raw_inject=raw_inject, n_streams=n_streams)
        if self._in_cuda(n, (w.up,)):
            up = self._steps(low, (w.up,), silu_scale=1.0 / n_streams)[0]
        else:
            low_parts = fused.silu_parts(low, scale=1.0 / n_streams, n_parts=_n_parts(n))
            # a chunk's is read once, by what comes next, and is as wide as all streams: half the bytes, twice
            up = self._multiply_or(low_parts, w.up, torch.float32 if n <= linear.MAX_ROWS else torch.bfloat16)
        x, parts, inject = streams.mixed(up, normed, raw_inject, n_streams=n_streams, n_parts=n_parts)
        self._remember(x, parts)
        return h, x, inject

    def moe_input(
        self,
        x: Tensor,
        router: Weight,
        *,
        top_k: int,
        shared: tuple[Weight, Weight, Weight] | None,
        shared_gate: Weight | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The shared expert's gate is applied to its hidden values, before `down`."""
        if shared is None:
            return choice_and_zeros(self.linear(x, router), top_k, hidden=x.shape[1])
        assert shared_gate is not None
        w_gate, w_up, down = shared
        logits, factor, gate, up = self.linears(x, (router, shared_gate, w_gate, w_up))
        if self._in_cuda(x.shape[0], (down,)):
            return *small.route(logits, top_k), self._steps(gate, (down,), up=up, gate=factor)[0]
        n_parts = _n_parts(x.shape[0])
        ids, weights, parts = choice_and_swiglu(logits, top_k, gate=gate, up=up, shared_gate=factor, n_parts=n_parts)
        return ids, weights, self._multiply_or(parts, down)

    def gated_delta(self, qkv: Tensor, gate: Tensor, *, state: DeltaState, **options: Any) -> Tensor:
        n = qkv.shape[0]
        scratch = self._delta_scratch(state) if n > linear.MAX_ROWS else None
        out, parts = gated_delta(qkv, gate, state=state, scratch=scratch, n_parts=self._n_parts(n), **options)
        self._remember(out, parts)
        return out

    def index_select(self, q: Tensor, kv: KVLayer, *, rows: Rows, n_select: int) -> Tensor:
        n_blocks = max(LEAST_BLOCKS, 1 << (rows.max_keys // kv.indexer[2]).bit_length())
        n_rows = linear.MAX_ROWS if q.shape[0] <= linear.MAX_ROWS else INDEX_ROWS
        scratch = self._index.get((n_blocks, n_rows))
        if scratch is None:
            scratch = IndexScratch(self._device, n_blocks=n_blocks, n_rows=n_rows)
            self._index[n_blocks, n_rows] = scratch
        return index.index_select(q, kv, rows=rows, n_select=n_select, scratch=scratch)

    def delta_step(
        self, q: Tensor, k: Tensor, *, v: Tensor, decay: Tensor, beta: Tensor, state: DeltaState, rows: Rows
    ) -> Tensor:
        scratch = self._delta_scratch(state) if v.shape[0] > linear.MAX_ROWS else None
        return delta.delta_step(q, k, v=v, decay=decay, beta=beta, state=state, rows=rows, scratch=scratch)

    def _in_cuda(self, n: int, weights: Sequence[Weight]) -> bool:
        return self._step is not None and 0 < n <= linear.MAX_ROWS and all(map(self._step.can_multiply, weights))

    def _steps(self, x: Tensor, weights: Sequence[Weight], **prologue: Any) -> list[Tensor]:
        assert self._step is not None
        self.notes["linear, steps"] = "cuda"
        return self._step(x if x.is_contiguous() else x.contiguous(), weights, **prologue)

    def _n_parts(self, n: int) -> int:
        """bf16 parts of activations that are made for the matrices that come next; CUDA's kernels make their own."""
        return 0 if self._step is not None and n <= linear.MAX_ROWS else _n_parts(n)

    def _has_kernel(self, n: int, weight: Weight) -> bool:
        return linear.can_multiply(weight) if n <= linear.MAX_ROWS else chunks.can_multiply(weight)

    def _multiply(self, parts: Tensor, weight: Weight, out_type: torch.dtype = torch.float32) -> Tensor:
        """bf16 [parts, n, n_cols] times the transposed weight: [n, n_rows], f32 in a step."""
        n = parts.shape[1]
        if n <= linear.MAX_ROWS:
            return linear.linear(parts, weight, scratch=self._rows)
        out = torch.empty((n, weight.n_rows), dtype=out_type, device=parts.device)
        chunks.chunk_linear(parts[0], weight, out=out, scratch=self._chunk_scratch())
        return out

    def _multiply_or(self, parts: Tensor, weight: Weight, out_type: torch.dtype = torch.float32) -> Tensor:
        if self._has_kernel(parts.shape[1], weight):
            return self._multiply(parts, weight, out_type)
        return self._reference(parts.float().sum(0), weight)

    def _reference(self, x: Tensor, weight: Weight) -> Tensor:
        self.notes[f"linear {weight.type.name} of {weight.n_cols}"] = "reference"
        return reference.linear(x.float(), weight)

    def _remember(self, x: Tensor, parts: Tensor) -> None:
        """`parts` are x's, as long as nobody changes x."""
        if parts.shape[0]:
            self._known = (x, _moment(x), parts)

    def _parts_of(self, x: Tensor) -> Tensor:
        """x f32 or bf16 [n, n_cols] as matrices take it: bf16 [parts, n, n_cols]; made once for several matrices."""
        known = self._known
        if known is None or known[0] is not x or known[1] != _moment(x):
            dense = x.contiguous()
            self._remember(x, linear.split(dense.float()) if x.shape[0] <= linear.MAX_ROWS else dense.bfloat16()[None])
        assert self._known is not None
        return self._known[2]

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


def _moment(x: Tensor) -> tuple[int, bool]:
    """Changes when x changes, and when a graph begins: what a graph does not make itself, it would not make again."""
    return x._version, x.is_cuda and torch.cuda.is_current_stream_capturing()


def _n_parts(n: int) -> int:
    """bf16 parts of activations: two in a step, one in a chunk."""
    return 2 if n <= linear.MAX_ROWS else 1


def triton_ops(device: torch.device, step: StepLinears | None = None) -> Ops:
    """Kernels for everything, on `device`; `step` multiplies the matrices of decode steps that it has kernels for."""
    ops = TritonOps(device, step)
    return Ops(
        "triton",
        linear=ops.linear,
        decode=ops.decode,
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
        index_input=index.index_input,
        index_select=ops.index_select,
        conv_step=conv.conv_step,
        delta_step=ops.delta_step,
        replay_conv=conv.replay_conv,
        replay_delta=delta.replay_delta,
        linears=ops.linears,
        norm_rope=small.norm_rope,
        add_norm=ops.add_norm,
        attend_input=attend_input,
        hc_mix=ops.hc_mix,
        hc_combine=streams.hc_combine,
        ple_gate=fused.ple_gate,
        gated_delta=ops.gated_delta,
        moe_input=ops.moe_input,
        notes=ops.notes,
    )
