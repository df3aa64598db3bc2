"""Command-line options that several commands share, with the defaults of `EngineConfig` and `SamplingParams`.

Owns the wording of the flags. Never has a default of its own. Hazard: a flag's name is an interface.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from makeway.config import EngineConfig, SamplingParams, parse_bytes
from makeway.errors import UserError
from makeway.experts.policies import RANKINGS

ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL.gguf", help="A GGUF file, or any shard of a split one.", show_default=False),
]


def _engine(flag: str, help_text: str, *more: str) -> Any:
    return typer.Option(flag, *more, help=help_text, rich_help_panel="Engine")


DeviceOption = Annotated[str, _engine("--device", "auto, cpu or cuda.")]
KernelsOption = Annotated[str, _engine("--kernels", "auto, reference or triton.")]
VramOption = Annotated[
    str | None, _engine("--vram", "Memory of the card that may be used, for example 24GiB; a CPU pretends. [auto]")
]
RamOption = Annotated[str | None, _engine("--ram", "Memory of the host that may be used. [auto]")]
ContextOption = Annotated[int | None, _engine("--context", "Tokens of prompt and answer together. [auto]", "-c")]
ParallelOption = Annotated[int, _engine("--parallel", "Sequences at once.")]
KvTypeOption = Annotated[str | None, _engine("--kv-type", "Type of the KV cache: f16 or f32. [auto]")]
SlotsOption = Annotated[int | None, _engine("--slots", "Expert slots a layer. [auto]")]
PolicyOption = Annotated[str, _engine("--policy", f"Which experts stay in slots: {', '.join(RANKINGS)}.")]
ProfileOption = Annotated[Path | None, _engine("--profile", "Routing trace that policy static ranks by.")]
UploadsOption = Annotated[int, _engine("--uploads-per-layer", "Misses kept a layer and step.")]
GuessesOption = Annotated[
    bool, _engine("--guesses/--no-guesses", "Fetch misses of the next layers ahead, as their routers guess them (GPU).")
]
ChunkOption = Annotated[int | None, _engine("--chunk", "Prompt tokens that go through a layer together. [auto]")]
SweepTokensOption = Annotated[
    int | None, _engine("--sweep-tokens", "Prompt tokens of one pass over the layers. [auto]")
]
HandoverOption = Annotated[str, _engine("--handover", "Lend slots to prompts: auto, never or always (all of them).")]
PrefixRamOption = Annotated[
    str | None, _engine("--prefix-ram", "Memory of the host that keeps what earlier prompts have read. [auto]")
]
DrafterOption = Annotated[
    str, _engine("--drafter", "Where drafts come from: auto, mtp, lookup, mtp+lookup or none. The text is the same.")
]
DraftDepthOption = Annotated[
    str, _engine("--draft-depth", "Drafts a sequence and step: a number, or auto (as many as pay).")
]
MaxPrefillOption = Annotated[float, _engine("--max-prefill-s", "Longest time that answers wait for prompts.")]
TraceOption = Annotated[Path | None, _engine("--trace", "Record routed experts in this file.")]
AuditOption = Annotated[bool, _engine("--audit", "Compare every slot with the file after each hand-over.")]


def parse_depth(text: str) -> int | Literal["auto"]:
    """The value of `--draft-depth`; raises UserError when it is neither a number nor auto."""
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdecimal():
        raise UserError(f"--draft-depth {text}: use auto, or a number from 0")
    return int(text)


def engine_config(
    *, vram: str | None, ram: str | None, prefix_ram: str | None = None, draft_depth: str = "auto", **settings: Any
) -> EngineConfig:
    """The configuration of a command's flags; raises UserError for a size or a value that cannot be."""
    return EngineConfig(
        vram=None if vram is None else parse_bytes(vram, "--vram"),
        ram=None if ram is None else parse_bytes(ram, "--ram"),
        draft_depth=parse_depth(draft_depth),
        prefix_ram=None if prefix_ram is None else parse_bytes(prefix_ram, "--prefix-ram"),
        **settings,
    )


def _sampling(flag: str, help_text: str, *more: str) -> Any:
    return typer.Option(flag, *more, help=help_text, rich_help_panel="Sampling")


MaxTokensOption = Annotated[int | None, _sampling("--max-tokens", "Longest answer. [rest of the context]", "-n")]
TemperatureOption = Annotated[float, _sampling("--temperature", "0 is greedy.", "-t")]
TopKOption = Annotated[int, _sampling("--top-k", "Draw from the k best tokens; 0 is off.")]
TopPOption = Annotated[float, _sampling("--top-p", "Draw from the best tokens that hold this share; 1 is off.")]
MinPOption = Annotated[float, _sampling("--min-p", "Least share of the best token's probability; 0 is off.")]
TypicalPOption = Annotated[float, _sampling("--typical-p", "Locally typical sampling; 1 is off.")]
RepetitionOption = Annotated[float, _sampling("--repetition-penalty", "Above 1 avoids tokens seen; 1 is off.")]
PresenceOption = Annotated[float, _sampling("--presence-penalty", "Subtracted for tokens of the answer.")]
FrequencyOption = Annotated[float, _sampling("--frequency-penalty", "Subtracted per use in the answer.")]
SeedOption = Annotated[int | None, _sampling("--seed", "Same seed, same text. [random]")]
StopOption = Annotated[list[str] | None, _sampling("--stop", "Ends the answer; may be given several times.")]
IgnoreEosOption = Annotated[bool, _sampling("--ignore-eos", "Go on after the model's end token.")]

ENGINE: dict[str, Any] = {f.name: f.default for f in fields(EngineConfig)}
SAMPLING: dict[str, Any] = {f.name: f.default for f in fields(SamplingParams)}
