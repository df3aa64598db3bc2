"""Reports of measurements: repeated runs, medians with their range, each beside its bound, for people and as JSON.

Owns how numbers are taken and shown; never what is measured. The last line printed is the whole report as JSON, and
the same goes into a file.
Hazard: a number from a kernel that was not meant to run is worse than none, so a report in which the reference ran
prints nothing unless it was asked to.
"""

import json
import os
import platform
import shlex
import statistics
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import makeway
from makeway.errors import UserError

REFERENCE_NAME = "reference"
Clock = Callable[[Callable[[], object]], float]


def wall_clock(run: Callable[[], object]) -> float:
    """Seconds that a call takes; work that it leaves running on a GPU is not in it."""
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def cuda_clock(run: Callable[[], object]) -> float:
    """Seconds between two events around what a call puts on the current CUDA stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end)) / 1000


def measure(run: Callable[[], object], *, clock: Clock = wall_clock, warmup: int = 2, repeats: int = 7) -> list[float]:
    """Seconds of `repeats` runs, after `warmup` runs that do not count."""
    if warmup < 0 or repeats < 1:
        raise UserError(f"{warmup} warm-up runs and {repeats} repeats: use 0 or more, and at least 1")
    for _ in range(warmup):
        run()
    return [clock(run) for _ in range(repeats)]


@dataclass(frozen=True)
class Figure:
    """One line: samples of a time (`is_time`) or of a rate, and the bound that physics sets it, in the same unit."""

    name: str
    unit: str
    samples: tuple[float, ...]
    is_time: bool = False
    bound: float | None = None
    note: str = ""

    @classmethod
    def rate(
        cls,
        name: str,
        amount: float,
        seconds: Sequence[float],
        *,
        unit: str,
        bound: float | None = None,
        note: str = "",
    ) -> "Figure":
        """`amount` (already in units) per second, once for each time measured."""
        return cls(name, unit, tuple(amount / s for s in seconds), bound=bound, note=note)

    @property
    def median(self) -> float:
        return statistics.median(self.samples)

    @property
    def share(self) -> float | None:
        """Share of the bound that is reached, 1 at best; for a time the bound's part of it."""
        if self.bound is None:
            return None
        return self.bound / self.median if self.is_time else self.median / self.bound

    def to_json(self) -> dict[str, Any]:
        """The line as plain data."""
        return {
            "name": self.name,
            "unit": self.unit,
            "median": self.median,
            "min": min(self.samples),
            "max": max(self.samples),
            "n": len(self.samples),
            "bound": self.bound,
            "share_of_bound": self.share,
            "note": self.note,
        }


@dataclass
class Report:
    """What one benchmark found. `arguments`: the command line behind `makeway`. `facts`: other results, plain data.

    `kernels`: names of all that ran. `allow_reference`: print although the reference is among them.
    """

    name: str
    arguments: Sequence[str]
    kernels: Collection[str] = ()
    allow_reference: bool = False
    figures: list[Figure] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    remarks: list[str] = field(default_factory=list)
    started: datetime = field(default_factory=lambda: datetime.now(UTC))

    def to_json(self) -> dict[str, Any]:
        """The whole report; raises UserError when the reference ran and nobody asked for it."""
        if REFERENCE_NAME in self.kernels and not self.allow_reference:
            raise UserError(
                f"bench {self.name}: the reference kernels ran, whose times say nothing about makeway; run it where "
                "fast kernels exist, or add --allow-reference to see them anyway"
            )
        return {
            "bench": self.name,
            "date": self.started.isoformat(timespec="seconds"),
            "command": shlex.join(["makeway", *self.arguments]),
            "machine": machine(),
            "versions": versions(),
            "kernels": sorted(self.kernels),
            "figures": [figure.to_json() for figure in self.figures],
            "remarks": self.remarks,
            **self.facts,
        }

    def finish(self, folder: Path | None, console: Console) -> Path | None:
        """Prints the table and remarks, writes `folder`/NAME-DATE.json (None: no file), prints the JSON line.

        Raises UserError as `to_json`, or when the file cannot be written; then nothing is printed.
        """
        document = self.to_json()
        line = json.dumps(document, ensure_ascii=False)
        path = None if folder is None else folder / f"{self.name}-{self.started:%Y%m%d-%H%M%S}.json"
        if path is not None:
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(json.dumps(document, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
            except OSError as fault:
                raise UserError(f"{path}: cannot be written: {fault.strerror}; choose another --results") from fault
        computer = document["machine"]
        console.print(f"{computer['gpu'] or 'no GPU'}; {computer['cpu']}, {computer['n_cores']} cores", markup=False)
        console.print(self._table())
        if self.kernels:
            console.print(f"kernels: {', '.join(sorted(self.kernels))}", markup=False)
        for remark in self.remarks:
            console.print(remark, markup=False)
        if path is not None:
            console.print(f"written to {path}", markup=False, soft_wrap=True)
        console.file.write(line + "\n")
        return path

    def _table(self) -> Table:
        bounded = any(f.bound is not None for f in self.figures)
        table = Table(box=None, pad_edge=False)
        table.add_column(self.name)
        for heading in ("median", "min", "max"):
            table.add_column(heading, justify="right")
        table.add_column("unit")
        for heading in ("bound", "of bound") if bounded else ():
            table.add_column(heading, justify="right")
        table.add_column("")
        for f in self.figures:
            numbers = (f"{v:.4g}" for v in (f.median, min(f.samples), max(f.samples)))
            share = ("", "") if f.bound is None or f.share is None else (f"{f.bound:.4g}", f"{100 * f.share:.0f} %")
            table.add_row(f.name, *numbers, f.unit, *(share if bounded else ()), f.note)
        return table


def machine() -> dict[str, Any]:
    """What the numbers were taken on."""
    gpu = torch.cuda.get_device_properties(0) if torch.cuda.is_available() else None
    return {
        "cpu": _cpu_name(),
        "n_cores": len(os.sched_getaffinity(0)),
        "ram_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "gpu": None if gpu is None else gpu.name,
        "vram_bytes": None if gpu is None else gpu.total_memory,
        "gpu_processors": None if gpu is None else gpu.multi_processor_count,
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def versions() -> dict[str, str | None]:
    """Of makeway and of what does the work."""
    found = {name: _version(name) for name in ("numpy", "triton")}
    return {
        "makeway": makeway.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "kernel": platform.release(),
        **found,
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
