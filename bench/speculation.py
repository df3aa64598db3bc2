"""What drafts bring on the demo model: acceptance by place, tokens a step, speed against no drafts; one JSON line last.

    python bench/speculation.py [--tokens 160] [--rounds 2] [--arms mtp:auto,mtp:3] [--texts prose,code,random]

Texts: held-out documentation, this repository's own code, and random tokens drawn from a flat distribution, which
nobody can guess. Every arm says the same text (checked). Arms take turns step by step, and speed is also given in
seconds of this process alone, which is also the clock that `auto` goes by here, because the clock of a shared machine
is not to be trusted; both are medians of rounds.
"""

import argparse
import json
import statistics
import time
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from makeway import Engine, EngineConfig, SamplingParams

ROOT = Path(__file__).resolve().parent.parent
DEMO = resources.files("makeway") / "data" / "demo.gguf"
N_PROMPT = 192


def prompt(engine: Engine, name: str, seed: int) -> list[int]:
    if name == "random":
        return np.random.default_rng(seed).integers(0, engine.model.facts.n_vocab, size=N_PROMPT).tolist()
    path = {"prose": "tests/data/heldout.txt", "code": "src/makeway/engine/loop.py"}[name]
    tokens = engine.tokenizer.encode((ROOT / path).read_text(encoding="utf-8"))
    start = (seed * 577) % (len(tokens) - N_PROMPT)
    return tokens[start : start + N_PROMPT]


def sampling(name: str, seed: int, n_tokens: int) -> SamplingParams:
    if name == "random":
        return SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=1000.0, seed=seed)
    return SamplingParams(max_tokens=n_tokens, ignore_eos=True, temperature=0.8, top_k=40, seed=seed)


def race(engines: dict, tokens: list[int], params: SamplingParams) -> dict:
    """One text by every arm; the one that is behind makes the next step, so that all see the same machine. Wall and
    process seconds of the steps after the first token."""
    results = {arm: {"text": [], "wall_s": 0.0, "cpu_s": 0.0, "counts": None} for arm in engines}
    for engine in engines.values():
        engine.add(tokens, params)
    while waiting := [arm for arm in engines if results[arm]["counts"] is None]:
        arm = min(waiting, key=lambda arm: len(results[arm]["text"]))
        result, wall, cpu = results[arm], time.perf_counter(), time.process_time()
        is_answering = bool(result["text"])
        for event in engines[arm].step():
            if event.token is not None:
                result["text"].append(event.token)
            if event.timings is not None:
                result["counts"] = event.timings.drafts
        if is_answering:
            result["wall_s"] += time.perf_counter() - wall
            result["cpu_s"] += time.process_time() - cpu
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--arms", default="mtp:auto,mtp:1,mtp:2,mtp:3,lookup:auto,mtp+lookup:auto")
    parser.add_argument("--texts", default="prose,code,random")
    parser.add_argument("--slots", type=int, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    arms = [("none", "auto"), *(tuple(arm.split(":")) for arm in options.arms.split(","))]
    engines = {}
    for drafter, depth in arms:
        depth_value = depth if depth == "auto" else int(depth)
        config = EngineConfig(
            device="cpu",
            context=1024,
            parallel=1,
            drafter=drafter,
            draft_depth=depth_value,
            slots=options.slots,
            prefix_ram=0,
        )
        engines[drafter, depth] = engine = Engine.load(DEMO, config)
        engine._loop.speculation.clock = time.process_time
    rows = []
    print("| text | drafter | tokens a step | accepted by place | CPU s / none | wall s / none |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in options.texts.split(","):
        results = {arm: [] for arm in arms}
        for seed in range(options.rounds):
            tokens = prompt(engines["none", "auto"], name, seed)
            for arm, result in race(engines, tokens, sampling(name, seed, options.tokens)).items():
                results[arm].append(result)
                assert result["text"] == results["none", "auto"][seed]["text"], "drafts changed the text"
        base = results["none", "auto"]
        for arm in arms:
            ratios = {
                key: statistics.median(r[key] / b[key] for r, b in zip(results[arm], base, strict=True))
                for key in ("cpu_s", "wall_s")
            }
            counts = [r["counts"] for r in results[arm]]
            n_steps = sum(c.n_steps for c in counts)
            by_place = [
                [sum(c.by_place[i][k] for c in counts if len(c.by_place) > i) for k in (0, 1)]
                for i in range(max(len(c.by_place) for c in counts))
            ]
            longest = max(len(c.depths) for c in counts)
            depths = [sum(c.depths[i] for c in counts if len(c.depths) > i) for i in range(longest)]
            per_step = (n_steps + sum(c.n_accepted for c in counts)) / n_steps
            shown = " ".join(f"{right / n:.2f} ({n})" for n, right in by_place)
            label = f"{arm[0]}" if arm[0] == "none" else f"{arm[0]}, depth {arm[1]}"
            print(
                f"| {name} | {label} | {per_step:.2f} | {shown} | {ratios['cpu_s']:.3f} | {ratios['wall_s']:.3f} |",
                flush=True,
            )
            rows.append(
                {
                    "text": name,
                    "drafter": arm[0],
                    "depth": arm[1],
                    "tokens_per_step": per_step,
                    "by_place": by_place,
                    "depths": depths,
                    "cpu_ratio": ratios["cpu_s"],
                    "wall_ratio": ratios["wall_s"],
                    "cpu_s_per_token": statistics.median(r["cpu_s"] / (options.tokens - 1) for r in results[arm]),
                }
            )
    for engine in engines.values():
        engine.close()
    settings = {"tokens": options.tokens, "rounds": options.rounds, "slots": options.slots}
    print(json.dumps({"bench": "speculation", **settings, "rows": rows}))


if __name__ == "__main__":
    main()
