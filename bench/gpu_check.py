"""On a GPU: the engine's promises that need one, checked on small models, with a table and one JSON line last.

    python bench/gpu_check.py [--kernels reference|triton] [--models FILE ...]

For each model: logits against the CPU reference and against an independent program's (tests/data/*.npz); bits equal
over slots, policies, lending and what was read before, for equal shapes; greedy tokens equal over the same and with
drafts; a prompt that resumes as a cold one; hand-overs with every slot compared with the store; memory that torch
reserved beside the arena, against the plan's reserve. A failed check is printed and counted; the exit status is 1 then.
Hazard: chunk size may change rounding on a GPU, so all runs of a comparison have the same chunk.
"""

import argparse
import json
import sys
import traceback
from pathlib import Path

import numpy as np
import torch

from makeway import Engine, EngineConfig, SamplingParams

ROOT = Path(__file__).parents[1]
MODELS = (
    "tests/data/qwen4exp-k96-UD-Q4_K_XL.gguf",
    "tests/data/qwen35moe-base-bf16.gguf",
    "tests/data/qwen3next-base-bf16.gguf",
    "tests/data/qwen3moe-k256-Q4_K_M.gguf",
    "src/makeway/data/demo.gguf",
)
VRAM = 4 << 30
GOLDEN_MEDIAN, GOLDEN_SAME = 0.15, 0.95
STATES = (
    {"slots": 0},
    {"slots": 2},
    {"slots": 2, "handover": "always"},
    {"slots": 2, "guesses": False},
    {"slots": 3, "policy": "random"},
    {},
)


