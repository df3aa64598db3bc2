"""Decode's products in CUDA C++: checked against f64, then timed beside what their bytes allow.

Never times a kernel whose numbers it has not checked. Hazard: weights are rotated so that none is in the L2 cache when
it comes again; launches follow each other as in a step, so each may fetch its weights while the one before it ends.

    python -m bench.cuda_kernels      (one JSON line last)
"""

import argparse
import functools
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kernels import (
    FLASH_NEXT,
    LINEARS,
    QWEN3_30B,
    ROTATED_BYTES,
    Layer,
    Step,
    error_of,
    random_bytes,
    rates,
    time_us,
)

from makeway.gguf.types import GGMLType as G
from makeway.gguf.types import row_bytes
from makeway.kernels import Weight
from makeway.kernels.cuda.experts import StepExpertKernels
from makeway.kernels.cuda.linear import Linears, has_kernel
from makeway.kernels.cuda.programs import Programs
from makeway.kernels.triton import streams

DEVICE = torch.device("cuda")
GROUPS = (
    ("30B q, k, v", ((G.Q4_K, 4096), (G.Q4_K, 512), (G.Q4_K, 512)), 2048),
    ("30B q, k, v with a Q6_K", ((G.Q4_K, 4096), (G.Q4_K, 512), (G.Q6_K, 512)), 2048),
    ("30B attention out", ((G.Q4_K, 2048),), 4096),
    ("30B router", ((G.F32, 128),), 2048),
    ("30B head", ((G.Q6_K, 151936),), 2048),
    ("Flash-Next qkv, gate, alpha, beta", ((G.Q5_K, 10240), (G.Q4_K, 6144), (G.F32, 48), (G.F32, 48)), 2560),
    ("Flash-Next router, shared", ((G.F32, 512), (G.F32, 1), (G.Q8_0, 640), (G.Q8_0, 640)), 2560),
    ("Flash-Next mixer down", ((G.Q8_0, 320),), 10240),
    ("Flash-Next mixer up", ((G.Q8_0, 10240),), 320),
    ("Flash-Next shared down", ((G.Q8_0, 2560),), 640),
)
LAYERS = (("30B", QWEN3_30B, 128, 8), ("Flash-Next", FLASH_NEXT, 512, 10))


