"""What a decode step does besides its quantised matrices: checked against the reference, then timed next to its bytes.

Owns nothing of the engine. Never times a kernel whose numbers it has not checked. Hazard: pools are rotated so that
nothing is still in the L2 cache when it comes again; a launch that reads little is bound by its latency, not by bytes.

    python -m bench.step_kernels [--sweep] [--only NAME]      (one JSON line last)
"""

import argparse
import contextlib
import json
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.kernels import random_bytes, rates, time_us

from makeway.gguf.types import GGMLType as G
from makeway.kernels import (
    REFERENCE,
    ConvState,
    DeltaState,
    DeviceRows,
    KVLayer,
    MixerWeights,
    Rows,
    Span,
    Weight,
)
from makeway.kernels import reference_attention as reference
from makeway.kernels.triton import attend, choose, delta, index, small
from makeway.kernels.triton.ops import triton_ops

DEVICE = torch.device("cuda")
BLOCK = 64
COLD_BYTES = 200 << 20  # of pools that are rotated


@dataclass(frozen=True)
class Case:
    """launches: the same work on different memory; bytes of one; what a check found (None: not checked here)."""

    launches: list[Callable[[], object]]
    n_bytes: float
    error: float | None = None
    right: bool = True


def told(n: int, position: int, *, context: int, replay: int = 0, keep: bool = False, one: bool = False) -> Rows:
    """n rows: of one sequence where `one`, else one each of n sequences; the last row's position is `position`."""
    blocks = -(-context // BLOCK)
    spans = 1 if one else n
    per = n // spans
    first = position + 1 - per
    generator = torch.Generator().manual_seed(n)
    order = torch.randperm(spans * blocks, generator=generator).view(spans, blocks)
    fixed = DeviceRows(
        positions=torch.arange(first, position + 1).repeat(spans).cuda(),
        row_segment=torch.arange(spans, dtype=torch.int32).repeat_interleave(per).cuda(),
        first_row=(torch.arange(spans, dtype=torch.int32) * per).cuda(),
        n_rows=torch.full((spans,), per, dtype=torch.int32).cuda(),
        places=torch.arange(spans, dtype=torch.int32).cuda(),
        n_replay=torch.full((spans,), replay, dtype=torch.int32).cuda(),
        block_tables=order.to(torch.int32).cuda(),
    )
    hosts = tuple(Span(i * per, per, first, order[i].tolist(), i, replay) for i in range(spans))
    return Rows(fixed.positions, hosts, max_keys=context, keep=keep, fixed=fixed)


def pools(context: int, n_kv: int, d: int, *, sequences: int, index_dim: int = 0) -> list[KVLayer]:
    n_blocks = sequences * -(-context // BLOCK)
    size = n_blocks * BLOCK * n_kv * d * 4
    found = []
    for _ in range(max(1, min(12, COLD_BYTES // size))):
        keys, values = (torch.randn(n_blocks, BLOCK, n_kv, d, device=DEVICE).half() for _ in range(2))
        pooled = torch.randn(n_blocks, BLOCK // 4, index_dim, device=DEVICE).half() if index_dim else None
        ring = torch.zeros(sequences, 16, index_dim, device=DEVICE) if index_dim else None
        found.append(KVLayer(keys, values, pooled, ring))
    return found


def expected_attention(q: torch.Tensor, kv: KVLayer, rows: Rows, chosen: torch.Tensor | None, row: int) -> torch.Tensor:
    """f64 [heads, d] of one row."""
    fixed = rows.on_device
    position = int(fixed.positions[row])
    table = fixed.block_tables[int(fixed.row_segment[row])].long()
    tokens = torch.arange(position + 1, device=DEVICE)
    if chosen is not None:
        blocks = chosen[row][chosen[row] >= 0].long()
        tail = torch.arange((position + 1) // 4 * 4, position + 1, device=DEVICE)
        tokens = torch.cat(((blocks[:, None] * 4 + torch.arange(4, device=DEVICE)).flatten(), tail))
    places = table[tokens // BLOCK] * BLOCK + tokens % BLOCK
    keys = kv.keys.flatten(0, 1)[places].double().repeat_interleave(q.shape[1] // kv.keys.shape[2], dim=1)
    values = kv.values.flatten(0, 1)[places].double().repeat_interleave(q.shape[1] // kv.keys.shape[2], dim=1)
    weights = torch.softmax(torch.einsum("hd,thd->ht", q[row].double(), keys), dim=-1)
    return torch.einsum("ht,thd->hd", weights, values)


def distance(x: torch.Tensor, y: torch.Tensor) -> float:
    return float((x.double() - y.double()).norm() / y.double().norm())


def alone(rows: Rows, row: int) -> Rows:
    """One row of a batch, as the only one."""
    f = rows.on_device
    segment = int(f.row_segment[row])
    part = slice(segment, segment + 1)
    zero = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    fixed = DeviceRows(
        f.positions[row : row + 1], zero, zero, zero + 1, f.places[part], f.n_replay[part], f.block_tables[part]
    )
    return replace(rows, positions=fixed.positions, spans=(), fixed=fixed)


def dense(n: int, keys: int, *, context: int, chunk: bool = False) -> Case:
    """The 30B's attention, 32 / 4 heads of 128."""
    rows = told(n, keys - 1, context=context, one=chunk)
    kvs = pools(context, 4, 128, sequences=1 if chunk else n)
    q = torch.randn(n, 32, 128, device=DEVICE) * 128**-0.5
    out = attend.attend(q, kvs[0], rows=rows)
    error = max(distance(out[i], expected_attention(q, kvs[0], rows, None, i)) for i in {0, n // 2, n - 1})
    right = error < (3e-3 if chunk else 1e-5)
    if not chunk:
        one = attend.attend(q[n - 1 :], kvs[0], rows=alone(rows, n - 1))
        right = right and torch.equal(one[0], out[n - 1])
    n_bytes = (1 if chunk else n) * keys * 4 * 128 * 4
    return Case([lambda kv=kv: attend.attend(q, kv, rows=rows) for kv in kvs], n_bytes, error, right)


def sparse(n: int, position: int, *, chunk: bool = False) -> Case:
    """Flash-Next's attention over 512 selected blocks and the tail, 24 / 2 heads of 256."""
    context = position + 1
    rows = told(n, position, context=context, one=chunk)
    kvs = pools(context, 2, 256, sequences=1 if chunk else n, index_dim=128)
    q, gate = torch.randn(n, 24, 256, device=DEVICE) / 16, torch.randn(n, 24, 512, device=DEVICE)[..., 256:]
    least = (int(rows.positions.min()) + 1) // 4
    chosen = torch.stack([torch.randperm(least, device=DEVICE)[:512].sort().values for _ in range(n)]).int()
    out = attend.attend(q, kvs[0], rows=rows, selected=chosen, gate=gate)
    wanted = {i: expected_attention(q, kvs[0], rows, chosen, i) * torch.sigmoid(gate[i].double()) for i in (0, n - 1)}
    error = max(distance(out[i], x) for i, x in wanted.items())
    return Case(
        [lambda kv=kv: attend.attend(q, kv, rows=rows, selected=chosen, gate=gate) for kv in kvs],
        n * 2048 * 2 * 256 * 4,
        error,
        error < 1e-5,
    )


def choice(n: int, position: int, *, context: int, n_rows: int = 8) -> Case:
    """Scores and the best 512 blocks; n_rows rows at a time, of a chunk if there are more than eight."""
    chunk = n > 8
    rows = told(n, position, context=context, one=chunk)
    sequences = 1 if chunk else n
    kvs = pools(context, 1, 16, sequences=sequences, index_dim=128)
    q = torch.randn(n, 4, 128, device=DEVICE)
    scratch = choose.IndexScratch(DEVICE, n_blocks=1 << (context // 4).bit_length(), n_rows=n_rows)

    def launch(kv: KVLayer) -> torch.Tensor:
        return index.index_select(q, kv, rows=rows, n_select=512, scratch=scratch)

    out = launch(kvs[0])
    last = (n - 1) % n_rows  # the rows that the scratch still holds
    row, n_blocks = n - 1, (position + 1) // 4
    own = scratch.scores[last : last + 1, :n_blocks]
    numbers = torch.arange(n_blocks, device=DEVICE)
    table = rows.on_device.block_tables[int(rows.on_device.row_segment[row])].long()
    keys = kvs[0].pooled[table[numbers // 16], numbers % 16].double()
    scores = torch.relu(q[row].double() @ keys.T).sum(0)[None] * 128**-0.5
    error = distance(own, scores)
    best = reference.best_blocks(own, rows.positions[row : row + 1], ratio=4, n_select=512)
    right = error < 1e-6 and torch.equal(best[0], out[row])
    right = right and not scratch.bins.any() and not scratch.arrived.any()
    return Case([lambda kv=kv: launch(kv) for kv in kvs], sequences * n_blocks * 256, error, right)


def recurrent(n: int, *, one: bool, keep: bool, replay: int = 0) -> Case:
    """Gated DeltaNet between its matrices, 16 / 48 heads of 128."""
    rows = told(n, 100, context=128, one=one, replay=replay, keep=keep)
    places = 1 if one else n

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE)

    def memory() -> tuple[ConvState, DeltaState]:
        gates = torch.rand((places, 8, 2, 48), device=DEVICE)
        state = DeltaState(
            random(places, 48, 128, 128), random(places, 8, 16, 128) / 11, random(places, 8, 48, 128), gates, True
        )
        return ConvState(random(places, 3, 10240), random(places, 8, 10240)), state

    weights = {
        "alpha": random(n, 48),
        "beta": random(n, 48),
        "conv": random(10240, 4),
        "a": -torch.rand(48, device=DEVICE),
        "dt_bias": random(48),
        "norm": random(128),
        "eps": 1e-6,
        "sigmoid_gate": True,
        "rows": rows,
    }
    qkv, gate = random(n, 10240), random(n, 6144)
    ops = triton_ops(DEVICE)
    conv_state, state = memory()
    before = [t.clone() for t in (conv_state.tail, conv_state.kept, state.state, state.k, state.v, state.gates)]
    out = ops.gated_delta(qkv, gate, conv_state=conv_state, state=state, **weights)
    theirs = ConvState(*before[:2]), DeltaState(*before[2:], True)
    expected = REFERENCE.gated_delta(qkv, gate, conv_state=theirs[0], state=theirs[1], **weights)
    error = max(distance(out, expected), distance(state.state, theirs[1].state), distance(state.k, theirs[1].k))
    right = error < 1e-5 and torch.equal(conv_state.tail, theirs[0].tail)
    memories = [memory() for _ in range(12)]
    n_bytes = places * 48 * 128 * 128 * (8 if not keep or replay else 4)
    return Case(
        [lambda c=c, s=s: ops.gated_delta(qkv, gate, conv_state=c, state=s, **weights) for c, s in memories],
        n_bytes,
        error,
        right,
    )


def matrix(kind: G, n_rows: int, n_cols: int) -> Weight:
    return Weight(random_bytes(kind, n_rows, n_cols), kind, n_cols)


def mixer_weights() -> MixerWeights:
    norm = torch.rand(10240, device=DEVICE)
    return MixerWeights(norm, matrix(G.Q8_0, 320, 10240), matrix(G.Q8_0, 10240, 320), matrix(G.Q8_0, 4, 10240))


def mixer(n: int) -> Case:
    """A mixer of hyper-connections with its matrices (Q8_0)."""
    ops, weights = triton_ops(DEVICE), [mixer_weights() for _ in range(16)]
    h, added = (
        torch.randn(n, 4, 2560, device=DEVICE),
        (torch.rand(n, 4, device=DEVICE), torch.randn(n, 2560, device=DEVICE)),
    )
    ours, theirs = (o.hc_mix(h, weights[0], eps=1e-6, added=added) for o in (ops, REFERENCE))
    error = max(distance(a, b) for a, b in zip(ours, theirs, strict=True))
    single = ops.hc_mix(h[:1], weights[0], eps=1e-6, added=(added[0][:1], added[1][:1]))
    right = error < 1e-3 and torch.equal(single[1][0], ours[1][0])
    w = weights[0]
    n_bytes = w.down.nbytes + w.up.nbytes + w.inject.nbytes
    return Case([lambda w=w: ops.hc_mix(h, w, eps=1e-6, added=added) for w in weights], n_bytes, error, right)


def router(n: int) -> Case:
    """Router (F32), choice of experts, shared expert (Q8_0) and its gate."""
    ops = triton_ops(DEVICE)
    layers = [
        {
            "router": matrix(G.F32, 512, 2560),
            "shared": (matrix(G.Q8_0, 640, 2560), matrix(G.Q8_0, 640, 2560), matrix(G.Q8_0, 2560, 640)),
            "shared_gate": matrix(G.F32, 1, 2560),
        }
        for _ in range(16)
    ]
    x = torch.randn(n, 2560, device=DEVICE)
    ours, theirs = (o.moe_input(x, top_k=10, **layers[0]) for o in (ops, REFERENCE))
    error = max(distance(ours[i], theirs[i]) for i in (1, 2))
    single = ops.moe_input(x[:1], top_k=10, **layers[0])
    right = error < 1e-4 and torch.equal(ours[0], theirs[0]) and torch.equal(single[2][0], ours[2][0])
    n_bytes = 513 * 2560 * 4 + sum(w.nbytes for w in layers[0]["shared"])
    return Case([lambda p=p: ops.moe_input(x, top_k=10, **p) for p in layers], n_bytes, error, right)


def small_ones(n: int) -> Iterator[tuple[str, Callable[[], Case]]]:
    rows = told(n, 1000, context=1024)
    kv = pools(1024, 2, 256, sequences=n, index_dim=128)[0]
    q, gamma, raw = (torch.randn(*s, device=DEVICE) for s in ((n, 24, 512), (256,), (n, 128)))
    keys = torch.randn(n, 2, 256, device=DEVICE)
    rope = {"positions": rows.positions, "eps": 1e-6, "n_rot": 64, "theta": 1e7}
    logits = torch.randn(n, 512, device=DEVICE)
    h, inject, out = (torch.randn(*s, device=DEVICE) for s in ((n, 4, 2560), (n, 4), (n, 2560)))
    ops = triton_ops(DEVICE)
    yield "norm and rope of q", lambda: Case([lambda: small.norm_rope(q[..., :256], gamma, **rope)], q.nbytes)
    yield "write_kv", lambda: Case([lambda: attend.write_kv(keys, keys, kv=kv, rows=rows)], keys.nbytes * 3)
    pool = {"kv": kv, "rows": rows, "eps": 1e-6, "n_rot": 64, "theta": 1e7}
    yield "index_pool", lambda: Case([lambda: index.index_pool(raw, gamma[:128], **pool)], raw.nbytes * 4)
    yield "route", lambda: Case([lambda: small.route(logits, 10)], logits.nbytes)
    yield "combine streams", lambda: Case([lambda: ops.hc_combine(h, inject, out)], 2 * h.nbytes)


def layer(n: int) -> Case:
    """A Gated DeltaNet layer of Flash-Next without its routed experts: what a step runs between two of them."""
    ops = triton_ops(DEVICE)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=DEVICE) * 0.1

    rows = told(n, 100, context=128)
    layers = []
    for _ in range(6):
        state = DeltaState(
            random(n, 48, 128, 128),
            random(n, 8, 16, 128),
            random(n, 8, 48, 128),
            torch.rand(n, 8, 2, 48, device=DEVICE),
            True,
        )
        layers.append(
            {
                "mixers": (mixer_weights(), mixer_weights()),
                "projections": (
                    matrix(G.Q5_K, 10240, 2560),
                    matrix(G.Q4_K, 6144, 2560),
                    matrix(G.F32, 48, 2560),
                    matrix(G.F32, 48, 2560),
                ),
                "out": matrix(G.Q5_K, 2560, 6144),
                "delta": {
                    "conv": random(10240, 4),
                    "a": -torch.rand(48, device=DEVICE),
                    "dt_bias": random(48),
                    "norm": random(128),
                    "eps": 1e-6,
                    "sigmoid_gate": True,
                    "conv_state": ConvState(random(n, 3, 10240), random(n, 8, 10240)),
                    "state": state,
                    "rows": rows,
                },
                "moe": {
                    "router": matrix(G.F32, 512, 2560),
                    "shared": (matrix(G.Q8_0, 640, 2560), matrix(G.Q8_0, 640, 2560), matrix(G.Q8_0, 2560, 640)),
                    "shared_gate": matrix(G.F32, 1, 2560),
                    "top_k": 10,
                },
            }
        )
    h = torch.randn(n, 4, 2560, device=DEVICE)

    def run(p: dict) -> torch.Tensor:
        new_h, x, inject = ops.hc_mix(h, p["mixers"][0], eps=1e-6)
        qkv, gate, alpha, beta = ops.linears(x, p["projections"])
        out = ops.linear(ops.gated_delta(qkv, gate, alpha=alpha, beta=beta, **p["delta"]), p["out"])
        new_h, x, inject = ops.hc_mix(new_h, p["mixers"][1], eps=1e-6, added=(inject, out))
        acc = ops.moe_input(x, **p["moe"])[2]
        return ops.hc_combine(new_h, inject, acc)

    one = layers[0]
    n_bytes = sum(w.nbytes for w in (*one["projections"], one["out"], *one["moe"]["shared"], one["moe"]["router"]))
    n_bytes += sum(w.nbytes for m in one["mixers"] for w in (m.down, m.up, m.inject)) + n * 48 * 128 * 128 * 8
    return Case([lambda p=p: run(p) for p in layers], n_bytes)


@contextlib.contextmanager
def patched(module: object, **values: int) -> Iterator[None]:
    old = {name: getattr(module, name) for name in values}
    for name, value in values.items():
        setattr(module, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            setattr(module, name, value)


def cases(sweep: bool) -> dict[str, tuple[Callable[[], Case], object, dict[str, int]]]:
    """By name: what makes the case, and constants of a module that differ from the fixed ones."""
    found: dict[str, tuple[Callable[[], Case], object, dict[str, int]]] = {}

    def add(name: str, make: Callable[[], Case], module: object = None, **values: int) -> None:
        found[" ".join([name, *(f"{k}={v}" for k, v in values.items())])] = (make, module, values)

    add("layer without experts, 1 row", lambda: layer(1))
    add("layer without experts, 4 rows", lambda: layer(4))
    for n in (1, 4):
        add(f"mixer, {n}", lambda n=n: mixer(n))
        add(f"router and shared expert, {n}", lambda n=n: router(n))
    add("gated delta, 1 row", lambda: recurrent(1, one=True, keep=False))
    add("gated delta, 4 sequences", lambda: recurrent(4, one=False, keep=False))
    add("gated delta, 4 rows kept, 3 replayed", lambda: recurrent(4, one=True, keep=True, replay=3))
    for keys in (256, 8192, 32768):
        add(f"30B attention, {keys} keys of 32768, 1 row", lambda keys=keys: dense(1, keys, context=32768))
    add("30B attention, 131072 keys, 1 row", lambda: dense(1, 131072, context=131072))
    add("30B attention, 8192 keys of 32768, 4 rows", lambda: dense(4, 8192, context=32768))
    add("30B attention, a chunk of 2048 up to 8192", lambda: dense(2048, 8192, context=8192, chunk=True))
    for n in (1, 4):
        add(f"Flash-Next attention, 2048 of 32768, {n}", lambda n=n: sparse(n, 32767))
    add("Flash-Next attention, a chunk of 512", lambda: sparse(512, 32767, chunk=True))
    for position in (8191, 32767, 131071, 261887):
        add(f"choice of blocks, {position + 1} tokens, 1 row", lambda p=position: choice(1, p, context=261888))
    add("choice of blocks, 131072 tokens, 4 rows", lambda: choice(4, 131071, context=261888))
    for n_rows in (64, 256):
        add(
            f"choice of blocks, 131072 tokens, a chunk of 512 by {n_rows}",
            lambda n_rows=n_rows: choice(512, 131071, context=131072, n_rows=n_rows),
        )
    for name, make in small_ones(1):
        add(f"{name}, 1 row", make)
    if not sweep:
        return found
    for tile, warps in ((1024, 4), (2048, 8), (4096, 4), (4096, 8)):
        for position in (8191, 131071):
            add(
                f"choice of blocks, {position + 1}",
                lambda p=position: choice(1, p, context=261888),
                choose,
                SELECT_TILE=tile,
                SELECT_WARPS=warps,
            )
    for keys in (32, 128):
        add("choice of blocks, 131072", lambda: choice(1, 131071, context=261888), index, SCORE_KEYS=keys)
    for columns, warps in ((16, 2), (16, 4), (32, 2), (32, 8), (64, 4), (64, 8), (128, 8)):
        add(
            "gated delta, 1",
            lambda: recurrent(1, one=True, keep=False),
            delta,
            DELTA_COLUMNS=columns,
            DELTA_WARPS=warps,
        )
    for splits in (32, 128):
        add("30B attention, 8192", lambda: dense(1, 8192, context=32768), attend, MOST_SPLITS=splits)
        add("30B attention, 32768", lambda: dense(1, 32768, context=32768), attend, MOST_SPLITS=splits)
    return found


def prepare(job: tuple[bool, str]) -> None:
    """Fill the compiler's cache, in another process."""
    make, module, values = cases(job[0])[job[1]]
    with contextlib.suppress(Exception), patched(module, **values):
        make().launches[0]()
        torch.cuda.synchronize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sweep", action="store_true", help="time other tilings too")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--processes", type=int, default=14, help="that compile")
    args = parser.parse_args()
    names = [name for name in cases(args.sweep) if args.only in name]
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        pool.map(prepare, [(args.sweep, name) for name in names], chunksize=1)
    measured = rates()
    print(f"read {measured['read'] / 1e12:.2f} TB/s", flush=True)
    result: dict = {"device": torch.cuda.get_device_name(), "rates": measured, "cases": []}
    for name, (make, module, values) in cases(args.sweep).items():
        if name not in names:
            continue
        row: dict = {"name": name}
        result["cases"].append(row)
        try:
            with patched(module, **values):
                case = make()
                row |= {"bytes": case.n_bytes, "error": case.error, "right": case.right}
                if case.right:
                    row["us"], row["us_min"] = time_us(case.launches)
        except Exception as error:  # noqa: BLE001  one faulty case must not hide the others
            traceback.print_exc(limit=4)
            row |= {"right": False, "failed": repr(error)[:300]}
        if "us" not in row:
            print(f"{name:<64} WRONG {row}", flush=True)
            continue
        bound = row["bytes"] / measured["read"] * 1e6
        error = "not checked" if row["error"] is None else f"{row['error']:.0e}"
        print(
            f"{name:<64} {row['bytes'] / 1e6:8.2f} MB  bound {bound:7.2f} us  {row['us']:8.2f} us  "
            f"{bound / row['us']:6.1%}  error {error}",
            flush=True,
        )
        torch.cuda.empty_cache()
    print(json.dumps(result))
    if not all(row["right"] for row in result["cases"]):
        sys.exit("some kernels are wrong")


if __name__ == "__main__":
    main()
