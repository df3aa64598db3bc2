"""`makeway bench handover`: what a prompt costs an answer that is under way, and how fast the cache comes back.

Owns one conversation that is interrupted again and again. Never changes how the engine hands over.
Hazard: the pause of the answer holds the reading of the prompt too; the fixed cost is what is left without it.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from makeway.bench.activity import COPY, Span
from makeway.bench.decode import Run, bound_s, run_steps
from makeway.bench.report import Figure, Report
from makeway.bench.rig import Rig, Setup, opened
from makeway.engine.handover import HandoverRecord
from makeway.errors import UserError
from makeway.kv import BLOCK_TOKENS

MOST_REFILL_STEPS = 400
_FIRST_PROMPT = 64


@dataclass(frozen=True)
class Interruption:
    """A prompt in the middle of an answer. before, after, later: steps of the answer before the prompt, right behind
    it, and (after `n_late` more) once the cache was back; pause_s: from asking to the answer's next token."""

    before: Run
    after: Run
    later: Run
    n_late: int
    pause_s: float
    handover: HandoverRecord

    @property
    def n_steps(self) -> int:
        """Of the answer, with the one that ends the pause."""
        return self.before.n_steps + 1 + self.after.n_steps + self.n_late + self.later.n_steps


@dataclass(frozen=True)
class Fetch:
    """A step of an answer, seconds since the recorder went on: what it fetched over the link, wrong guesses too."""

    begin_s: float
    end_s: float
    n_bytes: int


def needed_context(n_tokens: int, *, n_handovers: int, steps: int, first: int) -> int:
    """Tokens of KV that `bench_handover` needs."""
    return n_tokens + _FIRST_PROMPT + _answer_tokens(n_handovers, steps=steps, first=first) + 2 * BLOCK_TOKENS


def bench_handover(
    report: Report, setup: Setup, *, n_tokens: int = 8192, n_handovers: int = 5, steps: int = 64, first: int = 200
) -> None:
    """Measures into `report`: `n_handovers` prompts of `n_tokens` in the middle of one answer.

    steps: of the answer between two prompts that are measured as warm; first: right behind a prompt. Raises UserError
    for values that mean nothing, and whatever the engine raises.
    """
    if min(n_tokens, n_handovers, steps, first) < 1:
        raise UserError("--prompt, --handovers, --steps: use 1 or more")
    with opened(setup, report) as rig:
        if rig.plan.request.sequences < 2:
            raise UserError("--parallel 1: an answer and a prompt are two sequences; use 2 or more")
        answer = rig.add(_FIRST_PROMPT, rig.tokens(_answer_tokens(n_handovers, steps=steps, first=first)))
        while not any(event.kind == "token" for event in rig.step()):
            pass
        found, context = [], _FIRST_PROMPT
        for _ in range(n_handovers + 1):
            found.append(_interrupt(rig, n_tokens, context=context, steps=steps, first=first))
            context += found[-1].n_steps
        with rig.recorder.on(rig.engine.device.torch_device):
            fetches = _watch(rig, n_tokens)
        spans = rig.recorder.spans()
        rig.cancel([answer])
        found = found[1:]  # in the first one kernels are compiled
        _put(rig, report, found)
        _put_link(rig, report, spans, fetches)
        report.facts["handovers"] = [{"pause_s": i.pause_s, **asdict(i.handover)} for i in found]


def _answer_tokens(n_handovers: int, *, steps: int, first: int) -> int:
    """Of `n_handovers`, one to compile kernels and one with the recorder on."""
    return (n_handovers + 2) * (2 * steps + first + MOST_REFILL_STEPS + 2) + 1


def _interrupt(rig: Rig, n_tokens: int, *, context: int, steps: int, first: int) -> Interruption:
    """One prompt; the answer, `context` tokens long, is decoding before it and behind it."""
    before = run_steps(rig, steps, rows=1, context=context, parts=1)
    begin = time.perf_counter()
    prompt = rig.ask(rig.tokens(n_tokens))
    told: set[int] = set()
    while prompt not in told or not told - {prompt}:
        told |= {event.request_id for event in rig.step() if event.kind == "token"}
    pause_s = time.perf_counter() - begin
    after = run_steps(rig, first, rows=1, context=context, parts=1)
    n_late = 0
    while rig.swing.is_refilling:
        run_steps(rig, 1, rows=1, context=context, parts=1)
        n_late += 1
        if n_late == MOST_REFILL_STEPS:
            raise UserError(f"the cache is not back {first + n_late} steps after a prompt; use more first steps")
    later = run_steps(rig, steps, rows=1, context=context, parts=1)
    assert rig.swing.last is not None
    return Interruption(before, after, later, n_late, pause_s, rig.swing.last)


