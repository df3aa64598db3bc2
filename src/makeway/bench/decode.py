"""`makeway bench decode`: milliseconds of a step beside what its bytes allow, over rows, contexts and hit rates.

Owns how a step is measured: the whole engine's, sampling and policy included, on answers whose tokens are given. Never
chooses what is cached but for the runs that are said to hold a hit rate.
Hazard: the bound counts only bytes that must move (misses over the link, weights, hits, KV and states on the device);
launches, activations and the host are what a share below 100 % consists of.
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from makeway.bench.launches import launches
from makeway.bench.report import Figure, Report
from makeway.bench.rig import Counts, Rig, Setup, opened
from makeway.errors import EngineFailed, UserError
from makeway.experts.slots import NONE
from makeway.kv import BLOCK_TOKENS


@dataclass(frozen=True)
class Lengths:
    """Steps of each kind. first: after a prompt, shown apart, since the cache is still filling up. most: waited at most
    for the cache to settle. warm, settle: not counted, before a run and after a change. steps: measured at a time, so
    often as `repeats` says."""

    first: int = 200
    most: int = 256
    warm: int = 64
    settle: int = 8
    steps: int = 32
    repeats: int = 5

    def natural(self) -> int:
        """Steps of an answer that wanders."""
        return self.first + self.most + self.warm + self.steps * self.repeats

    def held(self, levels: int) -> int:
        """Steps of an answer whose hit rate is held at some levels."""
        return self.most + self.settle + levels * (self.settle + self.steps * self.repeats)

    def check(self) -> None:
        """Raises UserError for what cannot be measured."""
        if self.steps < 1 or self.repeats < 1 or self.first < _PARTS:
            raise UserError(f"--steps, --repeats: use 1 or more (and {_PARTS} or more first steps)")


_PARTS = 4  # samples of the first steps
_SHOWN = 15  # kernels in the table; all are in the document
_SPARE = 16  # tokens of an answer beyond those that are measured: answers need not start in the same step


@dataclass(frozen=True)
class StepBytes:
    """What one step must move. link: missed experts. The others on the device: resident weights once, hits, keys and
    values and indexer keys of all rows, recurrent states read and written."""

    link: float
    weights: float
    hits: float
    kv: float
    indexer: float
    states: float

    @property
    def device(self) -> float:
        return self.weights + self.hits + self.kv + self.indexer + self.states


@dataclass(frozen=True)
class Run:
    """Steps that were measured: mean seconds of a step in each part of them, what they routed, what they must move."""

    seconds: tuple[float, ...]
    n_steps: int
    counts: Counts
    bytes: StepBytes


def needed_context(rows: Sequence[int], contexts: Sequence[int], *, lengths: Lengths, levels: int) -> int:
    """Tokens of KV that `bench_decode` needs with `levels` hit rates."""
    answer = BLOCK_TOKENS + _SPARE + max(lengths.natural(), lengths.held(levels))
    return max(max(contexts) + answer, max(rows) * (contexts[0] + answer))


def bench_decode(
    report: Report,
    setup: Setup,
    *,
    rows: Sequence[int] = (1, 2, 4, 8),
    contexts: Sequence[int] = (256, 8192),
    hit_rates: Sequence[float] = (1.0, 0.85, 0.5, 0.0),
    lengths: Lengths | None = None,
    shows_launches: bool = False,
) -> None:
    """Measures into `report`. All row counts at the first context, one row at the others.

    `hit_rates`: held one after the other by taking experts out of their slots. `shows_launches`: of a step of one row,
    at the very end. Raises UserError for values that mean nothing, and whatever the engine raises.
    """
    lengths = lengths or Lengths()
    lengths.check()
    if not rows or not contexts or min(rows) < 1 or min(contexts) < 1:
        raise UserError("--rows, --contexts: use 1 or more")
    if any(not 0 <= rate <= 1 for rate in hit_rates):
        raise UserError("--hits: use shares from 0 to 1")
    with opened(setup, report) as rig:
        if max(rows) > rig.plan.rows:
            raise UserError(f"--rows {max(rows)}: a step has at most {rig.plan.rows} rows; use at most that")
        found: list[dict[str, Any]] = report.facts.setdefault("runs", [])
        for context in contexts:
            for n in rows if context == contexts[0] else (1,):
                found += _natural(rig, report, n=n, context=context, lengths=lengths)
        for n in rows:
            found += _held(rig, report, n=n, context=contexts[0], hit_rates=hit_rates, lengths=lengths)
        if shows_launches:
            _launches(rig, report, context=contexts[0], n_warm=lengths.warm)


def step_bytes(rig: Rig, counts: Counts, *, n_steps: int, rows: int, context: float) -> StepBytes:
    """What one of `n_steps` steps moves on average, each of `rows` rows with `context` tokens behind them."""
    facts, kv_type = rig.plan.facts, rig.plan.request.kv_type
    seen = min(context, facts.attention_budget_tokens or context)
    return StepBytes(
        link=counts.miss_bytes / n_steps,
        weights=facts.resident_bytes(on_host=False, is_mtp=False),
        hits=counts.hit_bytes / n_steps,
        kv=rows * seen * facts.kv_bytes_per_token[kv_type],
        indexer=rows * context * facts.indexer_bytes_per_token.get(kv_type, 0),
        states=2 * rows * facts.state_bytes_per_sequence,
    )


def bound_s(rig: Rig, moved: StepBytes) -> float:
    """Seconds below which a step that moves these bytes cannot take."""
    return moved.link / rig.rates.link_bytes_per_s + moved.device / rig.rates.hbm_bytes_per_s


def run_steps(rig: Rig, n: int, *, rows: int, context: int, parts: int) -> Run:
    """`parts` times `n` steps, every one a token of each of `rows` answers. Raises EngineFailed when one is not."""
    before, seconds = rig.counts(), []
    for _ in range(parts):
        begin, n_tokens = time.perf_counter(), 0
        for _ in range(n):
            n_tokens += sum(event.kind == "token" for event in rig.step())
        seconds.append((time.perf_counter() - begin) / n)
        if n_tokens != n * rows:
            raise EngineFailed(f"{n} steps of {rows} rows gave {n_tokens} tokens")
    counts, n_steps = rig.counts().since(before), n * parts
    moved = step_bytes(rig, counts, n_steps=n_steps, rows=rows, context=context + n_steps / 2)
    return Run(tuple(seconds), n_steps, counts, moved)


def _natural(rig: Rig, report: Report, *, n: int, context: int, lengths: Lengths) -> list[dict[str, Any]]:
    """Answers that wander from topic to topic: right after their prompts, and once the cache has settled."""
    n_answer = lengths.natural() + _SPARE
    with _answers(rig, context, given=[rig.tokens(n_answer) for _ in range(n)]):
        name = f"{_rows(n)}, context {context}"
        first = run_steps(rig, lengths.first // _PARTS, rows=n, context=context, parts=_PARTS)
        found = [_put(rig, report, f"{name}, first {lengths.first}", first, rows=n, context=context)]
        n_late = 0
        while rig.swing.is_refilling and n_late < lengths.most:
            run_steps(rig, 1, rows=n, context=context, parts=1)
            n_late += 1
        if rig.swing.is_refilling:
            report.remarks.append(
                f"{name}: slots were still filling up {lengths.first + n_late} steps after the prompt"
            )
        run_steps(rig, lengths.warm, rows=n, context=context, parts=1)
        warm = run_steps(rig, lengths.steps, rows=n, context=context + lengths.first, parts=lengths.repeats)
        found.append(_put(rig, report, f"{name}, warm", warm, rows=n, context=context))
    share = found[0]["share_of_warm_rate"] = found[1]["median_s"] / found[0]["median_s"]
    report.remarks.append(f"{name}: the first {lengths.first} tokens at {100 * share:.0f} % of the warm rate")
    return found


def _held(
    rig: Rig, report: Report, *, n: int, context: int, hit_rates: Sequence[float], lengths: Lengths
) -> list[dict[str, Any]]:
    """Answers that repeat two tokens each, so that their experts stay in slots, of which a share is then emptied."""
    cache, found = rig.swing.cache, []
    n_answer = lengths.held(len(hit_rates)) + _SPARE
    pairs = [rig.tokens(2) for _ in range(n)]
    uploads, rng = cache.policy.uploads_per_layer, np.random.default_rng(0)
    with _answers(rig, context, given=[(pair * n_answer)[:n_answer] for pair in pairs]):
        for _ in range(lengths.most // lengths.settle):
            has = run_steps(rig, lengths.settle, rows=n, context=context, parts=1).counts.hit_rate
            if has >= 0.998 and not rig.swing.is_refilling:
                break
        cache.policy.uploads_per_layer = 0
        try:
            rig.swing.finish_refill()
            has = run_steps(rig, lengths.settle, rows=n, context=context, parts=1).counts.hit_rate
            for rate in sorted(hit_rates, reverse=True):
                layers, slots = np.nonzero(cache.table.expert_of != NONE)
                out = rng.random(len(layers)) >= min(1.0, rate / has) if has else np.ones(len(layers), dtype=np.bool_)
                cache.table.unpublish(layers[out], slots[out])
                has = run_steps(rig, lengths.settle, rows=n, context=context, parts=1).counts.hit_rate
                run = run_steps(rig, lengths.steps, rows=n, context=context + lengths.most, parts=lengths.repeats)
                name = f"{_rows(n)}, context {context}, {100 * rate:.0f} % held"
                found.append(_put(rig, report, name, run, rows=n, context=context) | {"wanted_hit_rate": rate})
        finally:
            cache.policy.uploads_per_layer = uploads
    return found


def _launches(rig: Rig, report: Report, *, context: int, n_warm: int) -> None:
    """Kernels of one step of one row."""
    with _answers(rig, context, given=[rig.tokens(n_warm + _SPARE)]):
        run_steps(rig, n_warm, rows=1, context=context, parts=1)
        found = launches(rig.step, rig.engine.device.torch_device)
    total, seconds = sum(launch.n for launch in found), sum(launch.seconds for launch in found)
    n_layers = rig.engine.model.facts.n_layers
    report.remarks.append(
        f"a step of one row launches {total} kernels ({total / n_layers:.1f} a layer), which run {1e3 * seconds:.3f} ms"
    )
    for launch in found[:_SHOWN]:
        note = f"{launch.n} launches a step"
        name = f"  {launch.name[:60]}"
        report.figures.append(Figure(name, "ms", (1e3 * launch.seconds,), is_time=True, note=note))
    report.facts["launches"] = [asdict(launch) for launch in found]


@contextmanager
def _answers(rig: Rig, context: int, *, given: Sequence[list[int]]) -> Iterator[None]:
    """Runs inside with all answers at their first token, after prompts of `context` tokens; they end afterwards."""
    rig.rest()
    requests = [rig.add(context, tokens) for tokens in given]
    started: set[int] = set()
    while len(started) < len(requests):
        started |= {event.request_id for event in rig.step() if event.kind == "token"}
    yield
    rig.cancel(requests)


def _put(rig: Rig, report: Report, name: str, run: Run, *, rows: int, context: int) -> dict[str, Any]:
    """One line of the table, and the same with all its parts as plain data."""
    bound = bound_s(rig, run.bytes)
    samples = tuple(1e3 * s for s in run.seconds)
    figure = Figure(name, "ms", samples, is_time=True, bound=1e3 * bound)
    rate = rows / (figure.median / 1e3)
    wrong = run.counts.guesses - run.counts.right_guesses
    note = (
        f"{rate:.1f} tokens/s, {100 * run.counts.hit_rate:.1f} % hits, link {run.bytes.link / 1e6:.1f} MB, "
        f"device {run.bytes.device / 1e6:.0f} MB"
    )
    if run.counts.guesses:
        share = 100 * run.counts.right_guesses / max(1, run.counts.misses)
        note += f", {share:.0f} % of misses guessed, {100 * wrong / run.counts.guesses:.0f} % wrong"
    report.figures.append(Figure(name, "ms", samples, is_time=True, bound=1e3 * bound, note=note))
    return {
        "name": name,
        "rows": rows,
        "context": context,
        "n_steps": run.n_steps,
        "median_s": figure.median / 1e3,
        "tokens_per_s": rate,
        "bound_s": bound,
        "hit_rate": run.counts.hit_rate,
        "misses": run.counts.misses,
        "guesses": run.counts.guesses,
        "right_guesses": run.counts.right_guesses,
        "link_bytes_per_s": run.bytes.link / (figure.median / 1e3),
        "bytes": asdict(run.bytes),
    }


def _rows(n: int) -> str:
    return f"{n} row{'s' if n > 1 else ''}"
