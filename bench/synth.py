"""Writes a synthetic model of full shape as a GGUF file that makeway and llama.cpp load.

    python bench/synth.py OUT.gguf --shape flash-next --layers 24
    python bench/synth.py OUT.gguf --shape qwen3-30b-a3b --skew 0.4 --locality 0

Hazard: the file is as big as the real model (24 Flash-Next layers 40 GB, all 48 with PLE and MTP 110 GB, 30B 17 GB).
Prints, as its last line, one JSON object.
"""

import argparse
import json
import sys
import time
from dataclasses import replace
from pathlib import Path

from makeway.bench.shapes import SHAPES, Qwen4ExpShape
from makeway.bench.specs import Shape
from makeway.bench.synth import synthesize, write_model
from makeway.bench.topics import Knobs
from makeway.errors import UserError


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("out", type=Path)
    made.add_argument("--shape", choices=list(SHAPES), default="flash-next")
    made.add_argument("--layers", type=int, help="instead of the shape's own number")
    made.add_argument("--mtp", action="store_true", help="add the MTP block (Flash-Next)")
    made.add_argument("--ple-rows", type=int, help="rows of the n-gram table, 0 for none (Flash-Next; real 320001536)")
    made.add_argument("--skew", type=float, default=Knobs.skew, help="router rows scaled by rank^-skew")
    made.add_argument("--locality", type=float, default=Knobs.locality, help="likeness of tokens of one topic, 0 to 1")
    made.add_argument("--topics", type=int, default=Knobs.n_topics)
    made.add_argument("--pull", type=float, default=Knobs.pull, help="how much the output prefers the topic")
    made.add_argument("--seed", type=int, default=Knobs.seed)
    made.add_argument("--threads", type=int, help="that write (default: one a core)")
    return made


def shape_of(options: argparse.Namespace) -> Shape:
    """The shape with the changes asked for. Raises UserError for those it does not know."""
    shape = SHAPES[options.shape]
    changes = {
        "n_layers": options.layers,
        "n_draft": 1 if options.mtp else None,
        "ple_rows": options.ple_rows,
    }
    changes = {name: value for name, value in changes.items() if value is not None}
    if not isinstance(shape, Qwen4ExpShape) and changes.keys() - {"n_layers"}:
        raise UserError(f"--shape {options.shape} has neither MTP nor PLE; leave --mtp and --ple-rows out")
    return replace(shape, **changes)


def main() -> int:
    options = parser().parse_args()
    try:
        knobs = Knobs(options.skew, options.locality, options.topics, options.pull, options.seed)
        begin = time.perf_counter()
        model = synthesize(shape_of(options), knobs)
        made_s = time.perf_counter() - begin
        begin = time.perf_counter()
        n_bytes = write_model(model, options.out, n_threads=options.threads)
        written_s = time.perf_counter() - begin
    except (UserError, ValueError) as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    print(f"{options.out}: {n_bytes / 1e9:.2f} GB, made in {made_s:.1f} s, written in {written_s:.1f} s")
    result = {"bench": "synth", "shape": options.shape, "n_bytes": n_bytes, "made_s": made_s, "written_s": written_s}
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
