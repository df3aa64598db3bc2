"""Command-line options that several commands share, with the defaults of `EngineConfig` and `SamplingParams`.

Owns the wording of the flags. Never has a default of its own. Hazard: a flag's name is an interface.
"""

from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

import typer

from makeway.config import EngineConfig, SamplingParams

ModelArgument = Annotated[
    Path,
    typer.Argument(metavar="MODEL.gguf", help="A GGUF file, or any shard of a split one.", show_default=False),
]
DeviceOption = Annotated[str, typer.Option("--device", help="auto, cpu or cuda.", rich_help_panel="Engine")]
ContextOption = Annotated[
    int | None,
    typer.Option("--context", "-c", help="Tokens of prompt and answer together. [auto]", rich_help_panel="Engine"),
]
ChunkOption = Annotated[
    int,
    typer.Option("--chunk", help="Prompt tokens that go through a layer together.", rich_help_panel="Engine"),
]
SweepTokensOption = Annotated[
    int, typer.Option("--sweep-tokens", help="Prompt tokens of one pass over the layers.", rich_help_panel="Engine")
]


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
