"""Decode kernels on a GPU: checked against the reference, then timed next to the bytes they must move.

Owns nothing of the engine. Never times a kernel whose numbers it has not checked. Hazard: weights are rotated so that
none is still in the L2 cache when it comes again; a single matrix would be timed from the cache.

    python bench/kernels.py [--sweep] [--part linear|experts]      (one JSON line last)
"""

import argparse
import functools
import json
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import triton
import triton.language as tl

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from makeway.gguf.types import BLOCK_SIZES, GGMLType, row_bytes
from makeway.kernels import Weight
from makeway.kernels.triton import experts as ex
from makeway.kernels.triton import fetch, step_buffers, step_plan
from makeway.kernels.triton.linear import Scratch, Tiling, as_parts, linear, tiling
from makeway.quants import QUANT_TYPES

G = GGMLType
ROTATED_BYTES = 400 << 20  # of weights, several times the L2 cache
FLASH_NEXT = ex.ExpertLayout(G.Q4_K, G.Q4_K, G.Q5_1, hidden=2560, width=640)
QWEN3_30B = ex.ExpertLayout(G.Q4_K, G.Q4_K, G.Q4_K, hidden=2048, width=768)

# name, type, rows, columns
LINEARS = [
    ("GDN qkv", G.Q5_K, 10240, 2560),
    ("GDN gate", G.Q4_K, 6144, 2560),
    ("GDN out", G.Q5_K, 2560, 6144),
    ("attention q", G.Q4_K, 12288, 2560),
    ("attention out", G.Q8_0, 2560, 6144),
    ("shared gate", G.Q8_0, 640, 2560),
    ("shared down", G.Q8_0, 2560, 640),
    ("streams down", G.Q8_0, 320, 10240),
    ("streams up", G.Q8_0, 10240, 320),
    ("router", G.F32, 512, 2560),
    ("head", G.Q6_K, 248320, 2560),
    ("30B q", G.Q4_K, 4096, 2048),
    ("30B out", G.Q6_K, 2048, 4096),
    ("30B head", G.Q6_K, 151936, 2048),
    *[(kind.name, kind, 6144, 2560) for kind in (G.Q5_1, G.Q5_0, G.IQ4_NL, G.IQ4_XS, G.MXFP4, G.Q4_0, G.Q2_K, G.Q3_K)],
    *[(kind.name, kind, 6144, 2560) for kind in (G.Q6_K, G.Q8_0, G.BF16, G.F16)],
]


