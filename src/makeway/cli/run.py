"""`makeway run`: one prompt, its answer on stdout, progress and a speed summary on stderr.

Owns the streaming output. Never computes. Hazard: stdout carries the answer alone (or one JSON document).
"""

import json
import sys
from contextlib import closing
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from makeway.cli import options as o
from makeway.cli.loading import load_engine
from makeway.config import SamplingParams
from makeway.engine import DraftCounts, Engine, Event
from makeway.errors import UserError
from makeway.text import ChatTemplate


def run_command(
    model: o.ModelArgument,
    prompt: Annotated[
        str | None, typer.Option("--prompt", "-p", help="The prompt; left out or '-': read from stdin.")
    ] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Put the prompt into the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option("--system", help="System message, with --chat.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document instead of streamed text.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Nothing on stderr.")] = False,
    max_tokens: o.MaxTokensOption = o.SAMPLING["max_tokens"],
    temperature: o.TemperatureOption = o.SAMPLING["temperature"],
    top_k: o.TopKOption = o.SAMPLING["top_k"],
    top_p: o.TopPOption = o.SAMPLING["top_p"],
    min_p: o.MinPOption = o.SAMPLING["min_p"],
    typical_p: o.TypicalPOption = o.SAMPLING["typical_p"],
    repetition_penalty: o.RepetitionOption = o.SAMPLING["repetition_penalty"],
    presence_penalty: o.PresenceOption = o.SAMPLING["presence_penalty"],
    frequency_penalty: o.FrequencyOption = o.SAMPLING["frequency_penalty"],
    seed: o.SeedOption = o.SAMPLING["seed"],
    stop: o.StopOption = None,
    ignore_eos: o.IgnoreEosOption = o.SAMPLING["ignore_eos"],
    device: o.DeviceOption = o.ENGINE["device"],
    kernels: o.KernelsOption = o.ENGINE["kernels"],
    vram: o.VramOption = o.ENGINE["vram"],
    ram: o.RamOption = o.ENGINE["ram"],
    context: o.ContextOption = o.ENGINE["context"],
    kv_type: o.KvTypeOption = o.ENGINE["kv_type"],
    slots: o.SlotsOption = o.ENGINE["slots"],
    policy: o.PolicyOption = o.ENGINE["policy"],
    profile: o.ProfileOption = o.ENGINE["profile"],
    uploads_per_layer: o.UploadsOption = o.ENGINE["uploads_per_layer"],
    guesses: o.GuessesOption = o.ENGINE["guesses"],
    chunk: o.ChunkOption = o.ENGINE["chunk"],
    sweep_tokens: o.SweepTokensOption = o.ENGINE["sweep_tokens"],
    handover: o.HandoverOption = o.ENGINE["handover"],
    drafter: o.DrafterOption = o.ENGINE["drafter"],
    draft_depth: o.DraftDepthOption = o.ENGINE["draft_depth"],
    trace: o.TraceOption = o.ENGINE["trace"],
    audit: o.AuditOption = o.ENGINE["audit"],
) -> None:
    """Continue a prompt, or answer it with --chat."""
    sampling = SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        typical_p=typical_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        stop=tuple(stop or ()),
        ignore_eos=ignore_eos,
    )
    config = o.engine_config(
        device=device,
        kernels=kernels,
        vram=vram,
        ram=ram,
        context=context,
        parallel=1,
        kv_type=kv_type,
        slots=slots,
        policy=policy,
        profile=profile,
        uploads_per_layer=uploads_per_layer,
        guesses=guesses,
        chunk=chunk,
        sweep_tokens=sweep_tokens,
        handover=handover,
        drafter=drafter,
        draft_depth=draft_depth,
        trace=trace,
        audit=audit,
    )
    if system is not None and not chat:
        raise UserError("--system needs --chat; without a chat template there is no system message")
    text = _read_prompt(prompt)
    console = Console(stderr=True, quiet=quiet)
    with load_engine(model, config, console=console) as engine:
        if chat:
            text = _in_template(engine, text, system)
        _answer(engine, text, sampling, console=console, as_json=as_json)


def _read_prompt(prompt: str | None) -> str:
    if prompt is not None and prompt != "-":
        return prompt
    if prompt is None and sys.stdin.isatty():
        raise UserError("no prompt; give one with -p, or pipe it in")
    return sys.stdin.read()


def _in_template(engine: Engine, text: str, system: str | None) -> str:
    tokenizer = engine.tokenizer
    if tokenizer.chat_template is None:
        raise UserError("the model has no chat template; leave out --chat to continue the prompt as it is")
    template = ChatTemplate(
        tokenizer.chat_template,
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        name="the model's template",
    )
    messages = [{"role": "system", "content": system}] if system is not None else []
    return template.render([*messages, {"role": "user", "content": text}])


def _answer(engine: Engine, prompt: str, sampling: SamplingParams, *, console: Console, as_json: bool) -> None:
    pieces: list[str] = []
    tokens: list[int] = []
    last: Event | None = None
    bar = Progress(
        TextColumn("reading the prompt"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} tokens"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    with closing(engine.generate(prompt, sampling)) as events:  # type: ignore[type-var]
        with bar:
            task = bar.add_task("prompt", total=None)
            for event in events:
                if event.kind != "progress":
                    last = event
                    break
                bar.update(task, completed=event.n_done, total=event.n_prompt)
        while last is not None:
            if last.token is not None:
                tokens.append(last.token)
            pieces.append(last.text)
            if not as_json:
                sys.stdout.write(last.text)
                sys.stdout.flush()
            if last.kind == "finish":
                break
            last = next(events, None)
    assert last is not None
    assert last.timings is not None
    t = last.timings
    if as_json:
        document = {
            "text": "".join(pieces),
            "tokens": tokens,
            "finish_reason": last.reason,
            "timings": asdict(t),
            "status": engine.status(),
        }
        print(json.dumps(document, ensure_ascii=False))
    elif pieces and not "".join(pieces).endswith("\n"):
        print()
    console.print(
        f"{t.n_prompt} prompt tokens in {t.prompt_s:.2f} s ({t.prompt_tokens_per_s:.1f}/s), "
        f"{t.n_answer} answer tokens ({t.answer_tokens_per_s:.1f}/s), {_drafts(t.drafts)}"
        f"device {engine.device.name}, kernels {engine.kernels}",
        highlight=False,
        style="dim",
        soft_wrap=True,
    )


def _drafts(counts: DraftCounts) -> str:
    """The drafts of an answer, for the summary line; nothing when there were none."""
    if counts.acceptance is None:
        return ""
    return (
        f"{counts.n_accepted} of {counts.n_drafted} drafts accepted ({counts.acceptance:.0%}), "
        f"{counts.tokens_per_step:.2f} tokens a step, "
    )
