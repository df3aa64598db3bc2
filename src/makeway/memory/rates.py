"""Rates of a machine: how fast bytes cross the link, are read on the device, and products are made.

Owns `Rates` and documented defaults per class of machine; never measures (the device does, and passes
measured rates). Hazard: rates move only time, never bits: no result may depend on them.
"""

import json
from dataclasses import dataclass, fields
from pathlib import Path

from makeway.errors import UserError


@dataclass(frozen=True)
class Rates:
    """Bytes and FLOPs per second that a prediction divides by.

    `link_bytes_per_s`: large pinned copies host -> device. `fetch_bytes_per_s`: misses fetched inside a
    step. `hbm_bytes_per_s`: reading device memory in decode kernels. `flops_per_s`: matrix products as
    reached in a sweep (not the data sheet). `host_read_bytes_per_s`: all cores reading RAM.
    `layer_overhead_s`: launches and waits per layer of a sweep; `step_overhead_s`: the host's part of a decode step,
    `step_layer_overhead_s`: launches that wait for each other, per layer of a step.
    """

    link_bytes_per_s: int
    fetch_bytes_per_s: int
    hbm_bytes_per_s: int
    flops_per_s: int
    host_read_bytes_per_s: int
    layer_overhead_s: float = 0.0005
    step_overhead_s: float = 0.0004
    step_layer_overhead_s: float = 0.000065

    def __post_init__(self) -> None:
        """Refuse rates that would divide by zero. Raises UserError."""
        for name, value in vars(self).items():
            if value < 0 or (value == 0 and name.endswith("per_s")):
                raise UserError(f"rate {name} is {value}; it must be positive")


RATES: dict[str, Rates] = {
    # measured: pinned copies 55 GB/s, fetch kernel 50; a sweep reaches 250 to 350 of 790 TFLOP/s; 4.2 TB/s of 4.8; a
    # layer of a step takes 42 us (30B) to 86 us (Flash-Next) beside its bytes
    "h200": Rates(55 * 10**9, 50 * 10**9, 4_170 * 10**9, 300 * 10**12, 100 * 10**9),
    # PCIe 4 x16 about 25 GB/s; 936 GB/s data sheet at 75 %; 71 TFLOP/s bf16 dense at 60 %
    "rtx3090": Rates(25 * 10**9, 20 * 10**9, 700 * 10**9, 42 * 10**12, 50 * 10**9),
    # the same card on PCIe 3 x16
    "rtx3090-pcie3": Rates(12 * 10**9, 10 * 10**9, 700 * 10**9, 42 * 10**12, 50 * 10**9),
    # PCIe 4 x16; 1008 GB/s; 165 TFLOP/s bf16 at 60 %
    "rtx4090": Rates(25 * 10**9, 20 * 10**9, 750 * 10**9, 100 * 10**12, 50 * 10**9),
    # PCIe 5 x16; 1792 GB/s; 209 TFLOP/s bf16 at 60 %
    "rtx5090": Rates(53 * 10**9, 42 * 10**9, 1_340 * 10**9, 125 * 10**12, 60 * 10**9),
    # no GPU: the link is a copy in RAM, products run on a few cores
    "cpu": Rates(10 * 10**9, 10 * 10**9, 20 * 10**9, 10**11, 20 * 10**9),
}
"""Defaults by class of machine; what is not measured comes from data sheets with the stated share."""

_NAMES = {"H200": "h200", "3090": "rtx3090", "4090": "rtx4090", "5090": "rtx5090"}


def rates_of(device_name: str) -> Rates:
    """The rates of a card by a part of its name; `DEFAULT_RATES` for one that is not known."""
    return next((RATES[rates] for part, rates in _NAMES.items() if part in device_name), DEFAULT_RATES)


DEFAULT_RATES = RATES["rtx3090"]
"""Used when nothing is known: the slowest card the project is written for, so predictions err to slow."""


def read_rates(path: Path) -> Rates:
    """Measured rates: a result of `makeway bench link`, or its `rates` alone. Overheads may be left out.

    Raises UserError when the file cannot be read, is something else, or was measured where rates are not known.
    """
    again = "measure with `makeway bench link` on the machine with the GPU"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise UserError(f"{path}: cannot be read: {fault.strerror}") from fault
    except ValueError as fault:
        raise UserError(f"{path}: not a JSON document ({fault}); {again}") from fault
    found = document.get("rates", document) if isinstance(document, dict) else None
    if found is None:
        raise UserError(f"{path}: holds no rates (measured without a GPU?); {again}")
    known = {f.name for f in fields(Rates)}
    needed = {name for name in known if name.endswith("per_s")}
    if not isinstance(found, dict) or not needed <= found.keys() <= known:
        raise UserError(f"{path}: rates must be {', '.join(sorted(needed))}; {again}")
    for name, value in found.items():
        whole = name in needed
        if isinstance(value, bool) or not isinstance(value, int if whole else int | float):
            raise UserError(f"{path}: {name} is {value!r}, not a {'whole number' if whole else 'number'}; {again}")
    return Rates(**found)
