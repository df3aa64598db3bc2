"""Compiles decode kernels ahead of time, without a GPU; a program of its own, for the tests' process interprets them.

`python -m tests.kernels.triton.compile_kernels quick|all` prints one JSON list: name, architecture, bytes of shared
memory.
"""

import json
import re
import sys
from collections.abc import Iterator
from typing import Any

from triton import compile as compile_kernel
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels.triton import rows
from makeway.kernels.triton.experts import (
    COMBINE,
    down_kernel,
    down_tiling,
    gate_up_kernel,
    gate_up_tiling,
)
from makeway.kernels.triton.fetch import FETCH_PROGRAMS, FETCH_WORDS, POLLS, fetch_guesses_kernel, fetch_kernel
from makeway.kernels.triton.guess import guess_kernel
from makeway.kernels.triton.linear import linear_kernel, split_kernel, tiling
from makeway.kernels.triton.step_plan import plan_kernel
from makeway.kernels.triton.unpack import PLANES, planes_for

POINTERS = {
    "raw": "*u8",
    "arena": "*u8",
    "counters": "*i32",
    "table": "*i32",
    "experts": "*i32",
    "offsets": "*i64",
    "missing": "*i32",
    "chosen_by": "*i32",
    "count": "*i32",
    "fetched": "*i32",
    "first_row": "*i32",
    "routed": "*i32",
    "live": "*i32",
    "ids": "*i64",
    "slot_of": "*i32",
    "wanted": "*u8",
    "spares": "*i32",
    "guesses": "*i32",
    "guesses_at": "*i64",
    "guesses_spare": "*i32",
    "limit": "*i32",
    "taken": "*i32",
    "arrived": "*i32",
    "told": "*i32",
    "earlier": "*i32",
    "earlier_spares": "*i32",
    "experts_b": "*i32",
    "offsets_b": "*i64",
    "arrived_b": "*i32",
}
FLOATS = ("out", "parts", "acc_out", "outputs", "weights", "routing")
HALVES = ("x", "hidden_out", "hidden_in")
LONGS = ("slots_at", "slot_stride", "transient_at", "transient_stride", "rooms_at", "room_stride")
ANY_VALUE = ("n", "n_ids", "n_spares", "top_k")


ACCESS = re.compile(r"\b(ld(?!\.param|\.shared)|st(?!\.param|\.shared)|atom|red(?!ux)|cp|prefetch\w*|discard)\.")
"""Of memory that other kernels know of, in PTX."""
CHANGE = re.compile(r"\b(st(?!\.param|\.shared)|atom|red(?!ux)|discard)\.")
READ_EARLY = (
    ("attend", "row_kernel"),
    ("attend", "combine_kernel"),
    ("attend_input", "attend_input_kernel"),
    ("conv", "conv_kernel"),
    ("delta", "delta_kernel"),
    ("index", "row_score_kernel"),
)
"""Modules and kernels that load what was there before the pass while they wait, see `launch.py`."""

GUESS = {"GUESSES": 4, "PROGRAMS": FETCH_PROGRAMS, "HAS_LIVE": True, "num_warps": 4}
PLAN = {"N": 8, "HAS_LIVE": True, "WORDS": FETCH_WORDS, "POLLS": POLLS, "num_warps": 8}


def waits_first(ptx: str, *, reads_early: bool) -> bool:
    """Whether a kernel waits for those before it, and touches (with `reads_early`: changes) no memory until then.
    Raises AssertionError when it waits too late."""
    waits = ptx.find("griddepcontrol.wait")
    access = (CHANGE if reads_early else ACCESS).search(ptx)
    assert access is None or waits < access.start(), f"{access.group()} comes before the wait"
    return waits >= 0


def compiled(kernel: Any, constants: dict[str, Any], *, arch: int, types: dict[str, str] | None = None) -> Any:
    """The kernel for one specialisation, sizes and strides being multiples of 16; options stand among the constants.
    Where it may begin before the one in front of it has ended, it does; whether it waits then is checked."""
    kernel = getattr(kernel, "jit", kernel)  # as it is launched
    overlaps = arch >= 90 and "PDL" in kernel.arg_names
    if "PDL" in kernel.arg_names:
        constants = {**constants, "PDL": overlaps, "launch_pdl": overlaps}
    known = {
        **POINTERS,
        **dict.fromkeys(FLOATS, "*fp32"),
        **dict.fromkeys(HALVES, "*bf16"),
        **dict.fromkeys(LONGS, "i64"),
        **(types or {}),
    }
    options = {name: value for name, value in constants.items() if name not in kernel.arg_names}
    constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
    signature = {name: "constexpr" if name in constants else known.get(name, "i32") for name in kernel.arg_names}
    multiples = {
        (i,): [["tt.divisibility", 16]]
        for i, (name, kind) in enumerate(signature.items())
        if kind != "constexpr" and name not in ANY_VALUE
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=multiples)
    target = GPUTarget("cuda", arch, 32)
    result = compile_kernel(source, target=target, options={"enable_fp_fusion": True, **options})
    reads_early = (kernel.fn.__module__.rpartition(".")[2], kernel.__name__) in READ_EARLY
    assert waits_first(result.asm["ptx"], reads_early=reads_early) == result.metadata.launch_pdl == overlaps, kernel
    return result


