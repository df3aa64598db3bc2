"""Compiles the kernels of a decode step that are no matrices ahead of time, without a GPU, at the real models' shapes.

`python -m tests.kernels.triton.compile_step [name...]` prints one JSON list: name, architecture, bytes of shared
memory.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any

from makeway.gguf.types import GGMLType
from makeway.kernels.triton import (
    attend,
    attend_input,
    choose,
    conv,
    delta,
    fused,
    index,
    linears,
    moe_input,
    small,
    streams,
)
from makeway.kernels.triton.linear import tiling
from makeway.kernels.triton.unpack import planes_for
from tests.kernels.triton.compile_kernels import compiled

Case = tuple[str, Any, dict[str, Any], dict[str, str]]

INTS = "row_segment block_tables blocks selected first_row n_rows places n_replay bins numbers arrived"
FLOATS = (
    "x y q k v gate up keys values gamma raw ring logits weights sums kernel tail kept state decay beta kept_k kept_v"
    " kept_gates a dt_bias gates_out h inject added new_h key value norm_key norm_query norm_conv gated normed"
    " raw_inject shared_gate scores"
)
TYPES = {
    **dict.fromkeys(INTS.split(), "*i32"),
    **dict.fromkeys(FLOATS.split(), "*fp32"),
    **dict.fromkeys(("scale", "eps", "q_scale"), "fp32"),
    "positions": "*i64",
    "turns": "*fp64",
    **dict.fromkeys(("q_gamma", "k_gamma", "q_out"), "*fp32"),
}
PARTS = {**TYPES, "parts": "*bf16"}


def attention() -> Iterator[Case]:
    """Flash-Next's and the 30B's heads."""
    yield "write", attend.write_kernel, {"BLOCK_TOKENS": 64, "BLOCK": 512, "num_warps": 4}, _pools("fp16")
    for d, group in ((256, 12), (128, 8)):
        for kind in ("fp16", "fp32"):
            half, types = kind == "fp16", _pools(kind)
            common = {"GROUP": group, "D": d, "BLOCK_TOKENS": 64, "HALF": half}
            row = {**common, "M": 16, "num_warps": 8 if half else 4, "num_stages": 2}
            splits = {"KEYS": attend.row_keys(half), "MOST_SPLITS": attend.MOST_SPLITS}
            for ratio in (0, 4):
                constants = {**row, **splits, "RATIO": ratio}
                yield f"row {d} {kind} {ratio}", attend.row_kernel, constants, types
        heads = {"HEADS": 2 * group, "KV_HEADS": 2, "D": d, "PADDED": d, "HALF": 32, "BLOCK_TOKENS": 64}
        types = {**_pools("fp16"), "q_gamma": "*fp32", "k_gamma": "*fp32"}
        yield f"attend input {d}", attend_input.attend_input_kernel, {**heads, "num_warps": 1}, types
        constants = {"D": d, "RATIO": 4, "KEYS": 64, "MOST_SPLITS": attend.MOST_SPLITS, "GATED": True}
        constants |= {"AT_ONCE": attend.COMBINE_SPLITS, "num_warps": 4}
        yield f"combine {d}", attend.combine_kernel, constants, TYPES


def _pools(kind: str) -> dict[str, str]:
    return {**TYPES, **dict.fromkeys(("key_pool", "value_pool", "pooled"), f"*{kind}")}


def indexer() -> Iterator[Case]:
    bins = {"N_BINS": choose.N_BINS, "LOW_BITS": choose.LOW_BITS, "FIRST_BIN": choose.FIRST_BIN, "RATIO": 4}
    for kind in ("fp16", "fp32"):
        sizes = {"N_RING": 16, "RATIO": 4, "PER_BLOCK": 16, "D": 128, "PADDED": 128, "HALF": 32}
        constants = {**sizes, "POOL": True, "KEEP_RAW": True, "num_warps": 1}
        yield f"pool {kind}", index.pool_kernel, constants, _pools(kind)
        sizes = {"PER_BLOCK": 16, "N_HEADS": 4, "D": 128, "KEYS": index.SCORE_KEYS, "HALF": kind == "fp16"}
        constants = {**bins, **sizes, "num_warps": 4}
        yield f"score a row {kind}", index.row_score_kernel, {**constants, "HEADS": 8}, _pools(kind)
        for tiles, group in ((1, 1), (index.TILES, index.GROUP)):
            chunk = {**constants, "HEADS": 4, "ROWS": index.CHUNK_ROWS, "TILES": tiles, "GROUP": group}
            yield f"score a chunk {kind} {group}", index.score_kernel, chunk, _pools(kind)
    constants = {
        **bins,
        "TILE": choose.SELECT_TILE,
        "PART": choose.LIST_PART,
        "SELECT": 512,
        "num_warps": choose.SELECT_WARPS,
    }
    for grouped in (False, True):
        types = {**TYPES, "out": "*i32", "counts": "*i16"}
        yield f"select {grouped}", choose.select_kernel, {**constants, "GROUPED": grouped}, types


def recurrent() -> Iterator[Case]:
    for run, mode in ((True, 1), (True, 2), (False, 1), (False, 3)):
        sizes = {"TAPS": 4, "DILATION": 1, "N_TAIL": 3, "BLOCK": 128, "TAIL_TILE": 4}
        constants = {**sizes, "RUN": run, "MODE": mode, "NORM": True, "num_warps": 1}
        yield f"conv {mode} {run}", conv.conv_kernel, constants, TYPES
    sizes = {"TAPS": 4, "DILATION": 3, "N_TAIL": 9, "BLOCK": 128, "TAIL_TILE": 16}
    yield "conv of PLE", conv.conv_kernel, {**sizes, "RUN": True, "MODE": 2, "NORM": False, "num_warps": 1}, TYPES
    for mode in (1, 2, 3):
        sizes = {"GROUP": 0, "D_K": 128, "D_V": 128, "COLUMNS": delta.DELTA_COLUMNS, "MODE": mode, "RAW": True}
        yield f"delta {mode}", delta.delta_kernel, {**sizes, "num_warps": delta.DELTA_WARPS}, TYPES
    yield "keep", delta.keep_kernel, {"BLOCK": 1024, "num_warps": 4}, TYPES


def matrices() -> Iterator[Case]:
    """Small ones together: streams down and inject, router and gate, alpha and beta, the shared expert's two."""
    raws = {f"raw{i}": "*u8" for i in range(linears.TOGETHER)} | {f"out{i}": "*fp32" for i in range(linears.TOGETHER)}
    for kind, n_rows, n_cols in (
        (GGMLType.Q8_0, 324, 10240),
        (GGMLType.F32, 513, 2560),
        (GGMLType.Q4_K, 1280, 2560),
        (GGMLType.Q6_K, 1024, 2048),
    ):
        constants = {
            **planes_for(kind, n_cols).arguments(),
            **tiling(kind, n_rows, n_cols).arguments(),
            "X_PARTS": 2,
            "N": 8,
        }
        yield f"linears {kind.name}", linears.linears_kernel, constants, {**raws, "x": "*bf16", "parts": "*fp32"}


