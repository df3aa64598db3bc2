"""Side by side with llama.cpp: the same file for both, its commands, and both results in one table.

Owns the commands and how their JSON is read. Never runs llama.cpp: whoever has a build with CUDA does, on the machine
on which makeway was measured.
Hazard: two numbers compare only when file, memory, prompt and machine are the same, so each line says its settings.
"""

import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from makeway.bench.report import Figure, Report
from makeway.errors import UserError

BUILD = "b11549"
GPU_LAYERS = 99

# Random quantised blocks, router rows scaled by rank^-0.4, experts in pinned host memory, one sequence, one H200.
_EARLIER: tuple[tuple[str, str, str, tuple[float, ...]], ...] = (
    ("qwen3-30b-a3b", "ub 512", "prompt of 8192", (1992.0,)),
    ("qwen3-30b-a3b", "ub 2048", "prompt of 8192", (4927.0,)),
    ("qwen3-30b-a3b", "ub 8192", "prompt of 8192", (7349.0,)),
    ("qwen3-30b-a3b", "ub 2048, cache of 10 GiB", "prompt of 8192", (6649.0,)),
    ("qwen3-30b-a3b", "no cache", "prompt of 256", (1150.0,)),
    ("qwen3-30b-a3b", "cache of 10 GiB", "prompt of 256", (2108.0,)),
    ("qwen3-30b-a3b", "no cache", "decode", (40.0,)),
    ("qwen3-30b-a3b", "cache of 10 GiB", "decode", (161.0, 185.0)),
    ("flash-next", "24 layers, ub 512", "prompt of 8192", (1140.0,)),
    ("flash-next", "24 layers, ub 2048", "prompt of 8192", (2632.0,)),
    ("flash-next", "24 layers, ub 2048, cache of 9 GiB", "prompt of 8192", (2997.0,)),
    ("flash-next", "24 layers, no cache", "prompt of 256", (572.0,)),
    ("flash-next", "24 layers, cache of 9 GiB", "prompt of 256", (791.0,)),
    ("flash-next", "24 layers, no cache", "decode", (48.0,)),
    ("flash-next", "24 layers, cache of 9 GiB", "decode", (125.0, 129.0)),
)


@dataclass(frozen=True)
class Measured:
    """One line of `llama-bench -o json`. n_prompt or n_gen is 0; the rates are tokens per second."""

    build: str
    gpu: str
    model: str
    n_prompt: int
    n_gen: int
    depth: int
    ubatch: int
    rates: tuple[float, ...]
    settings: str

    @property
    def name(self) -> str:
        what = f"prompt of {self.n_prompt}" if self.n_prompt else f"decode, {self.n_gen} tokens"
        behind = f" behind {self.depth}" if self.depth else ""
        return f"llama.cpp {self.build}: {what}{behind}, ub {self.ubatch}"


def commands(
    model: Path,
    *,
    prompts: Sequence[int] = (256, 8192),
    ubatches: Sequence[int] = (512, 2048, 8192),
    cache_mib: int = 0,
    out: str = "llama",
) -> list[str]:
    """Shell lines that measure a file with llama.cpp: experts in host memory, everything else on the GPU.

    Without a memory map, so that host memory is pinned. One line and one file of results for each micro-batch, and one
    with a cache of experts of `cache_mib` on the GPU, warmed up (flags as in tools/llama-bench/README.md).
    """
    lengths = ",".join(str(n) for n in prompts)
    arms = [(ubatch, "off", str(ubatch)) for ubatch in ubatches]
    if cache_mib:
        arms.append((2048, f"{cache_mib} --n-gen-warmup 256", "cache"))
    return [
        f"llama-bench -m {shlex.quote(str(model))} -ngl {GPU_LAYERS} -ncmoe {GPU_LAYERS} -fa on -lm none "
        f"--moe-cache {cache} -p {lengths} -n 128 -b {max(ubatch, 2048)} -ub {ubatch} -r 3 -o json "
        f"> {shlex.quote(f'{out}-{name}.json')}"
        for ubatch, cache, name in arms
    ]