def _watch(rig: Rig, n_tokens: int) -> list[Fetch]:
    """One prompt with the recorder on, which has just gone on: the steps of the answer behind it, until the cache is
    back. A step's misses are counted when its report is read, while the next step runs."""
    origin, n_before = time.perf_counter(), rig.swing.n_handovers
    rig.ask(rig.tokens(n_tokens))
    while rig.swing.n_handovers == n_before:
        rig.step()
    marks = [(time.perf_counter() - origin, _fetched_bytes(rig))]
    n_behind = 0
    while n_behind < 2:
        rig.step()
        marks.append((time.perf_counter() - origin, _fetched_bytes(rig)))
        n_behind += not rig.swing.is_refilling
        if len(marks) > MOST_REFILL_STEPS:
            raise UserError(f"the cache is not back {MOST_REFILL_STEPS} steps after a prompt")
    rows = zip(marks, marks[1:], marks[2:], strict=False)
    return [Fetch(begin, end, later - before) for (begin, _), (end, before), (_, later) in rows]


def _fetched_bytes(rig: Rig) -> int:
    counts = rig.counts()
    return round((counts.misses + counts.guesses - counts.right_guesses) * counts.expert_bytes)


def crossed(copies: Sequence[Span], fetches: Sequence[Fetch]) -> tuple[int, int, float]:
    """From the first copy's beginning to the last one's end: bytes of the copies, those that steps fetched meanwhile,
    and seconds. A step's fetches are taken to be spread evenly over it."""
    begin, end = min(copy.begin_s for copy in copies), max(copy.end_s for copy in copies)
    fetched = 0.0
    for fetch in fetches:
        inside = min(fetch.end_s, end) - max(fetch.begin_s, begin)
        fetched += fetch.n_bytes * max(0.0, inside) / (fetch.end_s - fetch.begin_s)
    return sum(copy.n_bytes for copy in copies), round(fetched), end - begin


def _put_link(rig: Rig, report: Report, spans: Sequence[Span], fetches: Sequence[Fetch]) -> None:
    """The rate of the link from the restore's first copy to its last: what the steps between two looks hide from
    `refill beside decode`. On a GPU misses of steps are not among these copies, but share the link."""
    swept = max((span.end_s for span in spans if span.what == "experts"), default=0.0)
    copies = [span for span in spans if span.what == COPY and span.begin_s >= swept]
    if not copies:
        return
    on_gpu = rig.engine.device.torch_device.type == "cuda"
    n_bytes, fetched, seconds = crossed(copies, fetches if on_gpu else [])
    bound = rig.rates.link_bytes_per_s / 1e9
    note = f"{n_bytes / 1e9:.4g} GB, from the first copy to the last, recorder on"
    report.figures.append(Figure("  its copies", "GB/s", (n_bytes / 1e9 / seconds,), bound=bound, note=note))
    note = f"with {fetched / 1e9:.4g} GB that steps fetched"
    rate = (n_bytes + fetched) / 1e9 / seconds
    report.figures.append(Figure("  the link meanwhile", "GB/s", (rate,), bound=bound, note=note))


def _put(rig: Rig, report: Report, found: Sequence[Interruption]) -> None:
    rate = rig.rates.link_bytes_per_s
    records = [i.handover for i in found]
    last = records[-1]

    def seconds(name: str, samples: Sequence[float], *, bound: float | None = None, note: str = "") -> None:
        figure = Figure(name, "ms", tuple(1e3 * s for s in samples), is_time=True, note=note)
        report.figures.append(
            figure if bound is None else Figure(name, "ms", figure.samples, is_time=True, bound=1e3 * bound, note=note)
        )

    n = last.n_tokens
    copied = f"{last.copied_bytes / 1e9:.4g} GB copied, {last.n_lent} ranks lent"
    seconds(f"pause of an answer, prompt of {n} tokens", [i.pause_s for i in found], note=copied)
    seconds("  release", [r.release_s for r in records])
    seconds("  sweep", [r.sweep_s for r in records], bound=last.copied_bytes / rate or None)
    seconds("  restore until the first batch", [r.restore_s for r in records])
    seconds("  fixed cost: pause without the sweep", [i.pause_s - i.handover.sweep_s for i in found])
    moved = [r for r in records if r.restored_bytes]
    if moved:
        gb = moved[-1].restored_bytes / 1e9
        samples = tuple(r.restored_bytes / 1e9 / r.refill_s for r in moved)
        report.figures.append(
            Figure("refill beside decode", "GB/s", samples, bound=rate / 1e9, note=f"{gb:.4g} GB a hand-over")
        )
    else:
        report.remarks.append("nothing was lent, so nothing had to come back")
    for name, runs in (
        ("step before the prompt", [i.before for i in found]),
        (f"step, first {found[0].after.n_steps} behind it", [i.after for i in found]),
        ("step once the cache is back", [i.later for i in found]),
    ):
        hits = sum(r.counts.hits for r in runs) / max(1, sum(r.counts.hits + r.counts.misses for r in runs))
        bounds = [bound_s(rig, r.bytes) for r in runs]
        note = f"{100 * hits:.1f} % hits"
        seconds(name, [r.seconds[0] for r in runs], bound=sum(bounds) / len(bounds), note=note)
    warm = report.figures[-3].median
    for figure, key in ((report.figures[-2], "first_share_of_warm_rate"), (report.figures[-1], "later_share_of_warm")):
        report.facts[key] = warm / figure.median
