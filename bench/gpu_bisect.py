"""On a GPU: which operation's kernel departs from the reference, on a real model instead of a unit's shapes.

    python bench/gpu_bisect.py MODEL.gguf [--tokens 200] [--chunk 64]

Reads the same tokens with the reference, then with one operation at a time served by Triton, and prints the largest
and the mean difference of the logits; a JSON line last. Rounding to bf16 shows at `linear`; anything much
larger is a fault.
"""

import argparse
import json
from dataclasses import fields, replace
from pathlib import Path

import torch

from makeway.experts.executors import DirectExperts
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE, Ops
from makeway.kernels.triton.ops import triton_ops
from makeway.kv import Batch, KVCache, SequenceState, StatePool, StateShapes
from makeway.models import load_model
from makeway.models.base import run_trunk

DEVICE = torch.device("cuda")


def logits(path: Path, ops: Ops, *, n_tokens: int, chunk: int) -> torch.Tensor:
    """f32 [n, vocab] of a fresh sequence, everything on the device."""
    with open_gguf(path) as file:
        model = load_model(file, ops, device=DEVICE, place=lambda _, raw: raw.to(DEVICE))
        facts = model.facts
        size = facts.n_vocab
        tokens = [(37 * i + i // 5 + 11) % size for i in range(n_tokens)]
        cache = KVCache(facts.kv_shapes, n_tokens // 64 + 2, device=DEVICE)
        shapes = StateShapes.of(facts.state_shapes, kv=facts.kv_shapes, ple=facts.ple_tails)
        sequence = SequenceState(cache, StatePool(shapes, 1, device=DEVICE, n_kept=8))
        experts = DirectExperts(model.store, REFERENCE)
        rows = []
        for i in range(0, n_tokens, chunk):
            piece = tokens[i : i + chunk]
            sequence.reserve(len(piece))
            rows.append(model.head(run_trunk(model, experts, Batch.of([(sequence, piece)], device=DEVICE))))
        return torch.cat(rows).cpu()


def main() -> None:
    """One line an operation."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--chunk", type=int, default=64)
    options = parser.parse_args()
    shape = {"n_tokens": options.tokens, "chunk": options.chunk}
    truth = logits(options.model, REFERENCE, **shape)
    triton = triton_ops(DEVICE)
    names = [f.name for f in fields(Ops) if callable(getattr(REFERENCE, f.name)) and f.name != "name"]
    found: dict[str, list[float]] = {}
    for name in names:
        ops = replace(REFERENCE, **{name: getattr(triton, name)})
        difference = (logits(options.model, ops, **shape) - truth).abs()
        found[name] = [float(difference.max()), float(difference.mean())]
        print(f"{name:16} largest {found[name][0]:.3g}  mean {found[name][1]:.3g}", flush=True)
    difference = (logits(options.model, triton, **shape) - truth).abs()
    found["all"] = [float(difference.max()), float(difference.mean())]
    print(f"{'all':16} largest {found['all'][0]:.3g}  mean {found['all'][1]:.3g}")
    print(json.dumps({"bench": "gpu_bisect", "model": options.model.name, "spread": float(truth.std()), "ops": found}))


if __name__ == "__main__":
    main()
