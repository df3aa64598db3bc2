"""Replay a routing trace offline: which policy, with how many slots, serves how many experts from VRAM.

    python bench/policy_replay.py TRACE [--slots 64,128] [--policies lru,lfru] [--plot hits.png]

Works without a model. Each decode record is one step; a prompt is shown to the policy, and with `--lend all`
it empties the cache first, which is then restored in the policy's order.
Belady here: per layer, offline optimum in hits for experts of equal size, **with bypass** (a miss need not be
kept), no cap of uploads, no gate, no delay: after each step the layer keeps, of its cached and just routed
experts, those whose next use is nearest. It bounds every policy that starts cold from above; a cache restored
after a prompt (`--lend all`) starts warm and may pass it in a short trace. `static` replays with the profile of
the same trace, so it knows the future's counts.
Hazard: hits are not speed (more slots may leave no room for prefill); the yield says what an upload bought.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from makeway.errors import UserError
from makeway.experts.policies import RANKINGS, Gate, Policy, PromptCounts
from makeway.experts.trace import TraceHeader, TraceReader, TraceRecord

NEVER = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Result:
    """One replay. Lookups are distinct experts per layer and step; bytes count hits and kept experts."""

    policy: str
    n_slots: int
    n_steps: int
    n_lookups: int
    n_hits: int
    n_uploads: int
    n_restored: int
    served_bytes: int
    uploaded_bytes: int
    policy_s: float

    @property
    def hit_rate(self) -> float:
        return self.n_hits / self.n_lookups if self.n_lookups else 0.0

    @property
    def bytes_yield(self) -> float:
        """Bytes served from slots for each byte brought there (restores included)."""
        return self.served_bytes / self.uploaded_bytes if self.uploaded_bytes else 0.0


def used_mask(ids: np.ndarray, n_experts: int) -> np.ndarray:
    """ids [n_tokens, n_layers, k] -> bool [n_layers, n_experts]."""
    n_layers = ids.shape[1]
    used = np.zeros((n_layers, n_experts + 1), dtype=np.bool_)
    used[np.arange(n_layers)[None, :, None], np.where(ids < 0, n_experts, ids)] = True
    return used[:, :n_experts]


def layer_bytes(header: TraceHeader) -> np.ndarray:
    return np.array(header.expert_bytes or (1,) * header.n_layers, dtype=np.int64)


def profile_of(header: TraceHeader, records: Iterable[TraceRecord]) -> np.ndarray:
    """Uses of each expert over a whole trace: the best a static policy can know (it has seen the future)."""
    counts = np.zeros((header.n_layers, header.n_experts), dtype=np.int64)
    for record in records:
        if record.phase == "decode":
            counts += used_mask(record.ids, header.n_experts)
    return counts


def prompt_counts(header: TraceHeader, ids: np.ndarray) -> np.ndarray:
    counts = PromptCounts(header.n_layers, header.n_experts, n_tokens=len(ids))
    for layer in range(header.n_layers):
        counts.add(layer, ids[:, layer])
    return counts.counts


def replay(
    header: TraceHeader,
    records: Sequence[TraceRecord],
    *,
    name: str,
    n_slots: int,
    gate: Gate,
    uploads_per_layer: int = 2,
    delay: int = 2,
    lend_all: bool = False,
    seed: int = 0,
) -> Result:
    """Run one policy. What is decided after step t is seen by lookups from step t + `delay` (the engine: 2)."""
    n_layers, n_experts = header.n_layers, header.n_experts
    profile = profile_of(header, records) if name == "static" else None
    policy = Policy(
        name,
        n_layers,
        n_experts=n_experts,
        uploads_per_layer=uploads_per_layer,
        gate=gate,
        seed=seed,
        profile=profile,
    )
    n_slots = min(n_slots, n_experts)
    weights = layer_bytes(header)
    published = np.zeros((n_layers, n_experts), dtype=np.bool_)
    visible = [published.copy() for _ in range(delay)]  # tables of the next steps
    free = np.full(n_layers, n_slots, dtype=np.int64)
    wanted = [np.zeros_like(published) for _ in range(delay)]
    n_steps = n_lookups = n_hits = n_uploads = n_restored = 0
    served = uploaded = 0
    policy_s = 0.0
    for record in records:
        if record.phase == "prefill":
            counts = prompt_counts(header, record.ids)
            policy.observe_prompt(counts)
            if lend_all:
                order = policy.restore_order(counts)[: n_layers * n_slots]
                published[:] = False
                published[order[:, 0], order[:, 1]] = True
                free[:] = 0
                n_restored += len(order)
                uploaded += int(weights[order[:, 0]].sum())
                visible = [published.copy() for _ in range(delay)]
            continue
        used = used_mask(record.ids, n_experts)
        hits = used & visible[0]
        misses = used & ~visible[0] & wanted[0]
        n_steps += 1
        n_lookups += int(used.sum())
        n_hits += int(hits.sum())
        served += int((hits.sum(axis=1) * weights).sum())
        fetched = np.full((n_layers, max(1, uploads_per_layer)), -1, dtype=np.int32)
        rank = np.cumsum(misses, axis=1)
        for spare in range(uploads_per_layer):
            layer, expert = np.nonzero(misses & (rank == spare + 1))
            fetched[layer, spare] = expert
        begin = time.perf_counter()
        policy.observe(record.ids.transpose(1, 0, 2))
        decision = policy.decide(fetched, published, n_free=free)
        out = decision.victims >= 0
        published[decision.layers[out], decision.victims[out]] = False
        published[decision.layers, decision.experts] = True
        np.subtract.at(free, decision.layers[~out], 1)
        wants = policy.wanted(published, n_free=free)
        policy_s += time.perf_counter() - begin
        n_uploads += len(decision.layers)
        uploaded += int(weights[decision.layers].sum())
        visible = [*visible[1:], published.copy()]
        wanted = [*wanted[1:], wants]
    return Result(name, n_slots, n_steps, n_lookups, n_hits, n_uploads, n_restored, served, uploaded, policy_s)


def next_uses(used: np.ndarray) -> np.ndarray:
    """used [steps, layers, experts] -> the next step after each that uses the expert, NEVER if none."""
    after = np.empty(used.shape, dtype=np.int32)
    coming = np.full(used.shape[1:], NEVER, dtype=np.int32)
    for step in range(len(used) - 1, -1, -1):
        after[step] = coming
        coming = np.where(used[step], np.int32(step), coming)
    return after


def belady(header: TraceHeader, records: Sequence[TraceRecord], *, n_slots: int, block: int = 256) -> Result:
    """The offline optimum described at the top of this file. Memory: `block` layers x experts x steps at a time."""
    n_experts = header.n_experts
    n_slots = min(n_slots, n_experts)
    steps = [record.ids for record in records if record.phase == "decode"]
    weights = layer_bytes(header)
    n_lookups = n_hits = n_uploads = served = uploaded = 0
    layers_at_once = max(1, block * 4096 // max(1, len(steps) * n_experts))
    for first in range(0, header.n_layers, layers_at_once):
        part = slice(first, first + layers_at_once)
        if not steps:
            break
        used = np.stack([used_mask(ids[:, part], n_experts) for ids in steps])
        after = next_uses(used)
        cached = np.zeros(used.shape[1:], dtype=np.bool_)
        coming = np.full(used.shape[1:], NEVER, dtype=np.int32)
        for step in range(len(steps)):
            hits = used[step] & cached
            n_lookups += int(used[step].sum())
            n_hits += int(hits.sum())
            served += int((hits.sum(axis=1) * weights[part]).sum())
            coming = np.where(used[step], after[step], coming)
            key = np.where((cached | used[step]) & (coming != NEVER), coming, NEVER)
            kept = np.zeros_like(cached)
            if n_slots:
                nearest = np.argpartition(key, n_slots - 1, axis=1)[:, :n_slots]
                np.put_along_axis(kept, nearest, True, axis=1)
            kept &= key != NEVER
            brought = kept & ~cached
            n_uploads += int(brought.sum())
            uploaded += int((brought.sum(axis=1) * weights[part]).sum())
            cached = kept
    return Result("belady", n_slots, len(steps), n_lookups, n_hits, n_uploads, 0, served, uploaded, 0.0)


def plot(results: Sequence[Result], path: Path, *, title: str) -> None:
    """Hit rate over slots per layer, one line per policy. Raises UserError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as fault:
        raise UserError("--plot needs matplotlib: pip install matplotlib (or leave --plot out)") from fault
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for name in dict.fromkeys(result.policy for result in results):
        line = sorted((r.n_slots, 100 * r.hit_rate) for r in results if r.policy == name)
        style = "k--" if name == "belady" else "o-"
        axes.plot([x for x, _ in line], [y for _, y in line], style, label=name)
    axes.set(xlabel="slots per layer", ylabel="hits, %", ylim=(0, 100), title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path)
    except OSError as fault:
        raise UserError(f"cannot write the plot {path}: {fault.strerror}") from fault


