"""Compiles the prefill kernels ahead of time, without a GPU; run as a program, because the tests' process interprets.

`python -m tests.kernels.triton.compile_prefill quick|all` prints one JSON list: name, arch, shared bytes.
"""

import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import triton.language as tl

from makeway.gguf.types import GGMLType
from makeway.kernels.triton import attend_chunk, chunk_conv, chunk_delta, chunk_linear, decode, gemm, move, sort
from makeway.kernels.triton.unpack import PLANES, planes_for
from tests.kernels.triton.compile_kernels import compiled

F32, BF16, I32, I64 = "*fp32", "*bf16", "*i32", "*i64"
ARCHITECTURES = {86: gemm.AMPERE, 90: gemm.HOPPER}


@dataclass(frozen=True)
class Case:
    name: str
    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any] = field(default_factory=dict)


MOVE = Case("move", move.move_kernel, {"memory": I64, "parts": I64}, {"BLOCK": move.BLOCK_BYTES // 8, "num_warps": 8})


def tile_constants(tile: gemm.Tile) -> dict[str, Any]:
    sizes = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "EVEN": True, "DESCRIBED": tile.described}
    return {**sizes, "num_warps": tile.warps, "num_stages": tile.stages}


def operands(tile: gemm.Tile, *, both: bool) -> dict[str, str]:
    """Types of x and weights; `both` are described where the tile's operands are, else the weights alone."""
    if not tile.described:
        return {"x": BF16, "weights": BF16}
    left = f"tensordesc<bf16[{tile.rows},{tile.depth}]>" if both else BF16
    return {"x": left, "weights": f"tensordesc<bf16[{tile.columns},{tile.depth}]>"}


def decode_case(kind: GGMLType, n_cols: int, *, stacked: bool = False) -> Case:
    planes = planes_for(kind, n_cols)
    constants = planes.arguments()
    del constants["GROUP"], constants["PARTS"]
    constants |= {
        "ALIGNED": 16,
        "TERMS": planes.parts,
        "STACKED": stacked,
        "TOGETHER": math.gcd(4, planes.step // planes.width),
        "STEPS": max(1, decode.DECODE_STEPS // planes.step),
        "ROWS": decode.DECODE_ROWS,
        "num_warps": 4,
        "enable_fp_fusion": False,
    }
    types = {"room": "*u8", "where": I64, "counted": I32, "out": BF16, "table": I32}
    return Case(f"decode {kind.name}", decode.decode_kernel, types, constants)


def product_cases(tiles: gemm.Tiles) -> Iterator[Case]:
    experts = {"starts": I64, "order": I32, "offsets": I32, "pair_weights": F32}
    for kernel, tile, out in ((gemm.gate_up_kernel, tiles.gate_up, BF16), (gemm.down_kernel, tiles.down, BF16)):
        for each in {tile, replace(tile, described=False)}:  # bf16 experts are multiplied where they lie
            types = {**experts, **operands(each, both=kernel is gemm.down_kernel), "out": out}
            name = kernel.__name__.removesuffix("_kernel") + (" described" if each.described else "")
            yield Case(name, kernel, types, {"EXPERTS": 64, **tile_constants(each)})
    for name, tile, terms in (("linear", tiles.linear, 1), ("narrow", tiles.narrow, 3)):
        constants = {"TERMS": terms, "SWATH": chunk_linear.SWATH, **tile_constants(tile)}
        yield Case(name, chunk_linear.dense_kernel, {**operands(tile, both=True), "out": F32}, constants)


def delta_cases() -> Iterator[Case]:
    sizes = {"GROUP": 3, "D_K": 128, "D_V": 128, "CHUNK": chunk_delta.CHUNK, "num_warps": 4}
    types = dict.fromkeys(("q", "k", "v", "change", "recall", "attend", "out"), BF16)
    types |= dict.fromkeys(("decay", "beta", "sums", "state"), F32)
    constants = {**sizes, "BLOCK_V": chunk_delta.BLOCK_V, "num_stages": 2}
    yield Case("delta advance", chunk_delta.advance_kernel, types, constants)
    constants = {**sizes, "LEAST": chunk_delta.LEAST_DECAY, "num_stages": 1}
    yield Case("delta prepare", chunk_delta.prepare_kernel, types, constants)
    types = dict.fromkeys(("alpha", "beta", "a", "dt_bias", "decay_out", "beta_out"), F32)
    constants = {"HEADS": 64, "ROWS": chunk_delta.GATE_ROWS, "num_warps": 4}
    yield Case("delta gates", chunk_delta.gates_kernel, types, constants)


def conv_cases() -> Iterator[Case]:
    types = dict.fromkeys(("x", "kernel", "tail", "kept"), F32)
    types |= dict.fromkeys(("first_row", "n_rows", "places", "n_replay"), I32)
    for norm, dilation, out in ((True, 1, BF16), (False, 3, F32)):
        sizes = {"TAPS": 4, "DILATION": dilation, "N_TAIL": 3 * dilation, "ROWS": chunk_conv.TILE_ROWS, "BLOCK": 128}
        constants = {**sizes, "NORM": norm, "num_warps": 4}
        yield Case(
            f"conv {dilation}", chunk_conv.chunk_conv_kernel, {**types, "out": out, "q_scale": "fp32"}, constants
        )


def sort_cases() -> Iterator[Case]:
    types = {"ids": I64, "offsets": I32, "places": I32, "order": I32, "nexts": I32, "acc": F32, "out": BF16}
    yield Case("count", sort.count_kernel, types, {"BINS": 512, "TILE": sort.COUNT_TILE, "num_warps": 4})
    yield Case("scan", sort.scan_kernel, types, {"BINS": 512, "ROWS": sort.SCAN_ROWS, "num_warps": 16})
    yield Case("place", sort.place_kernel, types, {"TILE": sort.PLACE_TILE, "num_warps": 8})
    constants = {"TOP_K": 16, "COLUMNS": sort.COMBINE_COLUMNS, "num_warps": 4}
    yield Case("combine", sort.combine_kernel, types, constants)
    yield MOVE


def attention_cases(tiles: gemm.Tiles) -> Iterator[Case]:
    """Flash-Next's and the 30B's heads."""
    table = attend_chunk.AMPERE if tiles is gemm.AMPERE else attend_chunk.HOPPER
    for d, group, tiling, kind in (
        (256, 12, table[True], "*fp16"),
        (128, 8, table[False], "*fp16"),
        (128, 8, attend_chunk.EXACT, F32),
    ):
        heads = 1 << (group - 1).bit_length()
        constants = {
            "GROUP": group,
            "HEADS": heads,
            "QUERIES": max(1, tiling.rows // heads),
            "D": d,
            "BLOCK_TOKENS": 64,
            "KEYS": tiling.keys,
            "KIND": tl.float32 if kind == F32 else tl.float16,
            "DESCRIBED": tiling.described,
            "GATED": True,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        pools = {"key_pool": kind, "value_pool": kind, "positions": I64, "selected": I32, "row_segment": I32}
        types = {**pools, "q": F32, "gate": F32, "blocks": I32, "block_tables": I32, "out": F32}
        pool = f"tensordesc<fp16[{tiling.keys},{d}]>" if tiling.described else kind
        chunk_types = {**types, "key_pool": pool, "value_pool": pool}
        yield Case(f"attention {d} {kind}", attend_chunk.chunk_kernel, chunk_types, constants)
        few = attend_chunk.selected_tiling(kind != F32)
        constants = {
            "GROUP": group,
            "M": 16,
            "D": d,
            "BLOCK_TOKENS": 64,
            "RATIO": 4,
            "KEYS": few.keys,
            "GATED": True,
            "num_warps": few.warps,
            "num_stages": few.stages,
        }
        yield Case(f"selected keys {d} {kind}", attend_chunk.selected_kernel, types, constants)


def cases(tiles: gemm.Tiles, *, every: bool) -> Iterator[Case]:
    """The kernels with the largest tiles, or all."""
    yield from list(product_cases(tiles)) if every else list(product_cases(tiles))[:2]
    if not every:
        yield decode_case(GGMLType.Q5_1, 640)
        yield next(delta_cases())
        yield MOVE
        return
    yield from attention_cases(tiles)
    yield from delta_cases()
    yield from conv_cases()
    yield from sort_cases()
    for kind in PLANES:
        yield decode_case(kind, 2560)
    for kind in (GGMLType.Q8_0, GGMLType.F32):
        yield decode_case(kind, 2560, stacked=True)


def main(*, every: bool) -> None:
    found = []
    for arch, tiles in ARCHITECTURES.items():
        if arch != 86 and not every:
            continue
        for case in cases(tiles, every=every):
            result = compiled(case.kernel, case.constants, arch=arch, types=case.types)
            found.append({"name": case.name, "arch": arch, "shared": result.metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main(every=sys.argv[1] == "all")
