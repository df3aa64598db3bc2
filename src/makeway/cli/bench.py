"""`makeway bench`: one subcommand per measurement.

Owns their flags. Never measures (`makeway.bench`). Hazard: the last line of stdout is JSON, whatever is added.
"""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from makeway.bench.link import bench_link
from makeway.bench.report import Report
from makeway.cli import options as o
from makeway.config import parse_bytes

ResultsOption = Annotated[
    Path, typer.Option("--results", help="Folder for the results, NAME-DATE.json; made where it is missing.")
]
RepeatsOption = Annotated[int, typer.Option("--repeats", help="Runs of each measurement, after the warm-up.")]
RESULTS = Path("bench", "results")


def link_command(
    device: o.DeviceOption = o.ENGINE["device"],
    repeats: RepeatsOption = 7,
    host_memory: Annotated[str, typer.Option("--host-memory", help="Host memory to measure with.")] = "1GiB",
    results: ResultsOption = RESULTS,
) -> None:
    """Measure the link, memories and matrix units of this machine: rates for `makeway plan --rates`."""
    settings = {"--device": device, "--repeats": str(repeats), "--host-memory": host_memory}
    report = Report("link", ["bench", "link", *(part for setting in settings.items() for part in setting)])
    bench_link(report, device=device, repeats=repeats, host_bytes=parse_bytes(host_memory, "--host-memory"))
    report.finish(results, Console(highlight=False))
