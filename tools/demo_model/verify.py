"""Stage 6: checks a GGUF against the training model and llama.cpp on held-out text, and writes samples.

`python -m tools.demo_model.verify FILE [--reference F16FILE] [--tokens 4096] [--samples]`.
Hazard: llama.cpp's activations are 8-bit and its cache f16; equal argmax is a share, never all.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from tools.demo_model.gguf_io import read_gguf
from tools.demo_model.model import Model, Side
from tools.demo_model.quantise import Llama
from tools.demo_model.tokens import DATA

NONE = torch.empty(0, dtype=torch.int64)
PROMPTS = [
    "The database server",
    "def read_file(path):\n",
    "Anarchists argue that",
    "import os\nimport sys\n\n\nclass",
    "The following example shows how to",
]


def loss_of(logits: np.ndarray, labels: np.ndarray) -> float:
    z = torch.from_numpy(logits).double()
    return float(torch.nn.functional.cross_entropy(z, torch.from_numpy(labels.astype(np.int64))))


@torch.no_grad()
def torch_logits(path: Path, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The training model's logits (float32) and its MTP block's, on the file's dequantised weights."""
    shape, tensors = read_gguf(path)
    model, side = Model(shape, tensors), Side()
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    h = model.trunk(ids, side, NONE)
    wide = model.mtp(ids, h, side, NONE)
    return model.logits(h)[0].numpy(), model.logits(wide, mtp=True)[0].numpy()


@torch.no_grad()
def sample(path: Path, prompt: str, n: int = 90, temperature: float = 0.8) -> str:
    shape, tensors = read_gguf(path)
    model, tokenizer = Model(shape, tensors), Tokenizer.from_file(str(DATA / "tokenizer.json"))
    ids, g = [shape.eos, *tokenizer.encode(prompt).ids], torch.Generator().manual_seed(0)
    for _ in range(n):
        z = model.logits(model.trunk(torch.tensor([ids]), Side(), NONE)[:, -1:])[0, 0] / temperature
        best = z.topk(40)
        ids.append(int(best.indices[torch.multinomial(best.values.softmax(-1), 1, generator=g)]))
        if ids[-1] == shape.eos:
            break
    return tokenizer.decode(ids)


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("file", type=Path)
    a.add_argument("--reference", type=Path)
    a.add_argument("--tokens", type=int, default=4096)
    a.add_argument("--start", type=int, default=0)
    a.add_argument("--samples", action="store_true")
    a.add_argument("--json", type=Path)
    o = a.parse_args()
    held = np.frombuffer(lzma.decompress((DATA / "held.bin.xz").read_bytes()), dtype=np.uint16)
    window = held[o.start : o.start + o.tokens + 1]
    tokens, labels = window[:-1], window[1:]
    ours, draft = torch_logits(o.file, tokens)
    engine = Llama(o.file, context=o.tokens)
    theirs = engine.logits(tokens, ours.shape[1])
    engine.close()
    mine, other = loss_of(ours, labels), loss_of(theirs, labels)
    result = {
        "file": o.file.name, "bytes": o.file.stat().st_size, "tokens": o.tokens,
        "perplexity": math.exp(mine), "llama_cpp_perplexity": math.exp(other),
        "llama_cpp_over_ours": math.exp(other - mine),
        "equal_argmax": float((ours.argmax(-1) == theirs.argmax(-1)).mean()),
        "median_distance": float(np.median(np.abs(ours - theirs).max(-1))),
        "first_draft_acceptance": float((ours.argmax(-1) == draft.argmax(-1))[8:].mean()),
    }  # fmt: skip
    if o.reference:
        full = loss_of(torch_logits(o.reference, tokens)[0], labels)
        result |= {"reference_perplexity": math.exp(full), "over_reference": math.exp(mine - full)}
    print(json.dumps(result, indent=1))
    if o.json:
        o.json.write_text(json.dumps(result, indent=1) + "\n")
    if o.samples:
        for prompt in PROMPTS:
            print("-----\n" + sample(o.file, prompt), flush=True)


if __name__ == "__main__":
    main()