class Group:
    """Matrices that one launch multiplies, in as many copies as the cache needs."""

    def __init__(self, matrices: tuple, n_cols: int) -> None:
        self.n_cols = n_cols
        self.n_bytes = sum(n * row_bytes(kind, n_cols) for kind, n in matrices)
        copies = max(2, min(64, ROTATED_BYTES // self.n_bytes))
        self.copies = [
            [Weight(random_bytes(kind, n, n_cols), kind, n_cols) for kind, n in matrices] for _ in range(copies)
        ]


def run_group(name: str, group: Group, linears: Linears) -> list[dict]:
    """Error, bits in company, and times for 1, 4, 8 rows."""
    x = torch.randn(8, group.n_cols, device=DEVICE)
    outs = linears(x, group.copies[0])
    error = max(error_of(out, x, w) for out, w in zip(outs, group.copies[0], strict=True))
    same = True
    for m in (1, 2, 4):
        for i in (0, 3):
            alone = linears(x[i : i + m], group.copies[0])
            same = same and all(torch.equal(a, o[i : i + m]) for a, o in zip(alone, outs, strict=True))
    found = []
    for n in (1, 4, 8):
        row = {"name": name, "n": n, "bytes": group.n_bytes, "error": error, "right": same and error < 2e-5}
        if row["right"]:
            some = x[:n]
            row["us"], _ = time_us([functools.partial(linears, some, w) for w in group.copies])
        found.append(row)
    return found


def run_mixer(linears: Linears, *, hidden: int = 2560, n_streams: int = 4) -> list[dict]:
    """The end of Flash-Next's mixers, beside its two launches as they are where it has no kernel."""
    ups = Group(((G.Q8_0, n_streams * hidden),), 320)
    low, normed, raw = (torch.randn(8, size, device=DEVICE) for size in (320, n_streams * hidden, n_streams))
    (up,) = ups.copies[0]

    def mix(w: Weight, first: int = 0, n: int = 8) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows = slice(first, first + n)
        return linears.mix(low[rows], w, normed=normed[rows], raw_inject=raw[rows], n_streams=n_streams)

    def apart(w: Weight, n: int) -> None:
        (gates,) = linears(low[:n], [w], silu_scale=1.0 / n_streams)
        streams.mixed(gates, normed[:n], raw[:n], n_streams=n_streams, n_parts=0)

    gates = torch.sigmoid(torch.nn.functional.silu(low.double() / n_streams) @ up.decode().double().T)
    expected = (gates * normed.double()).view(8, n_streams, hidden).mean(dim=1)
    x, inject = mix(up)
    error = float((x.double() - expected).norm() / expected.norm())
    assert inject is not None
    right = error < 2e-5 and torch.allclose(inject, 2.0 * torch.sigmoid(raw / n_streams), rtol=1e-5, atol=1e-6)
    right = right and all(torch.equal(mix(up, i, n)[0], x[i : i + n]) for n in (1, 2, 4) for i in (0, 3))
    found = []
    for n in (1, 4, 8):
        n_bytes = ups.n_bytes + n * normed[0].nbytes
        row = {"name": "Flash-Next mixer end", "n": n, "bytes": n_bytes, "error": error, "right": right}
        if right:
            row["us"], _ = time_us([functools.partial(mix, w, 0, n) for (w,) in ups.copies])
            row["two launches_us"], _ = time_us([functools.partial(apart, w, n) for (w,) in ups.copies])
        found.append(row)
    return found


def run_layer(name: str, layer: Layer, kernels: StepExpertKernels) -> list[dict]:
    """The same for a layer of experts, all in slots."""
    found = []

    def run(step: Step, kernels: StepExpertKernels = kernels) -> torch.Tensor:
        kernels.run(step.buffers, step.x, layer.arena, layout=layer.layout, acc=step.acc)
        return step.acc

    for n in (1, 4, 8):
        step = layer.step(n, 1.0)
        step.x = torch.randn(n, layer.layout.hidden, device=DEVICE)
        step.plan()
        expected = step.expected()
        error = float((run(step).double() - expected).norm() / expected.norm())
        right = error < 1e-4
        for i in range(n):
            alone = layer.step(1, 1.0)
            alone.ids, alone.routing, alone.x = step.ids[i : i + 1], step.routing[i : i + 1], step.x[i : i + 1]
            alone.plan()
            right = right and torch.equal(run(alone)[0], step.acc[i])
        steps = [layer.step(n, 1.0) for _ in range(24)]
        for s in steps:
            s.x = torch.randn(n, layer.layout.hidden, device=DEVICE)
            s.plan()
        n_bytes = sum(s.n_used for s in steps) / len(steps) * layer.layout.expert_bytes
        row = {"name": f"{name} experts", "n": n, "bytes": n_bytes, "error": error, "right": right}
        if right:
            row["us"], _ = time_us([functools.partial(run, s) for s in steps])
            for begin in ("gate_up", "down"):
                alone = StepExpertKernels(DEVICE, Only(begin))
                row[f"{begin}_us"], _ = time_us([functools.partial(run, s, alone) for s in steps])
        found.append(row)
    return found


class Only(Programs):
    """Launches of kernels whose names begin so; the others do nothing."""

    def __init__(self, begin: str) -> None:
        super().__init__()
        self._begin = begin

    def kernel(self, source: Path, name: str, parameters: str) -> object:
        if name.startswith(self._begin):
            return super().kernel(source, name, parameters)

        class Nothing:
            @staticmethod
            def launch(*_: object, **__: object) -> None:
                pass

        return Nothing


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    torch.manual_seed(0)
    measured = rates()
    programs = Programs()
    linears, kernels = Linears(DEVICE, programs), StepExpertKernels(DEVICE, programs)
    rows: list[dict] = []

    def show(found: list[dict]) -> None:
        rows.extend(found)
        for row in found:
            if not row["right"]:
                print(f"{row['name']:<36} {row['n']} WRONG, error {row['error']:.1e}", flush=True)
                continue
            bound = row["bytes"] / measured["read"] * 1e6
            parts = "".join(f", {key[:-3]} {row[key]:.1f} us" for key in row if key.endswith("_us"))
            print(
                f"{row['name']:<36} {row['n']}  {row['bytes'] / 1e6:8.2f} MB  bound {bound:7.2f} us "
                f"{row['us']:8.2f} us  "
                f"{bound / row['us'] * 100:5.1f} %  error {row['error']:.0e}{parts}",
                flush=True,
            )

    print(f"read {measured['read'] / 1e12:.2f} TB/s", flush=True)
    singles = [
        (f"{name} {kind.name}", ((kind, n),), n_cols) for name, kind, n, n_cols in LINEARS if has_kernel(kind, n_cols)
    ]
    cases = [*GROUPS, *singles]
    for name, matrices, n_cols in cases:
        if args.only in name:
            show(run_group(name, Group(matrices, n_cols), linears))
    if args.only in "Flash-Next mixer end":
        show(run_mixer(linears))
    for name, layout, n_experts, top_k in LAYERS:
        if args.only in f"{name} experts":
            show(run_layer(name, Layer(layout, n_experts, top_k), kernels))
    print(
        json.dumps({"bench": "cuda_kernels", "device": torch.cuda.get_device_name(), "rates": measured, "rows": rows})
    )
    if not all(row["right"] for row in rows):
        sys.exit("some kernels are wrong")


if __name__ == "__main__":
    main()