def random_bytes(kind: GGMLType, n_rows: int, n_cols: int) -> torch.Tensor:
    """u8 [n_rows, row bytes] on the GPU: random codes, scales of ordinary size."""
    block = BLOCK_SIZES[kind]
    if block.elements == 1:
        values = torch.randn(n_rows, n_cols, device="cuda") * 0.02
        dtype = {G.F32: torch.float32, G.F16: torch.float16, G.BF16: torch.bfloat16}[kind]
        return values.to(dtype).view(torch.uint8)
    blocks = torch.randint(0, 256, (n_rows * n_cols // block.elements, block.n_bytes), dtype=torch.uint8, device="cuda")
    for field in QUANT_TYPES[kind].FIELDS:
        if field.name in ("d", "m", "dmin") and field.n_bytes == 2:
            values = (torch.rand(blocks.shape[0], device="cuda") * 0.01 + 0.001).half()
            blocks[:, field.offset : field.offset + 2] = values.view(torch.uint8).view(-1, 2)
        if field.name == "e":
            blocks[:, field.offset] = 120
    return blocks.view(n_rows, row_bytes(kind, n_cols))


def time_us(launches: Sequence[Callable[[], object]], *, repeats: int = 7) -> tuple[float, float]:
    """Median and minimum microseconds of one launch, from replays of a graph that holds all of them."""
    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(launches))
    return statistics.median(times), min(times)


@triton.jit
def _read_kernel(source, out, n, BLOCK: tl.constexpr, TURNS: tl.constexpr):
    total = tl.zeros([BLOCK], tl.int32)
    i = tl.program_id(0) * BLOCK * TURNS + tl.arange(0, BLOCK)
    for t in tl.static_range(TURNS):
        total ^= tl.load(source + i + t * BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def rates() -> dict[str, float]:
    """Bytes per second of a device copy (read + written), of reading, and of reading pinned host memory."""
    source = torch.randint(0, 1 << 30, (1 << 29,), dtype=torch.int32, device="cuda")
    target = torch.empty_like(source)
    copy, _ = time_us([lambda: target.copy_(source)])
    out = torch.empty(1 << 16, dtype=torch.int32, device="cuda")
    read, _ = time_us([lambda: _read_kernel[(1 << 15,)](source, out, 0, BLOCK=2048, TURNS=8, num_warps=8)])
    return {"copy": 2 * source.nbytes / copy * 1e6, "read": source.nbytes / read * 1e6}


def error_of(out: torch.Tensor, x: torch.Tensor, weight: Weight) -> float:
    """Norm of the difference to f64, relative; over at most 4096 rows."""
    n = min(weight.n_rows, 4096)
    expected = x.double() @ weight.decode(0, n).double().T
    return float((out[:, :n].double() - expected).norm() / expected.norm())


@functools.lru_cache(maxsize=1)
def _weights(kind: GGMLType, n_rows: int, n_cols: int, copies: int) -> list[Weight]:
    return [Weight(random_bytes(kind, n_rows, n_cols), kind, n_cols) for _ in range(copies)]


def run_linear(kind: GGMLType, n_rows: int, n_cols: int, *, n: int, options: dict[str, int], check: bool) -> dict:
    """One shape: error, whether rows keep their bits in company, time."""
    scratch = Scratch(torch.device("cuda"))
    n_bytes = n_rows * row_bytes(kind, n_cols)
    copies = max(2, min(64, ROTATED_BYTES // n_bytes))
    weights = _weights(kind, n_rows, n_cols, copies)
    x = torch.randn(8, n_cols, device="cuda")
    row: dict = {"type": kind.name, "rows": n_rows, "cols": n_cols, "n": n, "bytes": n_bytes}
    tiles = Tiling(**{**vars(tiling(kind, n_rows, n_cols)), **options})
    row["tiling"] = vars(tiles)
    if check:
        out = torch.full((8, n_rows), torch.nan, device="cuda")
        linear(x, weights[0], scratch=scratch, out=out, **options)
        row["error"] = error_of(out, x, weights[0])
        row["same_bits"] = all(
            torch.equal(linear(x[i : i + m], weights[0], scratch=scratch, **options), out[i : i + m])
            for m in (1, 2, 4)
            for i in (0, 3)
        )
        row["right"] = row["error"] < 2e-5 and row["same_bits"]
        if not row["right"]:
            return row
    parts = as_parts(x[:n].bfloat16())
    out = torch.empty((n, n_rows), device="cuda")
    launches = [lambda w=w: linear(parts, w, scratch=scratch, out=out, **options) for w in weights]
    row["us"], row["us_min"] = time_us(launches)
    return row


class Layer:
    """A layer of experts in pinned memory and in slots, and a step's inputs."""

    def __init__(self, layout: ex.ExpertLayout, n_experts: int, top_k: int) -> None:
        self.layout, self.n_experts, self.top_k = layout, n_experts, top_k
        parts = [
            random_bytes(layout.gate, n_experts * layout.width, layout.hidden).view(n_experts, -1),
            random_bytes(layout.up, n_experts * layout.width, layout.hidden).view(n_experts, -1),
            random_bytes(layout.down, n_experts * layout.hidden, layout.width).view(n_experts, -1),
        ]
        slots = torch.cat(parts, dim=1)
        self.stride = slots.shape[1]
        self.store = slots.cpu().pin_memory()
        self.arena = torch.cat((slots.view(-1), torch.empty(80 * self.stride, dtype=torch.uint8, device="cuda")))
        self.rooms = step_buffers.Rooms(0, self.stride, n_experts * self.stride, self.stride)
        self.scratch = Scratch(torch.device("cuda"))
        self.nothing = torch.zeros(n_experts, dtype=torch.uint8, device="cuda")
        self.no_spares = torch.zeros(0, dtype=torch.int32, device="cuda")

    def step(self, n: int, hit_rate: float) -> "Step":
        return Step(self, n, hit_rate)


class Step:
    """Inputs of one call: ids at random, of which a share is in slots."""

    def __init__(self, layer: Layer, n: int, hit_rate: float) -> None:
        self.layer, self.n = layer, n
        ids = torch.stack([torch.randperm(layer.n_experts)[: layer.top_k] for _ in range(n)])
        used = ids.unique()
        self.n_used = used.numel()
        slot_of = torch.arange(layer.n_experts, dtype=torch.int32)
        self.n_missing = round(self.n_used * (1 - hit_rate))
        slot_of[used[torch.randperm(self.n_used)[: self.n_missing]]] = -1
        self.ids, self.slot_of = ids.cuda(), slot_of.cuda()
        first = torch.zeros(1, dtype=torch.int32, device="cuda")
        routed = torch.zeros((n, layer.top_k), dtype=torch.int32, device="cuda")
        self.report = step_buffers.Report(first, routed, torch.zeros_like(layer.no_spares))
        self.routing = torch.rand(n, layer.top_k, device="cuda")
        self.x = torch.randn(n, layer.layout.hidden, device="cuda").bfloat16()
        self.acc = torch.zeros(n, layer.layout.hidden, device="cuda")
        self.buffers = step_buffers.StepBuffers(
            torch.device("cuda"), n=n, top_k=layer.top_k, hidden=layer.layout.hidden, width=layer.layout.width
        )

    def plan(self) -> None:
        layer = self.layer
        step_plan.plan_step(
            self.buffers,
            self.ids,
            routing=self.routing,
            slot_of=self.slot_of,
            wanted=layer.nothing,
            spares=layer.no_spares,
            rooms=layer.rooms,
            report=self.report,
        )

    def fetch(self, programs: int = fetch.FETCH_PROGRAMS) -> None:
        source = fetch.Source(self.layer.store, self.layer.arena, self.layer.layout.expert_bytes)
        step_plan.fetch_missing(self.buffers, source, programs=programs)

    def run(self, tilings: tuple[Tiling, Tiling] | None = None) -> None:
        layer = self.layer
        ex.run_experts(
            self.buffers,
            self.x,
            layer.arena,
            layout=layer.layout,
            acc=self.acc,
            scratch=layer.scratch,
            tilings=tilings,
        )

    def whole(self) -> None:
        self.plan()
        self.fetch()
        self.run()

    def expected(self) -> torch.Tensor:
        """f64 from the store's bytes."""
        layout, layer = self.layer.layout, self.layer
        out = torch.zeros(self.n, layout.hidden, dtype=torch.float64, device="cuda")
        for r in range(self.n):
            x = self.x[r].double()
            for e, w in zip(self.ids[r].tolist(), self.routing[r].tolist(), strict=True):
                raw = layer.store[e].cuda()
                gate = Weight(raw[: layout.up_at].view(layout.width, -1), layout.gate, layout.hidden).decode().double()
                up = raw[layout.up_at : layout.down_at].view(layout.width, -1)
                up = Weight(up, layout.up, layout.hidden).decode().double()
                down = Weight(raw[layout.down_at :].view(layout.hidden, -1), layout.down, layout.width)
                h = torch.nn.functional.silu(gate @ x) * (up @ x)
                out[r] += w * (down.decode().double() @ h)
        return out


def run_layer(name: str, layer: Layer, *, sweep: bool) -> list[dict]:
    rows = []
    layout = layer.layout
    for n in (1, 4, 8):
        step = layer.step(n, 0.5)
        step.whole()
        expected = step.expected()
        error = float((step.acc.double() - expected).norm() / expected.norm())
        right = error < 2e-4
        for i in range(n):
            alone = layer.step(1, 1.0)
            alone.ids, alone.routing, alone.x = step.ids[i : i + 1], step.routing[i : i + 1], step.x[i : i + 1]
            alone.slot_of = torch.arange(layer.n_experts, dtype=torch.int32, device="cuda")
            alone.whole()
            right = right and torch.equal(alone.acc[0], step.acc[i])  # company and residency change no bits
        if not right:
            rows.append({"layer": name, "n": n, "error": error, "right": False})
            continue
        for hit_rate in (1.0, 0.8, 0.5, 0.0):
            steps = [layer.step(n, hit_rate) for _ in range(16)]
            for s in steps:
                s.plan()
            used = statistics.mean(s.n_used for s in steps)
            missed = statistics.mean(s.n_missing for s in steps)
            row = {
                "layer": name,
                "n": n,
                "hits": hit_rate,
                "error": error,
                "bytes": used * layout.expert_bytes,
                "link_bytes": missed * layout.expert_bytes,
            }
            row["us"], _ = time_us([s.whole for s in steps])
            row["plan_us"], _ = time_us([s.plan for s in steps])
            row["fetch_us"], _ = time_us([s.fetch for s in steps])
            row["run_us"], _ = time_us([s.run for s in steps])
            if missed and sweep:
                for programs in (4, 8, 32, 64):
                    us, _ = time_us([lambda s=s, p=programs: s.fetch(p) for s in steps])
                    row[f"fetch_us_{programs}"] = us
            rows.append(row)
            if sweep and layout is FLASH_NEXT and hit_rate == 1.0 and n in (1, 4):
                for tilings in expert_tilings(layout):
                    us, _ = time_us([lambda s=s: s.run(tilings) for s in steps])  # noqa: B023
                    rows.append(
                        {"layer": name, "n": n, "bytes": row["bytes"], "tilings": [vars(t) for t in tilings], "us": us}
                    )
    return rows


def expert_tilings(layout: ex.ExpertLayout) -> list[tuple[Tiling, Tiling]]:
    """Other tilings than the table's, one kernel's at a time."""
    gate, _ = ex.gate_up_tiling(layout.gate, layout.up, layout.hidden)
    down = ex.down_tiling(layout.down, layout.width)
    found = []
    for rows, warps in ((16, 1), (32, 2), (32, 4), (64, 4)):
        for stages, split in ((3, 1), (3, 2), (3, 5), (2, 2), (4, 2), (1, 5), (1, 2)):
            found.append((Tiling(rows=rows, split=split, unroll=1, warps=warps, stages=stages), down))
        for stages, unroll in ((2, 4), (3, 4), (4, 4), (3, 2), (4, 1), (1, 4)):
            found.append((gate, Tiling(rows=rows, split=1, unroll=unroll, warps=warps, stages=stages)))
    return found


def linear_sweep() -> list[tuple[GGMLType, int, int, dict[str, int]]]:
    """Shapes with other tilings than the table's."""
    found = []
    for kind, n_rows, n_cols, splits, stages in (
        (G.Q4_K, 12288, 2560, (1, 2, 5), (3,)),
        (G.Q4_K, 12288, 2560, (2,), (1, 2, 4)),
        (G.Q4_K, 2560, 6144, (6, 12, 24), (3,)),
        (G.Q8_0, 2560, 6144, (6, 12), (3,)),
        (G.Q6_K, 248320, 2560, (1,), (1, 2)),
        (G.Q5_1, 6144, 2560, (4, 5), (3,)),
    ):
        for rows, warps in ((16, 1), (32, 2), (32, 4), (64, 4)):
            for stage in stages:
                found.extend(
                    (kind, n_rows, n_cols, {"rows": rows, "warps": warps, "stages": stage, "split": split})
                    for split in splits
                )
    return found


def _compile(job: tuple) -> None:
    """Fill the compiler's cache (in another process): launch once."""
    what, *rest = job
    scratch = Scratch(torch.device("cuda"))
    if what == "linear":
        kind, n_rows, n_cols, options = rest
        options = {**vars(tiling(kind, n_rows, n_cols)), **options}
        weight = Weight(random_bytes(kind, 64, n_cols), kind, n_cols)
        for parts in (1, 2) if len(rest) and not rest[3] else (1,):
            linear(
                torch.zeros(parts, 1, n_cols, dtype=torch.bfloat16, device="cuda"), weight, scratch=scratch, **options
            )
    else:
        layout, tilings = rest
        layer = Layer(layout, 8, 2)
        step = layer.step(1, 0.5)
        step.plan()
        step.fetch()
        step.run(tilings)
    torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="time other tilings too")
    parser.add_argument("--part", choices=("linear", "experts", "all"), default="all")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    args = parser.parse_args()
    jobs: list[tuple] = []
    linears = [(kind, r, c, {}) for _, kind, r, c in LINEARS]
    if args.part != "experts":
        jobs += [("linear", *job) for job in linears + (linear_sweep() if args.sweep else [])]
    if args.part != "linear":
        for layout in (FLASH_NEXT, QWEN3_30B):
            jobs += [
                ("experts", layout, t)
                for t in [None, *(expert_tilings(layout) if args.sweep and layout is FLASH_NEXT else [])]
            ]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(_compile, jobs, chunksize=1)
    measured = rates()
    print(f"copy {measured['copy'] / 1e12:.2f} TB/s, read {measured['read'] / 1e12:.2f} TB/s", flush=True)
    result: dict = {"device": torch.cuda.get_device_name(), "rates": measured, "linear": [], "experts": []}

    def show(name: str, row: dict) -> None:
        if not row.get("right", True):
            print(f"{name:<34} WRONG: {row}", flush=True)
            return
        bound = row["bytes"] / measured["read"] * 1e6
        print(
            f"{name:<34} {row['bytes'] / 1e6:9.2f} MB  bound {bound:7.2f} us  {row['us']:8.2f} us  "
            f"{row['bytes'] / row['us'] / 1e6:5.2f} TB/s  {bound / row['us'] * 100:5.1f} %",
            flush=True,
        )

    if args.part != "experts":
        for name, kind, n_rows, n_cols in LINEARS:
            for n in (1, 8):
                row = run_linear(kind, n_rows, n_cols, n=n, options={}, check=n == 1)
                result["linear"].append({"name": name, **row})
                error = f"err {row['error']:.0e}" if "error" in row else ""
                show(f"{name} {kind.name} {n_rows}x{n_cols} n{n} {error}", row)
        for kind, n_rows, n_cols, options in linear_sweep() if args.sweep else []:
            row = run_linear(kind, n_rows, n_cols, n=1, options=options, check=False)
            result["linear"].append(row)
            show(
                f"{kind.name} {n_rows} " + " ".join(f"{k}{v}" for k, v in options.items()),
                row,
            )
    if args.part != "linear":
        for name, layout, n_experts, top_k in (("Flash-Next", FLASH_NEXT, 512, 10), ("30B", QWEN3_30B, 128, 8)):
            for row in run_layer(name, Layer(layout, n_experts, top_k), sweep=args.sweep):
                result["experts"].append(row)
                if not row.get("right", True):
                    show(f"{name} n{row['n']}", row)
                    continue
                if "tilings" in row:
                    text = [
                        f"r{t['rows']} w{t['warps']} st{t['stages']} sp{t['split']} u{t['unroll']}"
                        for t in row["tilings"]
                    ]
                    show(f"{row['n']} {' | '.join(text)}", row)
                    continue
                show(f"{name} n{row['n']} hits {row['hits']:.0%} run", {"bytes": row["bytes"], "us": row["run_us"]})
                link = row["link_bytes"] / row["fetch_us"] / 1e3
                print(
                    f"    whole {row['us']:.1f} us, plan {row['plan_us']:.1f}, fetch {row['fetch_us']:.1f} "
                    f"({link:.1f} GB/s of {row['link_bytes'] / 1e6:.1f} MB), error {row['error']:.0e} "
                    + " ".join(f"{k[6:]}:{v:.1f}" for k, v in row.items() if k.startswith("fetch_us_")),
                    flush=True,
                )
    print(json.dumps(result))
    if not all(row.get("right", True) for row in result["linear"] + result["experts"]):
        sys.exit("some kernels are wrong")


if __name__ == "__main__":
    main()
