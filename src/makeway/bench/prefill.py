"""`makeway bench prefill`: seconds to the first token beside what bytes and FLOPs allow, and beside other ways.

Owns how a prompt is measured, and the control arms: what the systems do that this one replaces, run on the same engine.
Never changes how the engine reads.
Hazard: the parts come from a run of their own, with the recorder on; a GPU's compute spans run beside its copies, so
parts of a sweep add up to more than the sweep.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from makeway.bench.activity import COPY, Span
from makeway.bench.report import Figure, Report
from makeway.bench.rig import Rig, Setup, opened
from makeway.engine.handover import HandoverRecord
from makeway.engine.phases import Phase
from makeway.engine.prefill import Sweep, SweepBuffers
from makeway.errors import UserError
from makeway.experts.policies import PromptCounts
from makeway.memory.predict import sweep_flops


@dataclass(frozen=True)
class Prompt:
    """One prompt that was read: seconds from asking to its first token, and what the hand-over did."""

    ttft_s: float
    first_token: int
    handover: HandoverRecord


def bench_prefill(
    report: Report,
    setup: Setup,
    *,
    lengths: Sequence[int] = (256, 1024, 8192),
    repeats: int = 3,
    arms_at: Sequence[int] = (8192,),
    micro_batches: Sequence[int] = (512, 2048),
) -> None:
    """Measures into `report`. Raises UserError for values that mean nothing, and whatever the engine raises.

    `arms_at`: lengths at which the control arms run too, once each; `micro_batches`: tokens of theirs.
    """
    if not lengths or min(*lengths, *arms_at, *micro_batches, repeats) < 1:
        raise UserError("--lengths, --arms-at, --micro-batches, --repeats: use 1 or more")
    with opened(setup, report) as rig:
        read(rig, rig.tokens(min(lengths)))  # kernels are compiled, and the cache is full afterwards
        found: list[dict[str, Any]] = report.facts.setdefault("prompts", [])
        for n in (*lengths, *(n for n in arms_at if n not in lengths)):
            if n in lengths:
                found.append(_length(rig, report, n=n, repeats=repeats))
            if n in arms_at:
                found += _arms(rig, report, n=n, micro_batches=micro_batches)


def read(rig: Rig, tokens: list[int]) -> Prompt:
    """A prompt on an idle engine; its first token is all of its answer. The cache is full again afterwards."""
    rig.rest()
    begin = time.perf_counter()
    request = rig.ask(tokens)
    first = None
    while first is None:
        first = next((e.token for e in rig.step() if e.request_id == request and e.kind == "token"), None)
    ttft_s = time.perf_counter() - begin
    rig.rest()
    assert rig.swing.last is not None
    return Prompt(ttft_s, first, rig.swing.last)


def bound_s(rig: Rig, n_tokens: int, copied_bytes: int) -> float:
    """Seconds below which a prompt that copies so much cannot be read."""
    flops = sum(sweep_flops(rig.plan, n_tokens))
    return max(copied_bytes / rig.rates.link_bytes_per_s, flops / rig.rates.flops_per_s)


def busy_s(spans: Sequence[Span]) -> dict[str, float]:
    """Seconds in which each kind of span ran."""
    found: dict[str, float] = {}
    for span in spans:
        found[span.what] = found.get(span.what, 0.0) + span.seconds
    return found


def drop_everything(rig: Rig, tokens: list[int], *, micro_batch: int) -> dict[str, Any]:
    """The other way: every slot goes, each micro-batch streams all experts, and all slots are filled before a token.

    Same kernels, same memory. Returns seconds and bytes of its parts and the first token.
    """
    rig.rest()
    memory, plan, swing = rig.engine.memory, rig.plan, rig.swing
    counts = PromptCounts(len(plan.layers), plan.sizes.n_experts, n_tokens=len(tokens))
    begin, before = time.perf_counter(), memory.device.link_bytes
    lending = plan.lending(len(tokens), micro_batch, plan.shape, n_kept=0)
    sequence = memory.open_sequence()
    try:
        swing.release(lending)
        assert swing.layout is not None
        released = time.perf_counter()
        sequence.reserve(len(tokens))
        for start in range(0, len(tokens), lending.sweep_tokens):
            piece = tokens[start : start + lending.sweep_tokens]
            experts = swing.sweep_experts(max(len(piece), plan.copy_all_tokens))  # copies all of them, however few
            sweep = Sweep(
                memory.model,
                experts,
                parts=[(sequence, piece)],
                chunk=swing.layout.chunk,
                buffers=SweepBuffers.in_views(memory.model, len(piece), swing.buffers, input_type=memory.input_type),
                on_routed=lambda layer, _, ids, first=start: counts.add(layer, ids.cpu().numpy(), first_token=first),  # type: ignore[misc]
                prefetch=experts.prefetch,
            )
            sweep.run()
            experts.close()
            last = sweep.residual(sweep.parts[0])[-1:].clone()
        logits = memory.model.head(last)[0].cpu().numpy()
        swept, copied = time.perf_counter(), memory.device.link_bytes - before
        swing.restore(counts.counts)
        while swing.is_refilling:
            swing.poll()
        end = time.perf_counter()
        swing.phases.to(Phase.IDLE)
    finally:
        sequence.close()
    return {
        "ttft_s": end - begin,
        "release_s": released - begin,
        "sweep_s": swept - released,
        "restore_s": end - swept,
        "copied_bytes": copied,
        "restored_bytes": memory.device.link_bytes - before - copied,
        "n_sweeps": lending.n_sweeps,
        "first_token": int(np.argmax(logits)),
    }


def _length(rig: Rig, report: Report, *, n: int, repeats: int) -> dict[str, Any]:
    """A prompt of `n` tokens with a full and a cold cache, and its parts."""
    read(rig, rig.tokens(n))
    rig.rest()
    with rig.recorder.on(rig.engine.device.torch_device):
        watched = read(rig, rig.tokens(n))
    spans = rig.recorder.spans()
    prompts = [read(rig, rig.tokens(n)) for _ in range(repeats)]
    rig.swing.cache.table.clear()
    cold = read(rig, rig.tokens(n))
    _put(rig, report, f"{n} tokens, full cache", prompts, n=n)
    _put_parts(rig, report, prompts, spans)
    _put(rig, report, f"{n} tokens, cold cache", [cold], n=n)
    return {
        "n_tokens": n,
        "ttft_s": [p.ttft_s for p in prompts],
        "bound_s": bound_s(rig, n, prompts[-1].handover.copied_bytes),
        "flops": sum(sweep_flops(rig.plan, n)),
        "handovers": [asdict(p.handover) for p in prompts],
        "cold": {"ttft_s": cold.ttft_s, **asdict(cold.handover)},
        "watched": {"ttft_s": watched.ttft_s, "busy_s": busy_s(spans)},
    }


def _put(rig: Rig, report: Report, name: str, prompts: Sequence[Prompt], *, n: int) -> None:
    seconds = tuple(p.ttft_s for p in prompts)
    last = prompts[-1].handover
    bound = bound_s(rig, n, last.copied_bytes)
    median = Figure(name, "s", seconds).median
    note = f"{n / median:.0f} tokens/s, {last.copied_bytes / 1e9:.4g} GB copied, {last.n_lent} ranks lent"
    report.figures.append(Figure(name, "s", seconds, is_time=True, bound=bound, note=note))


def _put_parts(rig: Rig, report: Report, prompts: Sequence[Prompt], spans: Sequence[Span]) -> None:
    """Release, sweep, restore until the first token, refill behind it; then what ran in the sweep."""
    handovers = [p.handover for p in prompts]
    rate, last = rig.rates.link_bytes_per_s, handovers[-1]
    fixed = tuple(p.ttft_s - p.handover.sweep_s for p in prompts)
    report.figures.append(Figure("  fixed cost: without the sweep", "s", fixed, is_time=True))
    for name, part, bound in (
        ("  release", "release_s", None),
        ("  sweep", "sweep_s", last.copied_bytes / rate),
        ("  restore until the first token", "restore_s", None),
        ("  refill, behind the first tokens", "refill_s", last.restored_bytes / rate),
    ):
        samples = tuple(getattr(h, part) for h in handovers)
        report.figures.append(Figure(name, "s", samples, is_time=True, bound=bound or None))
    copies = [s for s in spans if s.what == COPY and s.n_bytes]
    for what, seconds in sorted(busy_s(spans).items()):
        n_bytes = sum(s.n_bytes for s in copies) if what == COPY else 0
        note = f"{n_bytes / 1e9:.4g} GB, refill included" if what == COPY else ""
        report.figures.append(
            Figure(f"    {what}", "s", (seconds,), is_time=True, bound=n_bytes / rate or None, note=note)
        )


def _arms(rig: Rig, report: Report, *, n: int, micro_batches: Sequence[int]) -> list[dict[str, Any]]:
    """The other ways at one length, against the engine on the same prompt."""
    tokens, found = rig.tokens(n), []
    own = read(rig, tokens)
    for size in (*(m for m in micro_batches if m < n), rig.plan.max_sweep_tokens):
        way = f"micro-batches of {size}" if size < n else "one sweep"
        arm = drop_everything(rig, tokens, micro_batch=size)
        note = (
            f"{arm['ttft_s'] / own.ttft_s:.2f} times the engine's; release {arm['release_s']:.3g}, sweep "
            f"{arm['sweep_s']:.4g}, restore {arm['restore_s']:.3g} s; {arm['copied_bytes'] / 1e9:.4g} GB copied"
        )
        name = f"{n} tokens, {way}, everything dropped"
        bound = bound_s(rig, n, own.handover.copied_bytes)
        report.figures.append(Figure(name, "s", (arm["ttft_s"],), is_time=True, bound=bound, note=note))
        found.append(
            {"n_tokens": n, "arm": way, **arm, "engine_ttft_s": own.ttft_s, "engine_first_token": own.first_token}
        )
    return found
