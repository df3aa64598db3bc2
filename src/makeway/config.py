"""Every setting of an engine and its default; command-line flags are derived from here.

Owns the defaults. Never reads files or the environment. Hazard: a default written anywhere else is a bug.
"""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from makeway.errors import UserError

_UNITS = {"": 1, "B": 1, "KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parse_bytes(text: str, flag: str) -> int:
    """Bytes of "24GiB", "512 MiB", "24GB" or a plain number; raises UserError naming the flag."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _UNITS:
        raise UserError(f"{flag} {text}: not a size; write for example 24GiB, 512MiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2].upper()])


DeviceName = Literal["auto", "cpu", "cuda"]
KernelsName = Literal["auto", "reference", "triton"]
Handover = Literal["auto", "never", "always"]
DrafterName = Literal["auto", "none", "mtp", "lookup", "mtp+lookup"]


def _check(ok: bool, what: str, do: str) -> None:
    if not ok:
        raise UserError(f"{what}; {do}")


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is set up. `None` means auto: chosen by the plan and shown in the status document.

    device: "auto" takes CUDA where there is one. kernels: "auto" takes "triton" on a GPU, else "reference".
    vram, ram: bytes the plan may use (None: what is there; without a GPU, what holds every expert).
    context: tokens a sequence may hold, prompt and answer together, and all sequences together (None: the model's own,
    at most 8192). parallel: sequences at once. kv_type: "f16" or "f32".
    slots: expert slots a layer. policy: who stays in them; profile: the routing trace that policy "static" needs.
    uploads_per_layer: misses kept a layer and step. guesses: whether a GPU fetches misses of
    the next two layers ahead.
    chunk: prompt tokens that go through a layer together. sweep_tokens: prompt tokens of one pass over the layers.
    handover: "auto", "never" or "always" (lends every slot to every prompt).
    drafter: "mtp" (the model's own block), "lookup" (text that has occurred), "mtp+lookup" or "none"; "auto" takes the
    block where the file has one. draft_depth: drafts a sequence and step; "auto": as many as pay.
    prefix_ram: bytes of RAM that keep what earlier prompts have read (0: nothing is kept).
    max_prefill_s: answers wait at most so long while prompts are read. trace: a file that records what was routed.
    audit: compare every slot with the expert store after each hand-over.
    """

    device: DeviceName = "auto"
    kernels: KernelsName = "auto"
    vram: int | None = None
    ram: int | None = None
    context: int | None = None
    parallel: int = 4
    kv_type: str | None = None
    slots: int | None = None
    policy: str = "lfru"
    profile: Path | None = None
    uploads_per_layer: int = 2
    guesses: bool = True
    chunk: int | None = None
    sweep_tokens: int | None = None
    handover: Handover = "auto"
    drafter: DrafterName = "auto"
    draft_depth: int | Literal["auto"] = "auto"
    prefix_ram: int | None = None
    max_prefill_s: float = 60.0
    trace: Path | None = None
    audit: bool = False

    def __post_init__(self) -> None:
        _check(self.device in ("auto", "cpu", "cuda"), f"--device {self.device}", "use auto, cpu or cuda")
        _check(
            self.kernels in ("auto", "reference", "triton"),
            f"--kernels {self.kernels}",
            "use auto, reference or triton",
        )
        _check(self.handover in ("auto", "never", "always"), f"--handover {self.handover}", "use auto, never or always")
        drafters = ("auto", "none", "mtp", "lookup", "mtp+lookup")
        _check(self.drafter in drafters, f"--drafter {self.drafter}", "use " + ", ".join(drafters))
        depth = self.draft_depth
        _check(
            depth == "auto" or (isinstance(depth, int) and depth >= 0), f"--draft-depth {depth}", "use auto, 0 or more"
        )
        for flag, value, least in (
            ("--vram", self.vram, 1),
            ("--ram", self.ram, 1),
            ("--context", self.context, 1),
            ("--parallel", self.parallel, 1),
            ("--slots", self.slots, 0),
            ("--prefix-ram", self.prefix_ram, 0),
            ("--uploads-per-layer", self.uploads_per_layer, 0),
            ("--chunk", self.chunk, 1),
            ("--sweep-tokens", self.sweep_tokens, 1),
        ):
            _check(value is None or value >= least, f"{flag} {value}", f"use at least {least}")
        _check(self.max_prefill_s > 0, f"--max-prefill-s {self.max_prefill_s}", "use more than 0 seconds")


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen; the defaults are greedy.

    temperature 0: greedy. top_k 0, top_p 1, min_p 0, typical_p 1: off. repetition_penalty divides (positive) or
    multiplies (negative) the logits of tokens seen in prompt or answer; presence and frequency penalties are subtracted
    for tokens of the answer (OpenAI's meaning). logit_bias is added by token id. seed None: a fresh one.
    logprobs: log-probabilities of that many best tokens with each token (None: none at all).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict)
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_p",
            "min_p",
            "typical_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            value = getattr(self, name)
            _check(math.isfinite(value), f"{name} is {value}", "use a finite number")
        for token, bias in self.logit_bias.items():
            _check(not math.isnan(bias), f"logit_bias of token {token} is NaN", "use a number")
        n = self.max_tokens
        _check(n is None or n >= 1, f"max_tokens is {n}", "use at least 1, or leave it out for no limit")
        _check(self.temperature >= 0, f"temperature is {self.temperature}", "use 0 (greedy) or more")
        _check(self.top_k >= 0, f"top_k is {self.top_k}", "use 0 (off) or more")
        _check(0 < self.top_p <= 1, f"top_p is {self.top_p}", "use a number above 0 and at most 1")
        _check(0 <= self.min_p <= 1, f"min_p is {self.min_p}", "use a number from 0 to 1")
        _check(0 < self.typical_p <= 1, f"typical_p is {self.typical_p}", "use a number above 0 and at most 1")
        _check(self.repetition_penalty > 0, f"repetition_penalty is {self.repetition_penalty}", "use more than 0")
        _check(all(self.stop), "a stop string is empty", "leave it out")
        _check(self.logprobs is None or 0 <= self.logprobs <= 20, f"logprobs is {self.logprobs}", "use 0 to 20")
        _check(self.seed is None or 0 <= self.seed < 2**64, f"seed is {self.seed}", "use 0 to 2^64 - 1")