def earlier(shape: str) -> list[Figure]:
    """What llama.cpp b11549 reached on an H200 with PCIe 5 x16, measured there before makeway had kernels."""
    return [
        Figure(f"llama.cpp {BUILD}, earlier: {what}, {arm}", "tokens/s", rates, note=f"{shape}, H200, not this run")
        for at, arm, what, rates in _EARLIER
        if at == shape
    ]


def read_results(path: Path) -> list[Measured]:
    """The lines of a file that `llama-bench -o json` wrote. Raises UserError when it is something else."""
    again = "give a file that `llama-bench -o json` wrote"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as fault:
        raise UserError(f"{path}: cannot be read: {fault.strerror}; {again}") from fault
    except ValueError as fault:
        raise UserError(f"{path}: not a JSON document ({fault}); {again}") from fault
    if not isinstance(document, list) or not all(isinstance(line, dict) for line in document) or not document:
        raise UserError(f"{path}: not a list of results; {again}")
    return [_measured(line, path, again) for line in document]


def _measured(line: dict[str, Any], path: Path, again: str) -> Measured:
    try:
        rates = tuple(float(rate) for rate in line.get("samples_ts") or [line["avg_ts"]])
        if not all(rate > 0 for rate in rates):
            raise ValueError(f"rates of {rates}")
        keys = ("moe_cache", "n_gpu_layers", "n_cpu_moe", "n_threads", "type_k", "type_v", "load_mode", "use_mmap")
        return Measured(
            build=f"b{line['build_number']}",
            gpu=str(line.get("gpu_info", "")),
            model=str(line["model_filename"]),
            n_prompt=int(line["n_prompt"]),
            n_gen=int(line["n_gen"]),
            depth=int(line.get("n_depth", 0)),
            ubatch=int(line["n_ubatch"]),
            rates=rates,
            settings=", ".join(f"{key} {line[key]}" for key in keys if key in line),
        )
    except (KeyError, TypeError, ValueError) as fault:
        raise UserError(f"{path}: a result without {fault}; {again}") from fault


def side_by_side(report: Report, results: Sequence[Path], own: Sequence[Path]) -> None:
    """Puts llama.cpp's results, and makeway's of the same machine, into one report.

    `own`: files that `makeway bench decode` or `prefill` wrote. Raises UserError when a file is something else, or was
    measured on another GPU.
    """
    gpus: dict[str, Path] = {}
    for path in results:
        for line in read_results(path):
            report.figures.append(Figure(line.name, "tokens/s", line.rates, note=line.settings))
            if line.gpu:
                gpus.setdefault(line.gpu, path)
    for path in own:
        figures, gpu = _own_figures(path)
        report.figures += figures
        if gpu:
            gpus.setdefault(gpu, path)
    if len(gpus) > 1:
        where = "; ".join(f"{gpu}: {path}" for gpu, path in gpus.items())
        raise UserError(f"results of different GPUs cannot stand side by side ({where}); measure both on one")
    report.facts["llama_cpp"] = [str(path) for path in results]
    report.facts["makeway_results"] = [str(path) for path in own]


def _own_figures(path: Path) -> tuple[list[Figure], str | None]:
    """Rates in tokens per second out of a result of `bench decode` or `bench prefill`, and the GPU."""
    again = "give a result of `makeway bench decode` or `bench prefill`"
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        bench, gpu = document["bench"], document["machine"]["gpu"]
        if bench == "decode":
            runs = [(r["name"], [r["tokens_per_s"]], r["hit_rate"]) for r in document["runs"]]
            figures = [Figure(f"makeway: {n}", "tokens/s", tuple(v), note=f"{100 * h:.1f} % hits") for n, v, h in runs]
        elif bench == "prefill":
            prompts = [p for p in document["prompts"] if "handovers" in p]
            figures = [
                Figure(f"makeway: prompt of {p['n_tokens']}", "tokens/s", tuple(p["n_tokens"] / s for s in p["ttft_s"]))
                for p in prompts
            ]
        else:
            raise UserError(f"{path}: a result of bench {bench}; {again}")
    except OSError as fault:
        raise UserError(f"{path}: cannot be read: {fault.strerror}; {again}") from fault
    except (KeyError, TypeError, ValueError) as fault:
        raise UserError(f"{path}: not such a result ({fault!r}); {again}") from fault
    return figures, gpu
