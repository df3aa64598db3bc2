"""`makeway plan`: what fits where, before anything is loaded, and how fast it should be.

Owns the flags of a plan. Never loads tensors or needs a GPU. Hazard: the table is the plan itself, not a summary of it.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from makeway.cli import options as o
from makeway.engine.planning import TRITON_NUMBERS, plan_for
from makeway.errors import UserError
from makeway.gguf import open_gguf
from makeway.memory.plan import render_plan
from makeway.memory.rates import RATES, read_rates


def plan_command(
    model: o.ModelArgument,
    vram: Annotated[list[str], typer.Option("--vram", help="Memory of the card, for example 24GiB.")],
    ram: Annotated[
        str | None, typer.Option("--ram", help="Memory of the host, for example 128GiB. [not checked]")
    ] = None,
    prompt: Annotated[
        list[int] | None, typer.Option("--prompt", help="Prompt lengths to predict; may be given several times.")
    ] = None,
    context: o.ContextOption = o.ENGINE["context"],
    parallel: o.ParallelOption = o.ENGINE["parallel"],
    kv_type: o.KvTypeOption = o.ENGINE["kv_type"],
    slots: o.SlotsOption = o.ENGINE["slots"],
    uploads_per_layer: o.UploadsOption = o.ENGINE["uploads_per_layer"],
    guesses: o.GuessesOption = o.ENGINE["guesses"],
    chunk: o.ChunkOption = o.ENGINE["chunk"],
    sweep_tokens: o.SweepTokensOption = o.ENGINE["sweep_tokens"],
    handover: o.HandoverOption = o.ENGINE["handover"],
    drafter: o.DrafterOption = o.ENGINE["drafter"],
    draft_depth: o.DraftDepthOption = o.ENGINE["draft_depth"],
    prefix_ram: o.PrefixRamOption = o.ENGINE["prefix_ram"],
    machine: Annotated[str, typer.Option("--machine", help=f"Rates to predict with: {', '.join(RATES)}.")] = "rtx3090",
    rates: Annotated[
        Path | None, typer.Option("--rates", help="Measured rates instead: a result of `makeway bench link`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what fits where, per phase, and predict times; refuse what does not fit.

    The same flags as of `run` and `serve`, and the plan that these would execute on a GPU with so much memory.
    """
    if len(vram) > 1:
        raise UserError("--vram was given twice: two cards are not supported yet; plan for one")
    if machine not in RATES:
        raise UserError(f"--machine {machine} is not known; choose from {', '.join(RATES)}")
    config = o.engine_config(
        vram=vram[0],
        ram=ram,
        prefix_ram=prefix_ram,
        context=context,
        parallel=parallel,
        kv_type=kv_type,
        slots=slots,
        uploads_per_layer=uploads_per_layer,
        guesses=guesses,
        chunk=chunk,
        sweep_tokens=sweep_tokens,
        handover=handover,
        drafter=drafter,
        draft_depth=draft_depth,
    )
    with open_gguf(model) as file:
        plan = plan_for(
            file,
            config,
            TRITON_NUMBERS,
            vram_bytes=config.vram,
            ram_bytes=config.ram,
            rates=RATES[machine] if rates is None else read_rates(rates),
        )
    lengths = sorted(set(prompt or ()))
    bad = next((n for n in lengths if not 1 <= n <= plan.request.context), None)
    if bad is not None:
        raise UserError(f"--prompt {bad}: use 1 to {plan.request.context}, the planned context")
    if as_json:
        print(json.dumps(plan.to_json(), ensure_ascii=False))
    else:
        print(render_plan(plan, prompts=lengths), end="")
