"""`makeway bench link` from a checkout, without the command line's dependencies.

    PYTHONPATH=src python bench/link.py [--device auto] [--repeats 7] [--host-memory-gib 1] [--results bench/results]

Prints a table and, as the last line, one JSON object, which goes to a file in --results too.
"""

import argparse
import sys
from pathlib import Path

from rich.console import Console

from makeway.bench.link import GIB, bench_link
from makeway.bench.report import Report
from makeway.errors import UserError


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--host-memory-gib", type=int, default=1)
    parser.add_argument("--results", type=Path, default=Path("bench", "results"))
    options = parser.parse_args()
    size = f"{options.host_memory_gib}GiB"
    command = ["bench", "link", "--device", options.device, "--repeats", str(options.repeats), "--host-memory", size]
    report = Report("link", command)
    try:
        host_bytes = options.host_memory_gib * GIB
        bench_link(report, device=options.device, repeats=options.repeats, host_bytes=host_bytes)
        report.finish(options.results, Console(highlight=False, width=120))
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
