"""How often the next layer's router, asked with this layer's input, names the experts that are routed then: on the CPU.

    python bench/guess_rates.py MODEL.gguf [--text FILE] [--tokens 512]      (one JSON line last)

What decode's guesses rest on (experts/guess.py), without slots: of all routed experts of layers 1 and up, the share
that is among the guessed top-k, and the share for each place of a guess, likeliest first. Chance is top-k / experts.
"""

import argparse
import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "src"))

from makeway.experts.executors import DirectExperts
from makeway.experts.routed import RoutedInput
from makeway.gguf import open_gguf
from makeway.kernels import REFERENCE
from makeway.kv import Batch, KVCache, SequenceState, StatePool, StateShapes
from makeway.models import load_model
from makeway.models.base import run_trunk
from makeway.text import Tokenizer


class Watched:
    """Runs the experts, and keeps what every layer was given and chose."""

    def __init__(self, experts: DirectExperts) -> None:
        self._experts = experts
        self.seen: list[RoutedInput] = []

    def __call__(self, layer: int, moe: RoutedInput) -> None:
        assert layer == len(self.seen)
        self.seen.append(RoutedInput(moe.x.clone(), moe.ids.clone(), moe.weights, moe.acc))
        self._experts(layer, moe)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parent.parent / "docs/how-it-works.md")
    parser.add_argument("--tokens", type=int, default=512)
    options = parser.parse_args()
    with open_gguf(options.model) as file:
        model = load_model(file, REFERENCE, device=torch.device("cpu"))
        facts = model.facts
        tokenizer = Tokenizer.from_metadata(file.metadata, source=str(options.model))
        tokens = tokenizer.encode(options.text.read_text())[: options.tokens]
        cache = KVCache(facts.kv_shapes, len(tokens) // 64 + 2, device=model.device)
        shapes = StateShapes.of(facts.state_shapes, kv=facts.kv_shapes, ple=facts.ple_tails)
        sequence = SequenceState(cache, StatePool(shapes, 1, device=model.device, n_kept=8))
        sequence.reserve(len(tokens))
        watched = Watched(DirectExperts(model.store, REFERENCE))
        run_trunk(model, watched, Batch.of([(sequence, tokens)], device=model.device))
        rows = []
        for layer in range(1, facts.n_layers):
            logits = REFERENCE.linear(watched.seen[layer - 1].x, model.router(layer))
            guessed, _ = REFERENCE.route(logits, facts.top_k)
            right = (guessed[:, :, None] == watched.seen[layer].ids[:, None, :]).any(2).float()
            rows.append([float(right[:, i].mean()) for i in range(facts.top_k)])
            print(f"layer {layer:3}  {100 * sum(rows[-1]) / facts.top_k:5.1f} %")
    places = [sum(row[i] for row in rows) / len(rows) for i in range(facts.top_k)]
    share, chance = sum(places) / len(places), facts.top_k / facts.n_experts
    print(f"guessed right {100 * share:.1f} % (chance {100 * chance:.1f} %); by place {[round(p, 2) for p in places]}")
    result = {"bench": "guess_rates", "model": facts.name, "tokens": len(tokens), "right": share, "places": places}
    print(json.dumps(result | {"chance": chance, "layers": [sum(row) / len(row) for row in rows]}))


if __name__ == "__main__":
    main()
