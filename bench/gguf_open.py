"""How long opening a model takes: a synthetic file with a header as big as Flash-Next's.

Owns the measurement of `open_gguf`; never measures tensor reads. Writes into a temporary folder.
Hazard: the first opening also reads the file from disk; the file was just written, so it is in the page cache.

    python bench/gguf_open.py [--tokens 248320] [--merges 248320] [--tensors 1100] [--rounds 7]

Prints a table and, as the last line, one JSON object (times in seconds).
"""

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path

import numpy as np

from makeway.gguf import GGMLType, open_gguf

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from makeway.bench.gguf_writer import write_gguf


def write_model(path: Path, *, n_tokens: int, n_merges: int, n_tensors: int) -> None:
    """A file with a vocabulary of that size; the tensor data are a hole."""
    rng = np.random.default_rng(0)
    letters = np.array(list("abcdefghijklmnopqrstuvwxyzĠĊàçé中文字"))
    lengths = rng.integers(1, 12, n_tokens)
    tokens = ["".join(rng.choice(letters, n)) for n in lengths]
    merges = [f"{tokens[i % n_tokens]} {tokens[(i * 7 + 1) % n_tokens]}" for i in range(n_merges)]
    metadata = {
        "general.architecture": "qwen4exp",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.ones(n_tokens, np.int32),
        "tokenizer.ggml.merges": merges,
        "qwen4exp.ple.layer_multipliers": np.array([3, 5, 7], np.uint64),
    }
    tensors = {f"blk.{i}.weight": (GGMLType.Q4_K, (640, 2560), None) for i in range(n_tensors)}
    write_gguf(path, metadata, tensors, sparse=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time to open a GGUF file with a large header.")
    parser.add_argument("--tokens", type=int, default=248_320)
    parser.add_argument("--merges", type=int, default=248_320)
    parser.add_argument("--tensors", type=int, default=1100)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big-header.gguf"
        write_model(path, n_tokens=args.tokens, n_merges=args.merges, n_tensors=args.tensors)
        times = []
        for _ in range(args.rounds):
            start = time.perf_counter()
            with open_gguf(path) as file:
                times.append(time.perf_counter() - start)
        header_bytes = min((t.offset for t in file.tensors.values()), default=file.n_bytes)
        tracemalloc.start()
        with open_gguf(path):
            peak_bytes = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    result = {
        "bench": "gguf_open",
        "python": platform.python_version(),
        "n_tokens": args.tokens,
        "n_merges": args.merges,
        "n_tensors": args.tensors,
        "header_bytes": header_bytes,
        "first_s": round(times[0], 4),
        "median_s": round(statistics.median(times), 4),
        "min_s": round(min(times), 4),
        "max_s": round(max(times), 4),
        "peak_bytes": peak_bytes,
    }
    print(f"header     {header_bytes / 2**20:8.2f} MiB, {args.tokens} tokens, {args.merges} merges")
    for name in ("first", "median", "min", "max"):
        print(f"{name:<10} {result[f'{name}_s']:8.3f} s")
    print(f"allocated  {peak_bytes / 2**20:8.2f} MiB at the peak")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
