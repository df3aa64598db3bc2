"""Plans as text and as plain data: the table for people, the dict for programs, the table of a refusal.

Owns wording and number formats; computes no size of its own, so every number printed is one executed.
Hazard: GiB appear only here; everything else counts bytes.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from makeway.memory.sizes import Sizes

if TYPE_CHECKING:
    from makeway.memory.plan import MemoryPlan


def size(n_bytes: int) -> str:
    """Bytes for people: "3.06 MiB", "24.00 GiB"; small numbers exactly."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(n_bytes) >= scale:
            return f"{n_bytes / scale:.2f} {unit}"
    return f"{n_bytes} B"


def grid(rows: Sequence[Sequence[str]]) -> str:
    """Columns of text: the first left-aligned, the others right-aligned."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _refuse(title: str, parts: Sequence[tuple[str, int, str]], *, budget: int, advice: Sequence[str]) -> str:
    rows = [("part", "size", "sum", "too big by", "flag")]
    total = 0
    for name, n_bytes, flag in parts:
        before = max(total, budget)
        total += n_bytes
        over = max(0, total - before)
        rows.append((name, size(n_bytes), size(total), size(over) if over else "-", flag))
    text = f"{title}\n\n{grid(rows)}\n"
    return text + "".join(f"\nEither {advice[0]}" if i == 0 else f"\nor     {way}" for i, way in enumerate(advice))


def refuse_vram(sizes: Sizes, reserve_bytes: int, *, smaller: Sequence[str]) -> str:
    """Message of OutOfPlan for VRAM: parts in the order they are reserved, what overflows, which flag helps."""
    budget = sizes.request.vram_bytes
    parts = [("left to libraries and driver", reserve_bytes, "--vram")]
    parts += [*sizes.fixed_parts, *sizes.least_swing_parts]
    need = sum(n_bytes for _, n_bytes, _ in parts)
    title = (
        f"{sizes.facts.name} does not fit: it needs {size(need)} ({need} B) of VRAM, "
        f"--vram gives {size(budget)} ({budget} B), {size(need - budget)} ({need - budget} B) too little"
    )
    return _refuse(title, parts, budget=budget, advice=smaller)


def refuse_ram(sizes: Sizes, ram_bytes: int) -> str:
    """Message of OutOfPlan for host RAM."""
    parts = sizes.host_parts
    need = sum(n_bytes for _, n_bytes, _ in parts)
    title = (
        f"{sizes.facts.name} does not fit: it needs {size(need)} ({need} B) of RAM, "
        f"--ram gives {size(ram_bytes)} ({ram_bytes} B), {size(need - ram_bytes)} too little"
    )
    advice = (f"--ram {need} (bytes)", "a file with smaller quantisation types")
    return _refuse(title, parts, budget=ram_bytes, advice=advice)


def plan_rows(plan: "MemoryPlan") -> list[tuple[str, str, str]]:
    """(where, part, size) rows of everything planned; the VRAM rows sum to the budget."""
    rows = [("vram", "left to libraries and driver", size(plan.reserve_bytes))]
    rows += [("vram", region.name, size(region.n_bytes)) for region in plan.regions]
    decode = plan.decode
    slots = f"slots: {plan.n_slots} a layer + {plan.n_spares} spares, {len(plan.layers)} layers"
    rows.append(("vram", slots, size(decode.slots.n_bytes)))
    rows += [("vram", region.name, size(region.n_bytes)) for region in decode.regions[1:]]
    rows.append(("vram", "total", size(plan.request.vram_bytes)))
    rows += [("ram", name, size(n_bytes)) for name, n_bytes in plan.host]
    if plan.ple_bytes:
        where = "ram" if plan.ple_in_ram else "disk"
        rows.append((where, "n-gram table" + ("" if plan.ple_in_ram else " (mapped)"), size(plan.ple_bytes)))
    rows.append(("ram", "total", size(plan.host_bytes)))
    return rows


PROMPTS = (256, 2048, 8192, 32768, 131072)


def prompt_rows(plan: "MemoryPlan", prompts: Sequence[int] = ()) -> list[tuple[str, ...]]:
    """One row per prompt length: what it lends, its sweeps, bytes over the link, predicted time."""
    lengths = prompts or sorted({n for n in PROMPTS if n < plan.request.context} | {plan.request.context})
    rows: list[tuple[str, ...]] = [
        ("prompt", "slots lent", "of region", "sweeps", "copies", "over the link", "first token", "tokens/s")
    ]
    for n_tokens in lengths:
        ttft = plan.predict_ttft(n_tokens)
        lending = ttft.lending
        share = lending.n_lent * plan.decode.rank_bytes / plan.swing.n_bytes
        rows.append(
            (
                str(n_tokens),
                f"{lending.n_lent} of {plan.decode.n_ranks}",
                f"{100 * share:.0f} %",
                f"{lending.n_sweeps} x {lending.sweep_tokens}",
                "all" if lending.copies_all else "routed",
                size(lending.copied_bytes),
                f"{ttft.total_s:.2f} s",
                f"{ttft.tokens_per_s:.0f}",
            )
        )
    return rows


def decode_rows(plan: "MemoryPlan") -> list[tuple[str, ...]]:
    """Predicted decode at some hit rates, for one row and for a full step."""
    rows: list[tuple[str, ...]] = [("rows", "hits", "link", "device", "step", "steps/s")]
    for n_rows in sorted({1, plan.rows}):
        for hit_rate in (0.5, 0.7, 0.8, 0.9, 1.0):
            step = plan.predict_decode(hit_rate, n_rows)
            ms = [f"{1000 * t:.2f} ms" for t in (step.link_s, max(step.hbm_s, step.flops_s), step.step_s)]
            rows.append((str(n_rows), f"{100 * hit_rate:.0f} %", *ms, f"{step.steps_per_s:.0f}"))
    return rows


def render(plan: "MemoryPlan", *, prompts: Sequence[int] = ()) -> str:
    """The whole plan as plain text."""
    head = (
        f"{plan.facts.name}: context {plan.request.context}, {plan.request.sequences} sequences, "
        f"{plan.request.drafts} drafts, KV {plan.request.kv_type}"
    )
    lends = "no prompt lends slots"
    if plan.lend_from_tokens is not None:
        lends = f"prompts of {plan.lend_from_tokens} tokens or more lend slots"
    sweeps = (
        f"{lends}\nsweeps of at most {plan.max_sweep_tokens} tokens, chunks of {plan.shape.chunk}, "
        f"pieces of {plan.shape.piece_experts} experts\nall experts are copied from {plan.copy_all_tokens} tokens"
    )
    parts = grid([("where", "part", "size"), *plan_rows(plan)])
    return "\n\n".join((head, parts, sweeps, grid(prompt_rows(plan, prompts)), grid(decode_rows(plan)))) + "\n"


def plan_json(plan: "MemoryPlan") -> dict[str, object]:
    """The plan as plain dicts, lists, ints, bools and strings."""
    request, decode = plan.request, plan.decode
    return {
        "model": plan.facts.name,
        "request": asdict(request),
        "rates": asdict(plan.rates),
        "vram": {
            "total_bytes": request.vram_bytes,
            "reserve_bytes": plan.reserve_bytes,
            "arena_bytes": plan.arena_bytes,
            "regions": [asdict(region) for region in plan.regions],
            "swing": asdict(plan.swing),
        },
        "decode": {
            "regions": [asdict(region) for region in decode.regions],
            "n_slots": plan.n_slots,
            "n_spares": plan.n_spares,
            "n_ranks": decode.n_ranks,
            "rank_bytes": decode.rank_bytes,
            "layer_offsets": list(decode.layer_offsets),
            "rows": plan.rows,
        },
        "prefill": {
            "max_sweep_tokens": plan.max_sweep_tokens,
            "short_sweep_tokens": plan.short_sweep_tokens,
            "lend_from_tokens": plan.lend_from_tokens,
            "copy_all_tokens": plan.copy_all_tokens,
            "shape": asdict(plan.shape),
        },
        "host": {
            "parts": [{"name": name, "n_bytes": n_bytes} for name, n_bytes in plan.host],
            "ple_bytes": plan.ple_bytes,
            "ple_in_ram": plan.ple_in_ram,
            "total_bytes": plan.host_bytes,
        },
    }
