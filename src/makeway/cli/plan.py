"""`makeway plan`: what fits where, before anything is loaded, and how fast it should be.

Owns the flags of a plan. Never loads tensors or needs a GPU. Hazard: the table is the plan itself, not a summary of it.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer

from makeway.cli import options as o
from makeway.config import parse_bytes
from makeway.engine.depth import Drafting
from makeway.errors import UserError
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE
from makeway.memory.plan import plan_memory, render_plan
from makeway.memory.rates import RATES, read_rates
from makeway.memory.sizes import PlanRequest
from makeway.models import load_model
from makeway.models.plan_facts import plan_facts


def plan_command(
    model: o.ModelArgument,
    vram: Annotated[list[str], typer.Option("--vram", help="Memory of the card, for example 24GiB.")],
    ram: Annotated[
        str | None, typer.Option("--ram", help="Memory of the host, for example 128GiB. [not checked]")
    ] = None,
    context: o.ContextOption = o.ENGINE["context"],
    prompt: Annotated[
        list[int] | None, typer.Option("--prompt", help="Prompt lengths to predict; may be given several times.")
    ] = None,
    parallel: Annotated[int, typer.Option("--parallel", help="Sequences at once.")] = 1,
    drafter: o.DrafterOption = o.ENGINE["drafter"],
    draft_depth: o.DraftDepthOption = o.ENGINE["draft_depth"],
    kv_type: Annotated[str, typer.Option("--kv-type", help="Type of the KV cache: f16 or f32.")] = "f16",
    chunk: Annotated[int | None, typer.Option("--chunk", help="Prompt tokens through a layer at once. [auto]")] = None,
    slots: Annotated[int | None, typer.Option("--slots", help="Expert slots a layer. [auto]")] = None,
    sweep_tokens: Annotated[int | None, typer.Option("--sweep-tokens", help="Longest sweep. [auto]")] = None,
    handover: Annotated[str, typer.Option("--handover", help="auto, never or always (lends everything).")] = "auto",
    uploads: Annotated[int, typer.Option("--uploads-per-layer", help="Kept misses a layer and step.")] = 2,
    machine: Annotated[str, typer.Option("--machine", help=f"Rates to predict with: {', '.join(RATES)}.")] = "rtx3090",
    rates: Annotated[
        Path | None, typer.Option("--rates", help="Measured rates instead: a result of `makeway bench link`.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document.")] = False,
) -> None:
    """Show what fits where, per phase, and predict times; refuse what does not fit."""
    if len(vram) > 1:
        raise UserError("--vram was given twice: two cards are not supported yet; plan for one")
    if machine not in RATES:
        raise UserError(f"--machine {machine} is not known; choose from {', '.join(RATES)}")
    with open_gguf(model) as file:
        # A model opens as views; only its small vectors are read.
        facts = load_model(file, REFERENCE, device=torch.device("cpu")).facts
        planned = plan_facts(file, facts)
    wanted = o.engine_config(vram=None, ram=None, drafter=drafter, draft_depth=draft_depth)
    drafting = Drafting.of(wanted, has_mtp=planned.has_mtp)
    lengths = sorted(set(prompt or ()))
    request = PlanRequest(
        vram_bytes=parse_bytes(vram[0], "--vram"),
        context=facts.context_length if context is None else context,
        ram_bytes=None if ram is None else parse_bytes(ram, "--ram"),
        sequences=parallel,
        drafts=drafting.depth,
        mtp="mtp" in drafting.sources,
        kv_type=kv_type,
        chunk=chunk,
        slots=slots,
        sweep_tokens=sweep_tokens,
        handover=handover,  # type: ignore[arg-type]
        uploads_per_layer=uploads,
    )
    plan = plan_memory(planned, request, rates=RATES[machine] if rates is None else read_rates(rates))
    bad = next((n for n in lengths if not 1 <= n <= request.context), None)
    if bad is not None:
        raise UserError(f"--prompt {bad}: use 1 to {request.context}, the planned context")
    if as_json:
        print(json.dumps(plan.to_json(), ensure_ascii=False))
    else:
        print(render_plan(plan, prompts=lengths), end="")
