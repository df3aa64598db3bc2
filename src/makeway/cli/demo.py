"""`makeway demo`: the small model that comes with the package, on a card it does not fit, and what the hand-over saves.

Owns the story and its table. Never needs a network or a GPU, and never prints a number that was not measured in this
run. Hazard: the model is tiny; its text shows that things work, not that it knows anything.
"""

import json
import sys
from contextlib import closing
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from makeway.cli import options as o
from makeway.cli.loading import chosen
from makeway.config import EngineConfig, SamplingParams
from makeway.engine import Engine
from makeway.errors import EngineFailed

VRAM = "22MiB"  # a quarter of the model's experts fit beside everything else
CONTEXT = 1024
SHORT_SWEEP = 256
FOLLOW_UP = "\n\nThe default value is"


@dataclass(frozen=True)
class Arm:
    """One way of running the same requests, and what it did."""

    name: str
    tokens: list[int]
    status: dict[str, Any]


def demo_command(
    vram: Annotated[str, typer.Option("--vram", help="Memory of the card that is pretended.")] = VRAM,
    max_tokens: o.MaxTokensOption = 48,
    seed: o.SeedOption = 1,
    as_json: Annotated[bool, typer.Option("--json", help="Only the numbers, as one JSON document.")] = False,
) -> None:
    """Run the shipped model on a pretended small card and show what crossed the link, with and without hand-over."""
    console = Console(quiet=as_json, highlight=False, soft_wrap=True)
    data = resources.files("makeway") / "data"
    prompt = (data / "demo_prompt.txt").read_text(encoding="utf-8").rstrip("\n")
    sampling = SamplingParams(max_tokens=max_tokens, temperature=0.5, top_p=0.9, seed=seed)
    with resources.as_file(data / "demo.gguf") as path:
        on = o.engine_config(vram=vram, ram=None, device="cpu", context=CONTEXT, parallel=1)
        off = o.engine_config(
            vram=vram, ram=None, device="cpu", context=CONTEXT, parallel=1, handover="never", sweep_tokens=SHORT_SWEEP
        )
        first = _run("hand-over", path, on, prompt=prompt, sampling=sampling, console=console, shows=True)
        second = _run("no hand-over", path, off, prompt=prompt, sampling=sampling, console=console, shows=False)
    if first.tokens != second.tokens:
        raise EngineFailed("the two ways gave different tokens; this must never happen, please report it")
    arms = (first, second)
    if as_json:
        print(json.dumps({"vram": vram, "arms": {arm.name: arm.status for arm in arms}}, ensure_ascii=False))
    else:
        console.print(_table(arms))
        console.print(_story(arms))


def _run(
    name: str,
    path: Path,
    config: EngineConfig,
    *,
    prompt: str,
    sampling: SamplingParams,
    console: Console,
    shows: bool,
) -> Arm:
    """A long prompt with its answer, then a short follow-up, on one engine."""
    with Engine.load(path, config) as engine:
        if shows:
            _introduce(engine, console)
        tokens = engine.encode(prompt)
        answer = _answer(engine, tokens, sampling, console=console, shows=shows)
        follow_up = tokens + answer + engine.encode(FOLLOW_UP)
        if shows:
            console.print(f"[dim]{FOLLOW_UP.strip()}[/dim]", end="")
        answer += _answer(engine, follow_up, sampling, console=console, shows=shows)
        while engine.busy:
            engine.step()
        return Arm(name, answer, engine.status())


def _introduce(engine: Engine, console: Console) -> None:
    experts = engine.model.store.nbytes
    slots = engine.plan.n_slots * len(engine.plan.layers)
    console.print(
        f"[bold]{engine.model.facts.name}[/bold]: {len(engine.plan.layers)} layers of {engine.plan.sizes.n_experts} "
        f"experts, {experts / 2**20:.1f} MiB of them in host memory; the card has {slots} slots for "
        f"{len(engine.plan.layers) * engine.plan.sizes.n_experts} experts.\n[dim]{chosen(engine)}[/dim]\n"
    )
    for region in (*engine.plan.regions, *engine.plan.decode.regions):
        console.print(f"[dim]  {region.n_bytes / 2**20:7.2f} MiB  {region.name}[/dim]")
    console.print()


def _answer(engine: Engine, tokens: list[int], sampling: SamplingParams, *, console: Console, shows: bool) -> list[int]:
    answer: list[int] = []
    with closing(engine.generate(tokens, sampling)) as events:  # type: ignore[type-var]
        for event in events:
            if event.token is not None:
                answer.append(event.token)
            if shows and not console.quiet:
                sys.stdout.write(event.text)
                sys.stdout.flush()
    if shows:
        console.print()
    return answer


def _table(arms: tuple[Arm, Arm]) -> Table:
    table = Table(title="the same requests, the same tokens; what it took", title_justify="left")
    table.add_column("")
    for arm in arms:
        table.add_column(arm.name, justify="right")

    def row(name: str, value: Any) -> None:
        table.add_row(name, *(value(arm.status) for arm in arms))

    row("longest sweep", lambda s: f"{s['plan']['max_sweep_tokens']} tokens")
    row("expert slots a layer", lambda s: str(s["plan"]["slots"]))
    row("over the link, reading prompts", lambda s: _mib(s["phases"]["prefill"]["link_bytes"]))
    row("over the link, restoring", lambda s: _mib(s["phases"]["restoring"]["link_bytes"]))
    row("over the link, decoding", lambda s: _mib(s["phases"]["decode"]["link_bytes"]))
    row("hit rate", lambda s: f"{s['experts']['hit_rate']:.0%}")
    row("bytes served per byte kept", lambda s: f"{s['experts']['yield']:.1f}")
    row("drafts accepted", lambda s: f"{s['drafts']['n_accepted']} of {s['drafts']['n_drafted']}")
    row("tokens a step", lambda s: f"{s['drafts']['tokens_per_step']:.2f}")
    row("prompt tokens read", lambda s: str(s["n_prompt_tokens"]))
    row("answer tokens", lambda s: str(s["n_answer_tokens"]))
    row("seconds reading", lambda s: f"{s['phases']['prefill']['seconds']:.2f}")
    row("seconds decoding", lambda s: f"{s['phases']['decode']['seconds']:.2f}")
    return table


def _story(arms: tuple[Arm, Arm]) -> str:
    on, off = (arm.status["phases"]["prefill"]["link_bytes"] for arm in arms)
    return (
        f"Reading the prompts moved {_mib(on)} with the hand-over and {_mib(off)} without: {off / on:.1f} times as "
        "much, because every shorter sweep needs the experts again. The tokens are the same, bit for bit."
    )


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / 2**20:.1f} MiB"