def numbers(text: str) -> list[int]:
    try:
        values = [int(part) for part in text.split(",")]
    except ValueError:
        values = [-1]
    if not values or min(values) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of counts such as 32,64,128")
    return sorted(set(values))


def names(text: str) -> list[str]:
    chosen = text.split(",")
    for name in chosen:
        if name not in RANKINGS:
            raise argparse.ArgumentTypeError(f"policy {name!r} is unknown; choose from {', '.join(RANKINGS)}")
    return chosen


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description="Replay a routing trace for each policy and slot count.")
    made.add_argument("trace", type=Path)
    made.add_argument("--slots", type=numbers, help="slots per layer, e.g. 32,64,128 (default: eighths)")
    made.add_argument("--policies", type=names, default=list(RANKINGS), help="e.g. lru,lfru (default: all)")
    made.add_argument("--uploads-per-layer", type=int, default=2, help="kept misses per layer and step")
    made.add_argument("--gate", type=numbers, default=[3, 16], help="uses,window (default 3,16; 1,1 admits all)")
    made.add_argument("--lend", choices=("none", "all"), default="none", help="what a prompt borrows")
    made.add_argument("--seed", type=int, default=0)
    made.add_argument("--plot", type=Path, help="write a PNG of hit rate over slots")
    return made


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        return run(options)
    except UserError as fault:
        print(f"error: {fault}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    with TraceReader(options.trace) as reader:
        records = list(reader)
        header, truncated = reader.header, reader.truncated
    n = header.n_experts
    slots = options.slots or sorted({max(1, n * eighth // 8) for eighth in range(1, 9)})
    gate = Gate(min(options.gate), max(options.gate))
    results = []
    print(f"{header.model}: {header.n_layers} layers, {n} experts, top-{header.top_k}, {len(records)} records")
    if truncated:
        print("the trace ends in the middle of a record; the whole ones before it are used")
    print(f"{'policy':<10} {'slots':>5} {'hits %':>7} {'uploads':>9} {'restored':>9} {'yield':>7} {'ms/step':>8}")
    for n_slots in slots:
        for name in [*options.policies, "belady"]:
            if name == "belady":
                result = belady(header, records, n_slots=n_slots)
            else:
                result = replay(
                    header,
                    records,
                    name=name,
                    n_slots=n_slots,
                    gate=gate,
                    uploads_per_layer=options.uploads_per_layer,
                    lend_all=options.lend == "all",
                    seed=options.seed,
                )
            results.append(result)
            ms = 1000 * result.policy_s / max(1, result.n_steps)
            print(
                f"{name:<10} {result.n_slots:>5} {100 * result.hit_rate:>7.2f} {result.n_uploads:>9} "
                f"{result.n_restored:>9} {result.bytes_yield:>7.2f} {ms:>8.3f}"
            )
    if options.plot:
        plot(results, options.plot, title=f"{header.model}: {results[0].n_steps} steps")
    rows = [{**asdict(r), "hit_rate": r.hit_rate, "yield": r.bytes_yield} for r in results]
    print(json.dumps({"bench": "policy_replay", "model": header.model, "truncated": truncated, "results": rows}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
