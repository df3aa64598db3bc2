"""`makeway bench link`: what this machine's link, memories and matrix units can do, as rates for the planner.

Owns what is measured and how it becomes `Rates`. Never runs a model.
Hazard: rates are bounds. The link is measured with nothing else on it and products at two shapes; an engine that
shares memory with others gets less.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import util
from os import sched_getaffinity
from typing import Any

import numpy as np
import torch
from torch import Tensor

from makeway.bench.report import Figure, Report, cuda_clock, measure, wall_clock
from makeway.device import CudaDevice, open_device
from makeway.errors import EngineFailed, UserError

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
COPY_SIZES = (256 * KIB, MIB, 2 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
LINK_SIZE = 64 * MIB
MIN_HOST_BYTES = 512 * MIB
FETCH_SIZES = (3 * MIB, 30 * MIB, 480 * MIB)
_SLICE = 8 * MIB
_SQUARE = 8192
# One piece of 64 experts, the tokens of an 8k prompt that chose each, gate and up of a Flash-Next expert.
_EXPERTS, _ROWS, _HIDDEN, _WIDTH = 64, 160, 2560, 1280


def bench_link(report: Report, *, device: str = "auto", repeats: int = 7, host_bytes: int = GIB) -> None:
    """Measures into `report`: figures, and `rates` for `makeway plan --rates` (None without a GPU)."""
    if host_bytes < MIN_HOST_BYTES:
        raise UserError(f"--host-memory {host_bytes}: use at least {_size(MIN_HOST_BYTES)}, or caches are measured")
    opened = open_device(device, None)  # type: ignore[arg-type]
    if not isinstance(opened, CudaDevice):
        report.figures += host_read(np.ones(host_bytes // 8, np.int64), repeats=repeats)
        report.facts["rates"] = None
        report.remarks.append("no GPU: only host memory was measured, and there are no rates for the planner")
        return
    host = opened.host_alloc(host_bytes)
    try:
        words = host.tensor.view(torch.int64)
        words.fill_(1)
        report.figures += host_read(words.numpy(), repeats=repeats)
        target = opened.alloc(host_bytes)
        report.figures += link_copies(host.tensor, target, repeats=repeats)
        if util.find_spec("triton") is None:
            report.remarks.append("no Triton: kernel reads of host memory were not measured, so there are no rates")
        else:
            report.figures += kernel_reads(words, target.view(torch.int64), repeats=repeats)
            report.kernels = ("triton: copy from host memory",)
        report.figures += device_rates(target, repeats=repeats)
    finally:
        torch.cuda.synchronize()
        host.close()
    report.facts["rates"] = rates_of(report.figures)


def host_read(words: "np.ndarray[Any, np.dtype[np.int64]]", *, repeats: int) -> list[Figure]:
    """Reading memory with 1, 2, 4, ... threads, all cores last; `words` larger than any cache."""
    n_cores = len(sched_getaffinity(0))
    counts = sorted({*(1 << i for i in range(n_cores.bit_length())), n_cores})
    figures = []
    for n in counts:
        with ThreadPoolExecutor(n) as threads:
            slices = np.array_split(words, -(-words.nbytes // _SLICE))

            def read(threads: ThreadPoolExecutor = threads, slices: Sequence[Any] = slices) -> None:
                list(threads.map(np.bitwise_or.reduce, slices))

            seconds = measure(read, repeats=repeats)
        figures.append(
            Figure.rate(f"host memory read, {n} thread{'s' if n > 1 else ''}", words.nbytes / 1e9, seconds, unit="GB/s")
        )
    return figures


def link_copies(source: Tensor, target: Tensor, *, repeats: int) -> list[Figure]:
    """Pinned host memory to the device in copies of each size: one after the other, and waiting for each."""
    figures = []
    for size in (s for s in COPY_SIZES if s <= source.numel()):
        # Enough of them for a steady rate, all from different places.
        n = min(source.numel() // size, max(2, 512 * MIB // size), 512)
        pairs = [(target[i * size : (i + 1) * size], source[i * size : (i + 1) * size]) for i in range(n)]

        def queued(pairs: Sequence[tuple[Tensor, Tensor]] = pairs) -> None:
            for to, frm in pairs:
                to.copy_(frm, non_blocking=True)

        def alone(pairs: Sequence[tuple[Tensor, Tensor]] = pairs[:32]) -> None:
            for to, frm in pairs:
                to.copy_(frm, non_blocking=True)
                torch.cuda.synchronize()

        name = f"copy host to device, {_size(size)}"
        seconds = measure(queued, clock=cuda_clock, repeats=repeats)
        figures.append(Figure.rate(f"{name}, queued", n * size / 1e9, seconds, unit="GB/s"))
        seconds = measure(alone, clock=wall_clock, repeats=repeats)
        figures.append(Figure.rate(f"{name}, each waited for", min(n, 32) * size / 1e9, seconds, unit="GB/s"))
    return figures


def kernel_reads(source: Tensor, target: Tensor, *, repeats: int) -> list[Figure]:
    """A kernel that reads pinned host memory: one expert, ten, and a whole layer at a time. Both int64."""
    from makeway.bench.uva import kernel_copy

    figures = []
    for size in FETCH_SIZES:
        n = size // 8

        def read(n: int = n) -> None:
            kernel_copy(target[:n], source[:n])

        target[:n].zero_()
        read()
        torch.cuda.synchronize()
        if not bool((target[:n] == 1).all()):
            raise EngineFailed("a kernel that reads pinned host memory read something else")
        seconds = measure(read, clock=cuda_clock, repeats=repeats)
        name = f"kernel reads host memory, {_size(size)}"
        figures.append(Figure.rate(name, size / 1e9, seconds, unit="GB/s"))
    return figures


def device_rates(target: Tensor, *, repeats: int) -> list[Figure]:
    """Device memory read and copied, and bf16 products: one big, and those of a piece of experts."""
    other = torch.empty_like(target)
    n_bytes = target.numel()

    def copy(other: Tensor = other) -> None:
        other.copy_(target)

    seconds = measure(copy, clock=cuda_clock, repeats=repeats)
    figures = [Figure.rate("device memory copied", 2 * n_bytes / 1e9, seconds, unit="GB/s", note="read and written")]
    floats = target.view(torch.float32)
    seconds = measure(floats.sum, clock=cuda_clock, repeats=repeats)
    figures.append(Figure.rate("device memory read", n_bytes / 1e9, seconds, unit="GB/s"))

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, device=target.device, dtype=torch.bfloat16)

    for name, a, b in (
        (f"bf16 product, {_SQUARE}^3", random(_SQUARE, _SQUARE), random(_SQUARE, _SQUARE)),
        (f"bf16 products, {_EXPERTS} experts", random(_EXPERTS, _ROWS, _HIDDEN), random(_EXPERTS, _HIDDEN, _WIDTH)),
    ):
        out = torch.matmul(a, b)
        flops = 2 * out.numel() * a.shape[-1]

        def product(a: Tensor = a, b: Tensor = b, out: Tensor = out, n: int = 10) -> None:
            for _ in range(n):
                torch.matmul(a, b, out=out)

        seconds = measure(product, clock=cuda_clock, repeats=repeats)
        figures.append(Figure.rate(name, 10 * flops / 1e12, seconds, unit="TFLOP/s"))
    return figures


def rates_of(figures: Sequence[Figure]) -> dict[str, int] | None:
    """`Rates` of measured figures, by field; None where one of them was not measured.

    Link: queued copies of 64 MiB. Fetch: a kernel's reads of ten experts. Device memory: the better of read and copy.
    Products: those of a piece of experts, since a sweep has no bigger ones. Host: the best number of threads.
    """

    def best(start: str) -> float | None:
        return max((f.median for f in figures if f.name.startswith(start)), default=None)

    found = {
        "link_bytes_per_s": best(f"copy host to device, {_size(LINK_SIZE)}, queued"),
        "fetch_bytes_per_s": best(f"kernel reads host memory, {_size(FETCH_SIZES[1])}"),
        "hbm_bytes_per_s": best("device memory"),
        "flops_per_s": best("bf16 products"),
        "host_read_bytes_per_s": best("host memory read"),
    }
    rates = {name: int(v * (1e12 if name == "flops_per_s" else 1e9)) for name, v in found.items() if v is not None}
    return rates if len(rates) == len(found) else None


def _size(n_bytes: int) -> str:
    return f"{n_bytes // MIB} MiB" if n_bytes >= MIB else f"{n_bytes // KIB} KiB"
