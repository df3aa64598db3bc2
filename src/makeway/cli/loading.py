"""Opening an engine for people: bars while experts load and kernels compile, then one line with what the plan chose.

Owns those bars and that line. Never chooses anything. Hazard: everything goes to stderr; stdout is for answers.
"""

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from makeway.config import EngineConfig
from makeway.engine import Engine


def load_engine(
    model: Path, config: EngineConfig, *, console: Console, tell: Callable[[int, int], None] | None = None
) -> Engine:
    """The engine, loaded with progress on `console`; `tell(bytes done, bytes in all)` hears of it too.

    Raises UserError, OutOfPlan, and what `tell` raises.
    """
    bar = Progress(
        TextColumn("loading experts"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    compiling = Progress(
        TextColumn("compiling kernels (minutes the first time)"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    task, passes = bar.add_task("experts", total=None), compiling.add_task("passes", total=None)

    def progress(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)
        if tell is not None:
            tell(done, total)

    def warming(done: int, total: int) -> None:
        if done == 0:
            bar.stop()
            compiling.start()
        compiling.update(passes, completed=done, total=total)

    bar.start()
    try:
        engine = Engine.load(model, config, progress=progress, warming=warming)
    finally:
        bar.stop()
        compiling.stop()
    console.print(chosen(engine), highlight=False, style="dim", soft_wrap=True)
    return engine


def chosen(engine: Engine) -> str:
    """What the plan chose, in one line."""
    plan, config = engine.plan, engine.config
    gib = 1 << 30

    def auto(value: object) -> str:
        return " (auto)" if value is None else ""

    lends = "never" if plan.lend_from_tokens is None else f"from {plan.lend_from_tokens} tokens"
    return (
        f"{engine.device.name}, {plan.request.vram_bytes / gib:.2f} GiB{auto(config.vram)}, "
        f"context {plan.request.context}{auto(config.context)}, KV {plan.request.kv_type}{auto(config.kv_type)}, "
        f"{plan.n_slots} of {plan.sizes.n_experts} expert slots a layer{auto(config.slots)}, policy {config.policy}, "
        f"sweeps of up to {plan.max_sweep_tokens} tokens{auto(config.sweep_tokens)} in chunks of "
        f"{plan.shape.chunk}{auto(config.chunk)}, hand-over {plan.request.handover} ({lends}), "
        f"{plan.request.uploads_per_layer} uploads and {plan.request.guesses} guesses a layer and step"
    )
