"""A picture of one prompt: what crossed the link and what was computed, on one time axis.

Owns the drawing (PNG, needs matplotlib) and nothing that is drawn. Never measures anything itself.
Hazard: a span is drawn from its beginning to its end, so a unit that waits inside looks busy; expert pieces do not,
for they begin when their bytes are there.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from makeway.bench.activity import COPY, Span
from makeway.bench.prefill import read
from makeway.bench.report import Figure, Report
from makeway.bench.rig import Rig, Setup, opened
from makeway.errors import UserError

_COLOURS = {
    COPY: "#4878a8",
    "experts": "#c44e52",
    "experts: sort": "#e8a3a5",
    "mixer: GDN": "#55a868",
    "mixer: attention": "#8172b3",
    "combine": "#bbbbbb",
}
_BINS = 400


def bench_picture(report: Report, setup: Setup, path: Path, *, n_tokens: int = 8192) -> None:
    """Draws a prompt of `n_tokens` on a full cache into `path`. Raises UserError without matplotlib, or when the file
    cannot be written, and whatever the engine raises."""
    _matplotlib()
    if n_tokens < 1:
        raise UserError("--prompt: use 1 or more tokens")
    with opened(setup, report) as rig:
        read(rig, rig.tokens(n_tokens))
        with rig.recorder.on(rig.engine.device.torch_device):
            prompt = read(rig, rig.tokens(n_tokens))
        spans = rig.recorder.spans()
        draw(spans, path, title=_title(rig, n_tokens), first_token_s=prompt.ttft_s)
        report.figures.append(
            Figure(f"{n_tokens} tokens, full cache, recorder on", "s", (prompt.ttft_s,), is_time=True)
        )
        report.facts["busy"] = {
            "link": union_s([s for s in spans if s.what == COPY], until=prompt.ttft_s) / prompt.ttft_s,
            "compute": union_s([s for s in spans if s.what != COPY], until=prompt.ttft_s) / prompt.ttft_s,
        }
        busy = report.facts["busy"]
        report.remarks.append(
            f"until the first token the link was busy {100 * busy['link']:.0f} % of the time, the device "
            f"{100 * busy['compute']:.0f} %; drawn in {path}"
        )


def union_s(spans: Sequence[Span], *, until: float) -> float:
    """Seconds before `until` in which at least one of the spans ran."""
    total = end = 0.0
    for span in sorted(spans, key=lambda s: s.begin_s):
        begin = max(span.begin_s, end)
        if min(span.end_s, until) > begin:
            total += min(span.end_s, until) - begin
            end = min(span.end_s, until)
    return total


def link_rate(spans: Sequence[Span], *, until: float, n_bins: int = _BINS) -> "np.ndarray[Any, np.dtype[np.float64]]":
    """Bytes per second over the link in each of `n_bins` equal parts of the time up to `until`."""
    rate = np.zeros(n_bins)
    edges = np.linspace(0, until, n_bins + 1)
    for span in spans:
        if span.n_bytes and span.seconds > 0:
            overlap = np.minimum(edges[1:], span.end_s) - np.maximum(edges[:-1], span.begin_s)
            rate += np.maximum(overlap, 0) * span.n_bytes / span.seconds
    return rate / (until / n_bins)


def draw(spans: Sequence[Span], path: Path, *, title: str, first_token_s: float) -> None:
    """Three bands over time: rate of the link, copies, computation. Raises UserError as `bench_picture`."""
    figure_class, canvas_class = _matplotlib()
    end = max((span.end_s for span in spans), default=first_token_s)
    figure = figure_class(figsize=(12, 4), layout="constrained")
    canvas_class(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    rate = link_rate(spans, until=end)
    top.fill_between(np.linspace(0, end, len(rate)), rate / 1e9, step="mid", color=_COLOURS[COPY])
    top.set_ylabel("link, GB/s")
    top.set_title(title, fontsize=10)
    names = sorted({span.what for span in spans} - {COPY})
    for what in (COPY, *names):
        bars = [(s.begin_s, s.seconds) for s in spans if s.what == what]
        place = (1.1, 0.8) if what == COPY else (0.1, 0.8)
        bottom.broken_barh(bars, place, color=_COLOURS.get(what, "#777777"), label=what, linewidth=0)
    bottom.set_yticks([0.5, 1.5], ["compute", "copies"])
    bottom.set_xlabel("seconds")
    for axes in (top, bottom):
        axes.axvline(first_token_s, color="black", linewidth=0.8, linestyle=":")
        axes.set_xlim(0, end)
    side = "left" if first_token_s < 0.8 * end else "right"
    top.text(first_token_s, top.get_ylim()[1] * 0.97, " first token ", fontsize=8, va="top", ha=side)
    bottom.legend(loc="upper center", bbox_to_anchor=(0.5, -0.45), ncols=len(names) + 1, fontsize=8, frameon=False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except (OSError, ValueError) as fault:
        raise UserError(f"{path}: cannot be written: {fault}; give the name of a .png file") from fault


def _title(rig: Rig, n_tokens: int) -> str:
    plan, facts = rig.plan, rig.engine.model.facts
    return (
        f"{n_tokens} tokens, {rig.setup.shape}, {facts.n_layers} layers, {plan.n_slots} of {facts.n_experts} experts "
        f"a layer in slots, {rig.engine.device.name}"
    )


def _matplotlib() -> tuple[Any, Any]:
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Drawing
    except ImportError as fault:
        raise UserError("a picture needs matplotlib: pip install matplotlib") from fault
    return Drawing, FigureCanvasAgg
