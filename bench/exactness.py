"""How far the engine is from the oracles on the golden models: a table for people, one JSON line last.

python bench/exactness.py [--device cpu|cuda]
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from makeway import Engine, EngineConfig

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (ROOT / "tests" / "data", ROOT.parent / "shared" / "golden")
CASES = [(f"{a}-base-bf16.gguf", f"{a}-base.npz", "logits") for a in ("qwen4exp", "qwen35moe", "qwen3next", "qwen3moe")]
CASES += [
    (f"{name}-{quant}.gguf", f"{name}-quant.npz", f"{quant}/logits")
    for name, quant in (
        ("qwen4exp-k96", "UD-Q4_K_XL"),
        ("qwen4exp-k256", "Q4_K_M"),
        *(("qwen3moe-k256", q) for q in ("Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K", "Q8_0", "IQ4_XS")),
    )
]


def find(name: str) -> Path | None:
    return next((folder / name for folder in FOLDERS if (folder / name).exists()), None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    torch.backends.cuda.matmul.allow_tf32 = False
    rows = []
    print("| model | oracle | positions | largest difference | identical bits in chunks of 1, 7, all |")
    print("| --- | --- | --- | --- | --- |")
    for file, data, key in CASES:
        path, reference = find(file), find(data)
        if path is None or reference is None:
            print(f"| {file} | (not here) | | | |")
            continue
        with np.load(reference) as arrays:
            tokens, wanted = [int(t) for t in arrays["tokens"]], arrays[key]
        results = []
        for chunk in (len(tokens), 1, 7):
            with Engine.load(path, EngineConfig(device=device, chunk=chunk)) as engine:
                results.append(engine.logits(tokens).cpu())
        difference = float(np.abs(results[0].numpy() - wanted).max())
        same = all(torch.equal(r, results[0]) for r in results)
        oracle = "transformers 5.24" if key == "logits" else "llama.cpp b11549"
        name = file.removesuffix(".gguf")
        print(f"| {name} | {oracle} | {len(tokens)} | {difference:.1e} | {'yes' if same else 'NO'} |")
        rows.append({"model": name, "oracle": oracle, "n": len(tokens), "difference": difference, "same_bits": same})
    print(json.dumps({"bench": "exactness", "device": device, "rows": rows}))


if __name__ == "__main__":
    main()
