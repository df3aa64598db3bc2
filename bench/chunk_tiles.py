"""Ways to cut the kernels of a chunk's mixer into programs, at Flash-Next's shapes on a CUDA GPU: which is fastest.

    PYTHONPATH=src python -m bench.chunk_tiles [--rows 4096] [--only NAME...] [--results bench/results]

What is in use is marked; all ways of a product must give the same bits. Prints a table and one JSON object.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import triton
from bench.prefill_kernels import BLOCK_TOKENS, CUDA, RATIO, SELECT, Bench, run_script

from makeway.bench.report import Report
from makeway.kernels import KVLayer, Rows, Span
from makeway.kernels.triton import fused, index, streams
from makeway.kernels.triton.choose import IndexScratch
from makeway.kernels.triton.chunk_linear import FEW, NARROW, dense
from makeway.kernels.triton.gemm import HOPPER, Tile
from makeway.kernels.triton.index import index_select
from makeway.kernels.triton.launch import overlap
from makeway.kernels.triton.ops import INDEX_ROWS

STREAMS, HIDDEN, HEADS, HEAD_DIM = 4, 2560, 48, 128
PRODUCTS = (  # outputs, inputs, terms, type of the output
    ("qkv, gate, alpha, beta", 16480, 2560, 1, torch.float32),
    ("queries", 12288, 2560, 1, torch.float32),
    ("out", 2560, 6144, 1, torch.float32),
    ("streams down", 324, 10240, 1, torch.float32),
    ("streams up", 10240, 320, 1, torch.bfloat16),
    ("router", 513, 2560, 3, torch.float32),
    ("shared gate, up", 1280, 2560, 1, torch.float32),
    ("shared down", 2560, 640, 1, torch.float32),
    ("keys, values", 1024, 2560, 1, torch.float32),
)
TILES = (
    HOPPER.linear,
    HOPPER.narrow,
    Tile(128, 128, 64, warps=8, stages=3, described=True),
    Tile(128, 128, 64, warps=4, stages=3, described=True),
    Tile(128, 256, 64, warps=8, stages=4, described=True),
    Tile(256, 128, 64, warps=8, stages=3, described=True),
    Tile(64, 128, 64, warps=4, stages=4, described=True),
    Tile(64, 64, 64, warps=4, stages=4, described=True),
)


def bench_products(bench: Bench, n: int, names: list[str]) -> None:
    """Every product with every tile."""
    for name, n_rows, n_cols, n_terms, kind in PRODUCTS:
        if names and not any(part in name for part in names):
            continue
        x = torch.randn((n, n_cols), device=CUDA).bfloat16()
        weights = torch.randn((n_terms * n_rows, n_cols), device=CUDA).bfloat16().view(-1)
        in_use = HOPPER.narrow if n_rows <= NARROW or n <= FEW else HOPPER.linear
        first = None
        for tile in TILES:
            out = torch.empty((n, n_rows), dtype=kind, device=CUDA)
            run = partial(dense, x, weights, out, tile=tile, n_terms=n_terms, term_rows=n_rows)
            run()
            first = out.clone() if first is None else first
            bench.agree(f"{name} {tile}", out, first, within=1e-30)
            mark = " *" if tile == in_use else ""
            label = f"{name}: {tile.rows}x{tile.columns} w{tile.warps} s{tile.stages}{mark}"
            bench.time(label, run, flops=2.0 * n * n_rows * n_cols * n_terms)


def bench_norms(bench: Bench, n: int) -> None:
    """The passes over streams and heads between the products."""
    h = torch.randn((n, STREAMS, HIDDEN), device=CUDA)
    inject, added = torch.rand((n, STREAMS), device=CUDA), torch.randn((n, HIDDEN), device=CUDA)
    gamma, parts = torch.rand(STREAMS * HIDDEN, device=CUDA), torch.empty((n, STREAMS * HIDDEN), device=CUDA).bfloat16()
    sizes = {"D": HIDDEN, "PADDED": triton.next_power_of_2(HIDDEN), "ADD": True, "WHOLE": False, "PARTS": 1}
    for warps in (2, 4, 8, 16):
        arguments = (h, inject * 0, added, gamma, h, parts, parts, parts.numel(), 1e-6)
        run = partial(streams.stream_norm_kernel[(n, STREAMS)], *arguments, **sizes, num_warps=warps, **overlap(CUDA))
        mark = " *" if warps == 8 else ""
        bench.time(f"norm of streams: w{warps}{mark}", run, n_bytes=2.0 * h.nbytes + added.nbytes + parts.nbytes)
    up, x = torch.randn((n, STREAMS * HIDDEN), device=CUDA).bfloat16(), torch.empty((n, HIDDEN), device=CUDA)
    low = x.bfloat16()
    for block, warps in ((256, 2), (256, 4), (512, 2), (512, 4), (1024, 4), (1024, 8)):
        arguments = (up, parts, inject, x, low, inject.clone(), x.numel(), HIDDEN, STREAMS)
        sizes = {"N_STREAMS": STREAMS, "PADDED_STREAMS": STREAMS, "BLOCK": block, "INJECT": True, "WHOLE": False}
        grid = (n, triton.cdiv(HIDDEN, block))
        run = partial(streams.mix_kernel[grid], *arguments, **sizes, PARTS=1, num_warps=warps, **overlap(CUDA))
        mark = " *" if (block, warps) == (256, 2) else ""
        bench.time(f"mix of streams: {block} w{warps}{mark}", run, n_bytes=2.0 * up.nbytes + low.nbytes)
    value, gate = torch.randn((n, HEADS, HEAD_DIM), device=CUDA), torch.randn((n, HEADS * HEAD_DIM), device=CUDA)
    out = torch.empty_like(gate).bfloat16()
    for heads, warps in ((1, 1), (4, 1), (4, 4), (8, 2), (8, 4), (16, 4), (16, 8), (32, 8)):
        arguments = (value, gate, gamma[:HEAD_DIM], out, out, value.numel(), HEADS * HEAD_DIM, HEADS, 1e-6)
        sizes = {"D": HEAD_DIM, "HEADS": heads, "SIGMOID": True, "WHOLE": False, "PARTS": 1}
        grid = (n, triton.cdiv(HEADS, heads))
        run = partial(fused.gated_norm_kernel[grid], *arguments, **sizes, num_warps=warps, **overlap(CUDA))
        mark = " *" if (heads, warps) == (fused.CHUNK_HEADS, 4) else ""
        bench.time(f"gated norm: {heads} heads w{warps}{mark}", run, n_bytes=2.0 * value.nbytes + out.nbytes)


def bench_choice(bench: Bench, _: int) -> None:
    """The indexer's choice for 256 rows of many blocks: counts of blocks, or of groups, by several tiles a program."""
    tiles, many = index.TILES, index.MANY
    for n_tokens in (32768, 119808):
        blocks = list(range(n_tokens // BLOCK_TOKENS))
        pool = torch.zeros((len(blocks), BLOCK_TOKENS, 1, 1), device=CUDA).half()
        pooled = torch.randn((len(blocks), BLOCK_TOKENS // RATIO, 128), device=CUDA).half()
        kv = KVLayer(pool, pool, pooled, torch.zeros((1, 16, 128), device=CUDA))
        first = n_tokens - INDEX_ROWS
        positions = torch.arange(first, n_tokens, device=CUDA)
        rows = Rows(positions, (Span(0, INDEX_ROWS, first, blocks, 0),), max_keys=n_tokens)
        scratch = IndexScratch(CUDA, n_blocks=1 << (n_tokens // RATIO).bit_length(), n_rows=INDEX_ROWS)
        q = torch.randn((INDEX_ROWS, 4, 128), device=CUDA)
        run = partial(index_select, q, kv, rows=rows, n_select=SELECT, scratch=scratch)
        expected = None
        for ways in (0, 1, 2, 4, 8):
            index.TILES, index.MANY = max(1, ways), many if ways else 1 << 20
            found = run()
            expected = found if expected is None else expected
            bench.agree(f"choice {n_tokens} {ways}", found, expected, within=1e-30)
            what = f"groups, {ways} tiles" if ways else "blocks"
            mark = " *" if ways == tiles else ""
            flops = 2.0 * 2 * INDEX_ROWS * 4 * 128 * n_tokens // RATIO  # a query's high and low parts
            bench.time(f"choice among {n_tokens // RATIO}: {what}{mark}", run, flops=flops)
        index.TILES, index.MANY = tiles, many


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096)
    parser.add_argument("--only", nargs="*", default=[], help="names of products, or: norms, choice")
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--results", type=Path, default=Path("bench", "results"))
    options = parser.parse_args()
    others: dict[str, Callable[[Bench, int], None]] = {"norms": bench_norms, "choice": bench_choice}
    names = [name for name in options.only if name not in others]

    def measure_all(bench: Bench) -> None:
        for name, measure in others.items():
            if not options.only or name in options.only:
                measure(bench, options.rows)
        if names or not options.only:
            bench_products(bench, options.rows, names)

    report = Report("chunk-tiles", ["bench/chunk_tiles.py", *sys.argv[1:]], kernels=("triton",))
    return run_script(report, measure_all, repeats=options.repeats, results=options.results)


if __name__ == "__main__":
    sys.exit(main())
