"""How fast `makeway.quants` decodes on the CPU: million weights per second by type and number of threads.

Run: python bench/quant_decode.py [--types Q4_K,Q8_0] [--threads 1,2] [--elements N] [--repeats R]
Prints a table and, as the last line, one JSON object. The best of the repeats counts.
"""

import argparse
import json
import time

import torch

from makeway.gguf.types import GGMLType, row_bytes
from makeway.quants import QUANT_TYPES, decode_rows

DEFAULT_TYPES = "Q4_K,Q5_1,Q6_K,Q8_0,Q5_0,IQ4_XS"
ROW = 2560


def melem_per_s(ggml_type: GGMLType, n_elements: int, repeats: int) -> float:
    """Best rate over `repeats` decodes of random bytes in rows of 2560 weights."""
    n_rows = max(1, n_elements // ROW)
    generator = torch.Generator().manual_seed(0)
    shape = (n_rows, row_bytes(ggml_type, ROW))
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        decode_rows(raw, ggml_type)
        best = min(best, time.perf_counter() - start)
    return n_rows * ROW / best / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--types", default=DEFAULT_TYPES, help="comma-separated, or 'all'")
    parser.add_argument("--threads", default="1,2")
    parser.add_argument("--elements", type=int, default=640 * ROW, help="weights a decode; default one matrix")
    parser.add_argument("--repeats", type=int, default=15)
    args = parser.parse_args()

    named = args.types.split(",")
    types = list(QUANT_TYPES) if args.types == "all" else [GGMLType[t] for t in named]
    threads = [int(t) for t in args.threads.split(",")]
    rates: dict[str, dict[str, float]] = {}
    print(f"{args.elements} weights a decode; million weights per second")
    print("type".ljust(10) + "".join(f"{t} thread(s)".rjust(14) for t in threads))
    for ggml_type in types:
        row = rates.setdefault(ggml_type.name, {})
        for n_threads in threads:
            torch.set_num_threads(n_threads)
            row[str(n_threads)] = round(melem_per_s(ggml_type, args.elements, args.repeats), 1)
        print(ggml_type.name.ljust(10) + "".join(f"{row[str(t)]:14.0f}" for t in threads))
    print(json.dumps({"bench": "quant_decode", "elements": args.elements, "melem_per_s": rates}))


if __name__ == "__main__":
    main()