def others() -> Iterator[Case]:
    yield "norm", small.norm_kernel, {"D": 2560, "PADDED": 4096, "HALF": 0, "MODE": 1, "num_warps": 4}, TYPES
    yield "norm and rope", small.norm_kernel, {"D": 256, "PADDED": 256, "HALF": 32, "MODE": 1, "num_warps": 1}, TYPES
    for function in range(4):
        constants = {"FUNCTION": function, "BLOCK": 1024, "num_warps": 4}
        yield f"pointwise {function}", small.pointwise_kernel, constants, TYPES
    sizes = {"EXPERTS": 512, "PADDED": 512, "TOP_K": 10, "PADDED_K": 16, "num_warps": 1}
    yield "route", small.route_kernel, sizes, TYPES
    sizes = {"D": 2560, "PADDED": 4096, "ADD": True, "WHOLE": True, "PARTS": 2, "num_warps": 8}
    yield "stream norm", streams.stream_norm_kernel, sizes, PARTS
    yield "PLE gate", fused.ple_gate_kernel, {"D": 2560, "PADDED": 4096, "num_warps": 8}, PARTS
    yield "streams combined", streams.combine_kernel, {"BLOCK": 1024, "num_warps": 4}, PARTS
    yield "silu", fused.silu_kernel, {"BLOCK": 512, "PARTS": 2, "num_warps": 4}, PARTS
    sizes = {"N_STREAMS": 4, "PADDED_STREAMS": 4, "BLOCK": 256, "INJECT": True, "WHOLE": True}
    sizes |= {"PARTS": 2, "num_warps": 2}
    yield "streams mixed", streams.mix_kernel, sizes, PARTS
    yield "swiglu", fused.swiglu_kernel, {"BLOCK": 512, "PARTS": 2, "num_warps": 4}, PARTS
    for d in (2048, 2560):
        sizes = {"D": d, "PADDED": 1 << (d - 1).bit_length(), "ADD": True, "PARTS": 2, "num_warps": 8}
        yield f"add and norm {d}", fused.add_norm_kernel, sizes, PARTS
    for experts, top_k, shared in ((512, 10, True), (128, 8, False)):
        sizes = {"EXPERTS": experts, "PADDED": experts, "TOP_K": top_k, "PADDED_K": 1 << (top_k - 1).bit_length()}
        constants = {**sizes, "BLOCK": 256, "SHARED": shared, "PARTS": 2 if shared else 0, "num_warps": 1}
        yield f"choice of {experts}", moe_input.choice_kernel, constants, {**PARTS, "ids": "*i64"}
    sizes = {"D": 128, "HEADS": 1, "SIGMOID": True, "WHOLE": True}
    yield "gated norm", fused.gated_norm_kernel, {**sizes, "PARTS": 2, "num_warps": 1}, PARTS


def main(names: list[str]) -> None:
    found = []
    for make in (attention, indexer, recurrent, matrices, others):
        for name, kernel, constants, types in make():
            if names and not any(name.startswith(n) for n in names):
                continue
            for arch in (86, 90):
                result = compiled(kernel, constants, arch=arch, types=types)
                found.append({"name": name, "arch": arch, "shared": result.metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
