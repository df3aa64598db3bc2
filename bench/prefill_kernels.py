"""Checks and times the prefill kernels at Flash-Next's shapes on a CUDA GPU, each beside its bound.

    PYTHONPATH=src python bench/prefill_kernels.py [--tokens 8192 32768] [--repeats 15] [--results bench/results]

A kernel's bound is the larger of its operations over the measured bf16 matrix rate and its least bytes over the
measured copy rate. Prints a table and, as the last line, one JSON object, which goes to a file in --results too.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from makeway.bench.blocks import random_blocks
from makeway.bench.report import Figure, Report, cuda_clock, measure
from makeway.errors import UserError
from makeway.gguf.types import GGMLType
from makeway.kernels import ConvState, KVLayer, Rows, Span, Weight
from makeway.kernels.reference import delta_rule
from makeway.kernels.triton.attend import attend
from makeway.kernels.triton.chunk_conv import chunk_conv
from makeway.kernels.triton.chunk_delta import DeltaScratch, delta_rule_chunks
from makeway.kernels.triton.chunk_linear import LinearScratch, chunk_linear
from makeway.kernels.triton.decode import QuantMatrix, decode_matrices
from makeway.kernels.triton.gemm import PlainMatrices, Round, down, gate_up
from makeway.kernels.triton.sort import SortedPairs, combine, sort_pairs
from makeway.kernels.triton.sweep_experts import ExpertMatrices, SweepRows, SweepScratch, run_piece
from makeway.quants import decode_rows

CUDA = torch.device("cuda")
EXPERTS, TOP_K, PIECE = 512, 10, 64
MATRICES = ExpertMatrices(2560, 640, GGMLType.Q4_K, GGMLType.Q4_K, GGMLType.Q5_1)
LINEARS = (
    ("qkv", GGMLType.Q4_K, 10240, 2560),
    ("out", GGMLType.Q6_K, 2560, 6144),
    ("gate", GGMLType.Q8_0, 6144, 2560),
    ("router", GGMLType.F32, 512, 2560),
    ("narrow", GGMLType.Q8_0, 320, 10240),
)
K_HEADS, HEADS, HEAD_DIM = 16, 48, 128  # of the delta rule
BLOCK_TOKENS, RATIO, SELECT = 64, 4, 512  # of the KV cache and its indexer
MIB = 1 << 20
CALLS = 6


@dataclass
class Bench:
    """Takes times and turns them into figures beside their bound."""

    report: Report
    repeats: int
    copy_rate: float = 0.0  # bytes read and written per second
    matrix_rate: float = 0.0

    def take_ceilings(self) -> None:
        source = torch.ones(2**30, dtype=torch.float32, device=CUDA)
        target = torch.empty_like(source)
        self.copy_rate = 2 * source.nbytes / self._best(lambda: target.copy_(source))
        a, b = (torch.randn((8192, 8192), device=CUDA).bfloat16() for _ in range(2))
        self.matrix_rate = 2 * 8192**3 / self._best(lambda: a @ b)
        self.report.facts["copy_bytes_per_s"] = self.copy_rate
        self.report.facts["matrix_flops_per_s"] = self.matrix_rate

    def _best(self, run: Callable[[], object]) -> float:
        return sorted(measure(run, clock=cuda_clock, repeats=self.repeats))[self.repeats // 2]

    def time(self, name: str, run: Callable[[], object], *, flops: float = 0.0, n_bytes: float = 0.0) -> None:
        """Samples are means of CALLS calls in a row, so that the host's launch of all but the first is hidden."""

        def several() -> None:
            for _ in range(CALLS):
                run()

        seconds = [s / CALLS for s in measure(several, clock=cuda_clock, repeats=self.repeats)]
        bound = max(flops / self.matrix_rate, n_bytes / self.copy_rate)
        median = sorted(seconds)[len(seconds) // 2]
        note = f"{flops / median / 1e12:.0f} TFLOP/s" if flops else f"{n_bytes / median / 1e9:.0f} GB/s"
        samples = tuple(1000 * s for s in seconds)
        self.report.figures.append(Figure(name, "ms", samples, is_time=True, bound=1000 * bound, note=note))

    def agree(self, name: str, found: Tensor, expected: Tensor, *, within: float) -> None:
        """Raises UserError when a result is wrong: its times would say nothing."""
        error = float((found.double() - expected.double()).norm() / expected.double().norm())
        self.report.facts.setdefault("relative_errors", {})[name] = error
        if not error < within:
            raise UserError(f"bench prefill-kernels: {name} is off by {error:.2e} of its size, more than {within}")


class Layer:
    """One layer's experts (64 different ones, repeated), random routing of n tokens, and scratch for a piece."""

    def __init__(self, n_tokens: int) -> None:
        generator = torch.Generator(CUDA).manual_seed(n_tokens)
        parts = [
            torch.from_numpy(random_blocks(part.type, PIECE * part.n_values // elements, std=0.02, seed=i))
            for i, (part, elements) in enumerate(zip(MATRICES.parts, (256, 256, 32), strict=True))
        ]
        piece = torch.cat([part.view(PIECE, -1) for part in parts], dim=1)
        self.stride = piece.shape[1]
        self.room = piece.to(CUDA).repeat(EXPERTS // PIECE, 1).view(-1)
        self.where = torch.arange(EXPERTS, device=CUDA) * self.stride
        self.ids = torch.rand((n_tokens, EXPERTS), device=CUDA, generator=generator).topk(TOP_K).indices
        sorting = torch.empty(SortedPairs.nbytes(n_tokens, TOP_K, EXPERTS), dtype=torch.uint8, device=CUDA)
        self.pairs = SortedPairs.of(sorting, n_tokens, TOP_K, n_experts=EXPERTS)
        sort_pairs(self.ids, self.pairs)
        x = torch.randn((n_tokens, MATRICES.d), device=CUDA, generator=generator).bfloat16()
        weights = torch.rand((n_tokens, TOP_K), device=CUDA, generator=generator)
        self.rows = SweepRows(x, weights, torch.zeros((n_tokens, MATRICES.d), device=CUDA), self.pairs)
        offsets = self.pairs.offsets.tolist()
        self.counts = np.diff(offsets)
        self.n_rows = offsets[PIECE]
        self.capacity = -(-n_tokens * TOP_K * PIECE * 5 // EXPERTS // 4)
        n_bytes = SweepScratch.nbytes(MATRICES, n_experts=PIECE, n_rows=self.capacity)
        room = torch.empty(n_bytes, dtype=torch.uint8, device=CUDA)
        self.scratch = SweepScratch.of(room, MATRICES, n_experts=PIECE, n_rows=self.capacity)

    def run(self, counts: NDArray[np.int64] | None) -> None:
        for first in range(0, EXPERTS, PIECE):
            run_piece(
                self.rows,
                self.room,
                where=self.where[first : first + PIECE],
                first=first,
                matrices=MATRICES,
                scratch=self.scratch,
                counts=None if counts is None else partial(counts.__getitem__, slice(first, first + PIECE)),
            )

    def expected(self, tokens: Tensor) -> Tensor:
        """What the experts add for some tokens, in float32."""
        out = torch.zeros((len(tokens), MATRICES.d), device=CUDA)
        for expert in range(EXPERTS):
            rows, ranks = torch.nonzero(self.ids[tokens] == expert, as_tuple=True)
            raw = self.room[expert * self.stride : (expert + 1) * self.stride]
            gate, up, down_matrix = (
                decode_rows(raw[part.inside : part.inside + part.nbytes].view(part.n_rows, -1), part.type)
                for part in MATRICES.parts
            )
            x = self.rows.x[tokens[rows]].float()
            hidden = torch.nn.functional.silu(x @ gate.t()) * (x @ up.t())
            out[rows] += self.rows.weights[tokens[rows], ranks][:, None] * (hidden @ down_matrix.t())
        return out


def bench_experts(bench: Bench, n_tokens: int) -> None:
    """The sort, the parts of one piece of 64 experts, and a whole layer."""
    layer = Layer(n_tokens)
    d, d_ff, rows, k = MATRICES.d, MATRICES.d_ff, layer.n_rows, f"{n_tokens // 1024}k"
    some = torch.arange(0, n_tokens, n_tokens // 64, device=CUDA)
    layer.run(None)
    bench.agree(f"experts {k}", layer.rows.acc[some], layer.expected(some), within=0.01)
    whole = layer.rows.acc.clone()
    layer.rows.acc.zero_()
    layer.run(layer.counts)
    bench.agree(f"experts {k}, counts known", layer.rows.acc, whole, within=1e-30)

    n_pairs = n_tokens * TOP_K
    bench.time(f"sort {k}", lambda: sort_pairs(layer.ids, layer.pairs), n_bytes=n_pairs * (8 + 4 + 4))
    gate, _, down_part = MATRICES.parts
    both = QuantMatrix(gate.type, 2 * d_ff, d)
    scratch, behind = layer.scratch, 2 * gate.n_values
    counted, where = layer.pairs.offsets[: PIECE + 1], layer.where[:PIECE]

    def decode(matrix: QuantMatrix, out: Tensor) -> Callable[[], None]:
        return lambda: decode_matrices(layer.room, where, matrix, out=out, counted=counted)

    gates = PlainMatrices(scratch.weights.view(-1), scratch.starts, 0, gate.n_values)
    downs = PlainMatrices(scratch.weights.view(-1), scratch.starts, 2 * behind)
    part = Round(layer.pairs, 0, PIECE, 0, layer.capacity, 1 << (PIECE - 1).bit_length())
    up_flops, down_flops = 4.0 * rows * d * d_ff, 2.0 * rows * d * d_ff
    bench.time(f"decode gate, up {k}", decode(both, scratch.weights), n_bytes=PIECE * (both.nbytes + 2 * both.n_values))
    bench.time(
        f"decode down {k}",
        decode(down_part, scratch.weights[:, behind:]),
        n_bytes=PIECE * (down_part.nbytes + 2 * down_part.n_values),
    )
    bench.time(
        f"gate, up {k}",
        lambda: gate_up(layer.rows.x, gates, d_ff=d_ff, part=part, out=scratch.hidden),
        flops=up_flops,
    )
    bench.time(
        f"down {k}",
        lambda: down(scratch.hidden, downs, part=part, pair_weights=layer.rows.weights, out=scratch.out),
        flops=down_flops,
    )
    bench.time(
        f"combine {k}",
        lambda: combine(layer.rows.acc, scratch.out, pairs=layer.pairs, first=0, last=PIECE, skip=0),
        n_bytes=rows * d * 2.0 + 8.0 * d * n_tokens * (1 - (1 - PIECE / EXPERTS) ** TOP_K),
    )
    flops = 6.0 * n_pairs * d * d_ff
    bench.time(f"layer {k}, counts unknown", lambda: layer.run(None), flops=flops, n_bytes=layer.room.numel())
    bench.time(f"layer {k}, counts known", lambda: layer.run(layer.counts), flops=flops, n_bytes=layer.room.numel())
    if hasattr(torch, "_grouped_mm"):
        _bench_torch(bench, layer, k)


def _bench_torch(bench: Bench, layer: Layer, k: str) -> None:
    """What torch's grouped product takes for the same piece, rows already gathered, without SwiGLU and weighting."""
    d, d_ff, rows = MATRICES.d, MATRICES.d_ff, layer.n_rows
    x = layer.rows.x[layer.pairs.order[:rows].long() // TOP_K]
    ends = layer.pairs.offsets[1 : PIECE + 1].clone()
    gates = torch.randn((PIECE, 2 * d_ff, d), device=CUDA).bfloat16().transpose(1, 2)
    downs = torch.randn((PIECE, d, d_ff), device=CUDA).bfloat16().transpose(1, 2)
    hidden = torch.randn((rows, d_ff), device=CUDA).bfloat16()
    bench.time(f"torch gate, up {k}", lambda: torch._grouped_mm(x, gates, ends), flops=4.0 * rows * d * d_ff)
    bench.time(f"torch down {k}", lambda: torch._grouped_mm(hidden, downs, ends), flops=2.0 * rows * d * d_ff)


def bench_linears(bench: Bench, n: int) -> None:
    """Linears of a chunk, and cuBLAS on weights that are bf16 already."""
    scratch = LinearScratch.of(torch.empty(128 * MIB, dtype=torch.uint8, device=CUDA))
    for name, kind, n_rows, n_cols in LINEARS:
        if kind == GGMLType.F32:
            raw = torch.randn((n_rows, n_cols)).mul_(0.02).view(torch.uint8)
        else:
            elements = 32 if kind == GGMLType.Q8_0 else 256
            raw = torch.from_numpy(random_blocks(kind, n_rows * n_cols // elements, std=0.02, seed=1))
        weight = Weight(raw.view(n_rows, -1).to(CUDA), kind, n_cols)
        x = torch.randn((n, n_cols), device=CUDA).bfloat16()
        out = torch.empty((n, n_rows), device=CUDA)
        chunk_linear(x, weight, out=out, scratch=scratch)
        plain = decode_rows(weight.raw, kind)
        bench.agree(f"{name} {kind.name} {n}", out[:64], x[:64].double() @ plain.double().t(), within=0.003)
        few = torch.empty((5, n_rows), device=CUDA)
        chunk_linear(x[7:12], weight, out=few, scratch=scratch)
        bench.agree(f"{name} {kind.name}, 5 rows of {n}", few, out[7:12], within=1e-30)
        flops, n_bytes = 2.0 * n * n_rows * n_cols, float(weight.nbytes + x.nbytes + out.nbytes)
        label = f"{name} {kind.name} {n_rows}x{n_cols}, {n} rows"
        run = partial(chunk_linear, x, weight, out=out, scratch=scratch)
        bench.time(label, run, flops=flops, n_bytes=n_bytes)
        bench.time(f"cuBLAS {label}", partial(torch.mm, x, plain.bfloat16().t()), flops=flops, n_bytes=n_bytes)


def bench_delta(bench: Bench, n: int) -> None:
    """The delta rule: bytes are q, k, v and o once and the state; products as in the chunked form."""
    generator = torch.Generator(CUDA).manual_seed(n)

    def rows(heads: int) -> Tensor:
        return torch.randn((n, heads, HEAD_DIM), device=CUDA, generator=generator)

    q, k = (torch.nn.functional.normalize(rows(K_HEADS), dim=-1) for _ in range(2))
    q, k, v = (q * HEAD_DIM**-0.5).bfloat16(), k.bfloat16(), rows(HEADS).bfloat16()
    decay = torch.exp(-0.3 * torch.rand((n, HEADS), device=CUDA, generator=generator))
    beta = torch.rand((n, HEADS), device=CUDA, generator=generator)
    state = rows(HEADS)[:HEAD_DIM].transpose(0, 1).contiguous()
    out = torch.empty((n, HEADS, HEAD_DIM), dtype=torch.bfloat16, device=CUDA)
    n_bytes = DeltaScratch.nbytes(min(n, 8192), HEADS, d_k=HEAD_DIM, d_v=HEAD_DIM)
    scratch = DeltaScratch.of(torch.empty(n_bytes, dtype=torch.uint8, device=CUDA), HEADS, d_k=HEAD_DIM, d_v=HEAD_DIM)

    few, new = 500, state.clone()
    wide = [t[:few].double().repeat_interleave(HEADS // K_HEADS, dim=1) for t in (q, k)]
    expected, expected_state = delta_rule(
        state.double(), *wide, v=v[:few].double(), decay=decay[:few].double(), beta=beta[:few].double()
    )
    run = {"scratch": scratch, "tiled": False}
    delta_rule_chunks(new, q[:few], k[:few], v=v[:few], decay=decay[:few], beta=beta[:few], out=out[:few], **run)
    bench.agree("delta rule", out[:few], expected, within=0.02)
    bench.agree("delta rule, state", new, expected_state, within=0.02)
    c = 64
    flops = 2.0 * n * HEADS * HEAD_DIM * (2 * c + 2 * c + c + 3 * HEAD_DIM)
    least = float(q.nbytes + k.nbytes + v.nbytes + out.nbytes + 2 * state.nbytes)
    bench.time(
        f"delta rule {n}",
        lambda: delta_rule_chunks(new, q, k, v=v, decay=decay, beta=beta, out=out, **run),
        flops=flops,
        n_bytes=least,
    )


def paged(n: int, *, n_kv: int, d: int, index_dim: int = 0) -> tuple[KVLayer, Rows]:
    """A cache of f16 keys and values for a sequence of n tokens whose blocks lie in random order."""
    n_blocks = -(-n // BLOCK_TOKENS)
    blocks = torch.randperm(n_blocks).tolist()

    def pool(*shape: int) -> Tensor:
        return torch.randn((n_blocks, *shape), device=CUDA).half()

    pooled = pool(BLOCK_TOKENS // RATIO, index_dim) if index_dim else None
    ring = torch.zeros((1, 16, index_dim), device=CUDA) if index_dim else None
    kv = KVLayer(pool(BLOCK_TOKENS, n_kv, d), pool(BLOCK_TOKENS, n_kv, d), pooled, ring)
    return kv, Rows(torch.arange(n, device=CUDA), (Span(0, n, 0, blocks, 0),), max_keys=n)


def in_order(kv: KVLayer, rows: Rows, repeat: int) -> tuple[Tensor, Tensor]:
    """Keys and values f32 [heads, tokens, d], each KV head repeated."""
    blocks = torch.tensor(rows.spans[0].blocks, device=CUDA)
    keys, values = (
        pool[blocks].flatten(0, 1).transpose(0, 1).float().repeat_interleave(repeat, 0) for pool in (kv.keys, kv.values)
    )
    return keys, values


def bench_attention(bench: Bench, n: int) -> None:
    """A prompt of n tokens in one chunk: all keys with the 30B's heads, all and selected keys with Flash-Next's."""
    for name, heads, n_kv, d in (("30B", 32, 4, 128), ("Flash-Next", 24, 2, 256)):
        kv, rows = paged(n, n_kv=n_kv, d=d, index_dim=128 if d == 256 else 0)
        q = torch.randn((n, heads, d), device=CUDA)
        run = partial(attend, q, kv, rows=rows, scale=d**-0.5)
        keys, values = in_order(kv, rows, heads // n_kv)
        last = q[-64:].transpose(0, 1) * d**-0.5
        scores = last @ keys.transpose(1, 2)
        positions = torch.arange(n, device=CUDA)
        unseen = positions[None] > positions[-64:, None]
        expected = (scores.masked_fill(unseen, -torch.inf).softmax(-1) @ values).transpose(0, 1)
        bench.agree(f"attention {name} {n}", run()[-64:], expected, within=0.002)
        pairs = n * (n + 1) / 2
        bench.time(f"attention {name} {heads}/{n_kv}x{d}, {n} tokens", run, flops=4.0 * heads * d * pairs)
        if kv.pooled is not None and n > SELECT * RATIO:
            limits = (positions + 1) // RATIO
            draw = torch.rand((n, n // RATIO), device=CUDA)
            draw.masked_fill_(torch.arange(n // RATIO, device=CUDA)[None] >= limits[:, None], -1.0)
            chosen = draw.topk(SELECT).indices.sort().values.to(torch.int32)
            few = limits[:, None] <= SELECT
            everything = torch.arange(SELECT, device=CUDA, dtype=torch.int32)[None]
            chosen = torch.where(few, torch.where(everything < limits[:, None], everything, -1), chosen).contiguous()
            run = partial(run, selected=chosen)
            is_chosen = torch.zeros((64, n // RATIO + 1), dtype=torch.bool, device=CUDA)
            is_chosen.scatter_(1, chosen[-64:].long(), True)
            seen = is_chosen.repeat_interleave(RATIO, 1)[:, :n]
            seen |= positions[None] >= (limits[-64:] * RATIO)[:, None]
            expected = (scores.masked_fill(unseen | ~seen, -torch.inf).softmax(-1) @ values).transpose(0, 1)
            bench.agree(f"selected keys {n}", run()[-64:], expected, within=0.002)
            n_bytes = float(n_kv * d * 4 * (torch.minimum(limits, torch.tensor(SELECT, device=CUDA)) * RATIO).sum())
            bench.time(f"selected keys {name}, {n} tokens, from the L2 cache", run, n_bytes=n_bytes)


def bench_conv(bench: Bench, n: int) -> None:
    """The convolution in front of the delta rule, with norms."""
    channels = (2 * K_HEADS + HEADS) * HEAD_DIM
    state = ConvState(torch.randn((1, 3, channels), device=CUDA), torch.zeros((1, 1, channels), device=CUDA))
    x, kernel = torch.randn((n, channels), device=CUDA), torch.randn((channels, 4), device=CUDA)
    rows = Rows(torch.arange(n, device=CUDA), (Span(0, n, 0, [0], 0),), max_keys=n)
    out = torch.empty((n, channels), dtype=torch.bfloat16, device=CUDA)
    run = partial(chunk_conv, x, kernel, state, rows, dilation=1, k_heads=(K_HEADS, HEAD_DIM), out=out)
    run()
    inputs = torch.cat((state.tail[0], x[:64])).double()
    mixed = sum(inputs[t : t + 64] * kernel[:, t].double() for t in range(4))
    heads = torch.nn.functional.silu(mixed).view(64, -1, HEAD_DIM)
    heads[:, : 2 * K_HEADS] = torch.nn.functional.normalize(heads[:, : 2 * K_HEADS], dim=-1)
    heads[:, :K_HEADS] *= HEAD_DIM**-0.5
    bench.agree(f"convolution {n}", out[:64], heads.flatten(1), within=0.005)
    bench.time(f"convolution {n}", run, n_bytes=float(x.nbytes + out.nbytes))


def run_script(report: Report, measure_all: Callable[[Bench], None], *, repeats: int, results: Path) -> int:
    """The exit status of a script that measures kernels: shows and writes the report, or says what is wrong."""
    if not torch.cuda.is_available():
        print("error: kernels are measured on a CUDA GPU, and torch finds none", file=sys.stderr)
        return 2
    bench = Bench(report, repeats)
    try:
        bench.take_ceilings()
        measure_all(bench)
        report.finish(results, Console(highlight=False, width=120))
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--results", type=Path, default=Path("bench", "results"))
    options = parser.parse_args()

    def measure_all(bench: Bench) -> None:
        for n_tokens in options.tokens:
            bench_experts(bench, n_tokens)
        for n in (2048, 8192):
            bench_linears(bench, n)
            bench_delta(bench, n)
            bench_conv(bench, n)
        bench_attention(bench, 8192)

    report = Report("prefill-kernels", ["bench/prefill_kernels.py", *sys.argv[1:]], kernels=("triton",))
    return run_script(report, measure_all, repeats=options.repeats, results=options.results)


if __name__ == "__main__":
    sys.exit(main())