def linear_case(
    kind: GGMLType, n_rows: int, n_cols: int, x_parts: int
) -> tuple[str, Any, dict[str, Any], dict[str, str]]:
    """A linear of the decode step."""
    constants = {
        **planes_for(kind, n_cols).arguments(),
        **tiling(kind, n_rows, n_cols).arguments(),
        "X_PARTS": x_parts,
        "N": 8,
    }
    return f"linear {kind.name} {n_rows}x{n_cols} of {x_parts}", linear_kernel, constants, {}


def gate_up_case(
    gate: GGMLType, up: GGMLType, hidden: int, width: int
) -> tuple[str, Any, dict[str, Any], dict[str, str]]:
    tiles, up_unroll = gate_up_tiling(gate, up, hidden)
    constants = {
        **planes_for(gate, hidden).arguments("G_"),
        **planes_for(up, hidden).arguments("U_"),
        **tiles.arguments(),
        "U_UNROLL": up_unroll,
        "ALIKE": gate == up,
        "X_PARTS": 2,
        "N": 8,
    }
    return f"gate_up {gate.name} {up.name}", gate_up_kernel, constants, {}


def down_case(kind: GGMLType, hidden: int, width: int) -> tuple[str, Any, dict[str, Any], dict[str, str]]:
    constants = {
        **planes_for(kind, width).arguments(),
        **down_tiling(kind, width).arguments(),
        "N": 8,
        "COMBINE": COMBINE,
    }
    del constants["SPLIT"]
    return f"down {kind.name} {hidden}x{width}", down_kernel, constants, {}


def rows_case(kind: GGMLType, n_cols: int) -> tuple[str, Any, dict[str, Any], dict[str, str]]:
    constants = {**planes_for(kind, n_cols).arguments(), "ROWS": rows.ROWS, "num_warps": 1, "enable_fp_fusion": False}
    del constants["GROUP"], constants["PARTS"]
    return f"rows {kind.name} {n_cols}", rows.rows_kernel, constants, {}


def cases(every: bool) -> Iterator[tuple[str, Any, dict[str, Any], dict[str, str]]]:
    """Name, kernel, constants, argument types. Small matrices unroll little, so that they compile quickly."""
    words = {"store": "*i32", "store_b": "*i32", "arena": "*i32"}
    yield "fetch", fetch_kernel, {"WORDS": FETCH_WORDS, "POLLS": POLLS, "num_warps": 8}, words
    yield "fetch guesses", fetch_guesses_kernel, {"GUESSES": 4, "LISTS": 2, "WORDS": FETCH_WORDS, "num_warps": 8}, words
    alone = {**PLAN, "PADDED": 16, "SPARES": 4, "FETCH": True}
    yield "plan for 1 row", plan_kernel, {**alone, "GUESSES": 8}, words
    yield "guess for 1 row", guess_kernel, {**GUESS, "PADDED": 16, "EARLIER": 4}, {}
    yield linear_case(GGMLType.Q8_0, 64, 64, 1)
    yield down_case(GGMLType.Q5_1, 32, 32)
    if not every:
        return
    yield "plan for 1 row, none guessed", plan_kernel, {**alone, "GUESSES": 0}, words
    many = {**PLAN, "PADDED": 128, "SPARES": 8, "FETCH": False}
    yield "plan for 8 rows", plan_kernel, {**many, "GUESSES": 8}, words
    yield "guess for 8 rows", guess_kernel, {**GUESS, "PADDED": 128, "EARLIER": 0}, {}
    yield "split", split_kernel, {"BLOCK": 1024, "num_warps": 4}, {"x": "*fp32", "out": "*bf16"}
    yield linear_case(GGMLType.Q6_K, 248320, 2560, 2)
    for kind in PLANES:
        yield linear_case(kind, 12288, 2560, 1)
        yield linear_case(kind, 640, 2560, 2)
        yield gate_up_case(kind, kind, 2560, 640)
        yield down_case(kind, 2048, 768)
        yield rows_case(kind, 2560)
        if 640 % BLOCK_SIZES[kind].elements == 0:
            yield down_case(kind, 2560, 640)
    yield gate_up_case(GGMLType.Q4_K, GGMLType.Q6_K, 2560, 640)


def main(every: bool) -> None:
    found = []
    for name, kernel, constants, types in cases(every):
        for arch in (86, 90) if every or kernel is linear_kernel else (86,):
            result = compiled(kernel, constants, arch=arch, types=types)
            found.append({"name": name, "arch": arch, "shared": result.metadata.shared})
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1] == "all")
