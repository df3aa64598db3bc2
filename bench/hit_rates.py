"""Which knobs of a synthetic model give which hit rates: its routing of a token stream, replayed with a cache.

    python -m bench.hit_rates [--shape flash-next] [--layers 4] [--tokens 1024] [--locality 0.4,0.5,0.6] [--skew 0.25]

Runs the shape at full width with all its experts, but each of them narrow (32 values), few layers and a small
vocabulary, through the engine on the CPU; neither changes how the router is fed. Every token counts as a decode step.
Hazard: deeper layers of a deep model see residuals that hold less of the token and more of the layers before, so
hit rates over all layers differ somewhat; `bench decode` shows those of the model it runs.

Prints a table and, as the last line, one JSON object.
"""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path

from bench.policy_replay import numbers, replay

from makeway import Engine, EngineConfig, SamplingParams
from makeway.bench.shapes import SHAPES
from makeway.bench.synth import in_memory, synthesize
from makeway.bench.topics import Knobs, token_stream
from makeway.experts.policies import Gate
from makeway.experts.trace import TraceHeader, TraceReader, TraceRecord
from makeway.gguf import GGMLType

N_VOCAB = 16_384
POLICIES = {"lru": Gate(1, 1), "lfru": Gate(3, 16)}


def routing(shape, knobs: Knobs, *, n_tokens: int, topic_tokens: int) -> tuple[TraceHeader, list[TraceRecord]]:
    """A decode record for each token of a stream."""
    tokens = token_stream(n_tokens, n_vocab=shape.n_vocab, knobs=knobs, topic_tokens=topic_tokens, seed=knobs.seed)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "routing"
        with in_memory(synthesize(shape, knobs)) as file:
            config = EngineConfig(device="cpu", context=n_tokens + 1, parallel=1, trace=trace)
            with Engine(file, config) as engine:
                for _ in engine.generate(tokens.tolist(), SamplingParams(max_tokens=1)):
                    pass
        with TraceReader(trace) as reader:
            records = [r for r in reader if r.phase == "prefill"]
            return reader.header, [TraceRecord("decode", 0, step[None]) for r in records for step in r.ids]


def floats(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="flash-next", choices=("flash-next", "qwen3-30b-a3b"))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--topic-tokens", type=int, default=50)
    parser.add_argument("--locality", type=floats, default=[Knobs.locality])
    parser.add_argument("--topics", type=int, default=Knobs.n_topics)
    parser.add_argument("--skew", type=floats, default=[Knobs.skew])
    parser.add_argument("--slots", type=numbers, default=[64, 128, 150, 188, 256])
    options = parser.parse_args()
    changes = {"n_layers": options.layers, "n_vocab": N_VOCAB, "expert_ff": 32, "down": GGMLType.Q5_1}
    shape = replace(SHAPES[options.shape], **changes)
    slots = [n for n in options.slots if n < shape.n_experts]
    print(f"{'locality':>8} {'skew':>5} {'policy':<6}", *(f"{n:>6}" for n in slots), " slots of", shape.n_experts)
    rows = []
    for knobs in (Knobs(skew, locality, options.topics) for skew in options.skew for locality in options.locality):
        header, records = routing(shape, knobs, n_tokens=options.tokens, topic_tokens=options.topic_tokens)
        assert len(records) == options.tokens
        for policy, gate in POLICIES.items():
            hits = [replay(header, records, name=policy, n_slots=n, gate=gate).hit_rate for n in slots]
            print(f"{knobs.locality:>8} {knobs.skew:>5} {policy:<6}", *(f"{100 * h:>6.1f}" for h in hits), flush=True)
            named = dict(zip(map(str, slots), hits, strict=True))
            rows.append({"locality": knobs.locality, "skew": knobs.skew, "policy": policy, "hits": named})
    settings = {"shape": options.shape, "layers": options.layers, "tokens": options.tokens}
    print(
        json.dumps(
            {
                "bench": "hit_rates",
                **settings,
                "topic_tokens": options.topic_tokens,
                "topics": options.topics,
                "rows": rows,
            }
        )
    )


if __name__ == "__main__":
    main()