def prompt_of(engine: Engine, n: int) -> list[int]:
    """Tokens that look like nothing, the same for every run."""
    size = engine.model.facts.n_vocab
    return [(37 * i + i // 5 + 11) % size for i in range(n)]


def config(kernels: str, **settings: object) -> EngineConfig:
    """One shape for all runs."""
    base = {"device": "cuda", "kernels": kernels, "vram": VRAM, "context": 512, "chunk": 64, "prefix_ram": 0}
    return EngineConfig(**(base | {"audit": True, "parallel": 2} | settings))


def greedy(engine: Engine, prompt: list[int], n: int) -> list[int]:
    """The first answer tokens."""
    events = engine.generate(prompt, SamplingParams(max_tokens=n, ignore_eos=True))
    return [e.token for e in events if e.token is not None]


def against_golden(path: Path, kernels: str) -> dict[str, float]:
    """Half precision's limits: the median over positions of the largest difference, and how often the best token is the
    oracle's. A flipped expert moves a position by more than 1, so the maximum says nothing."""
    model, kind = path.stem.split("-", 2)[:2], path.stem.split("-", 2)[2]
    name = "-".join(model)
    is_quantised = kind != "bf16"
    with np.load(ROOT / "tests/data" / f"{name}{'-quant' if is_quantised else ''}.npz") as arrays:
        expected = torch.from_numpy(arrays[f"{kind}/logits" if is_quantised else "logits"])
        tokens = [int(t) for t in arrays["tokens"]]
    with Engine.load(path, config(kernels, drafter="none", slots=2, handover="always")) as engine:
        found = engine.logits(tokens).cpu()
    median = float((found - expected).abs().amax(dim=1).median())
    same = float((found.argmax(dim=1) == expected.argmax(dim=1)).float().mean())
    assert median <= GOLDEN_MEDIAN, f"golden: the median difference is {median}"
    assert same >= GOLDEN_SAME, f"golden: {same} of the best tokens are the oracle's"
    return {"golden_median": median, "golden_same_best": same}


def check(path: Path, kernels: str) -> dict[str, object]:
    """All checks of one model; raises AssertionError with what failed."""
    with Engine.load(path, EngineConfig(device="cpu", context=512, chunk=64, prefix_ram=0, drafter="none")) as engine:
        prompt = prompt_of(engine, 200)
        truth = engine.logits(prompt)
        tokens_on_cpu = greedy(engine, prompt, 12)
    torch.cuda.reset_peak_memory_stats()
    first = tokens = None
    worst = 0.0
    for state in STATES:
        with Engine.load(path, config(kernels, drafter="none", **state)) as engine:
            for _ in range(2):  # again, with what the first reading left
                logits = engine.logits(prompt).cpu()
                worst = max(worst, float((logits - truth).abs().max()))
                first = logits if first is None else first
                assert torch.equal(logits, first), f"{state}: other bits, {float((logits - first).abs().max())}"
            answer = greedy(engine, prompt, 32) + greedy(engine, prompt[:40], 16)
            tokens = answer if tokens is None else tokens
            assert answer == tokens, f"{state}: other tokens: {answer} instead of {tokens}"
            while engine.busy:
                engine.step()
            status = engine.status()
            assert status["failure"] is None
            reserve = engine.plan.reserve_bytes
            has_drafts = engine.model.facts.n_draft_layers > 0
    peak = torch.cuda.max_memory_reserved() - VRAM + reserve
    reused = resumed(path, kernels)
    drafted = None
    if has_drafts:
        with Engine.load(path, config(kernels, drafter="mtp", draft_depth=3)) as engine:
            drafted = greedy(engine, prompt, 32) + greedy(engine, prompt[:40], 16)
            assert drafted == tokens, f"drafts changed the tokens: {drafted} instead of {tokens}"
    return {
        "model": path.name,
        "kernels": kernels,
        **({} if path.stem == "demo" else against_golden(path, kernels)),
        "largest_difference_to_cpu": worst,
        "same_first_tokens_as_cpu": tokens[:12] == tokens_on_cpu,
        "spread": float(truth.std()),
        "beside_arena_bytes": peak,
        "reserve_bytes": reserve,
        "drafts_checked": drafted is not None,
        "tokens_reused": reused,
        "link_bytes": status["link"]["bytes"],
        "hit_rate": status["experts"]["hit_rate"],
    }


def resumed(path: Path, kernels: str) -> int:
    """A prompt that starts where a kept one ends (on the grid of 64) answers as it does cold; tokens not read again."""
    settings = {"drafter": "none", "prefix_ram": 256 << 20}
    sampling = SamplingParams(max_tokens=24, ignore_eos=True, logprobs=5)
    with Engine.load(path, config(kernels, **settings)) as engine:
        prompt = prompt_of(engine, 300)
        prompt[130] = min(engine.tokenizer.eos_ids)  # a message ends here
        for _ in engine.generate(prompt[:200], SamplingParams(max_tokens=1, ignore_eos=True)):
            pass
        warm = list(engine.generate(prompt, sampling))
    with Engine.load(path, config(kernels, **settings)) as engine:
        cold = list(engine.generate(prompt, sampling))
    assert warm[-1].timings is not None
    reused = warm[-1].timings.n_cached
    assert reused > 0, "nothing was reused"
    assert reused % 64 == 0, f"{reused} tokens are not on the grid"
    answers = [[(e.token, e.logprobs) for e in events if e.kind == "token"] for events in (warm, cold)]
    assert len(answers[0]) == 24
    assert answers[0] == answers[1], f"resumed: {answers[0]}, cold: {answers[1]}"
    return reused


def main() -> int:
    """Run every model; 1 when a check failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", default="triton")
    parser.add_argument("--models", nargs="*", default=[str(ROOT / model) for model in MODELS])
    options = parser.parse_args()
    results, failed = [], []
    for model in options.models:
        try:
            results.append(check(Path(model), options.kernels))
            print(json.dumps(results[-1]), flush=True)
        except Exception as fault:  # noqa: BLE001 - one model's fault must not hide the others' results
            failed.append({"model": Path(model).name, "fault": f"{type(fault).__name__}: {fault}"[:400]})
            traceback.print_exc(limit=-4)
            print(json.dumps(failed[-1]), flush=True)
    print(json.dumps({"bench": "gpu_check", "kernels": options.kernels, "results": results, "failed": failed}))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
