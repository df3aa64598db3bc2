"""Records the routing of the demo model on held-out text: prompts from it, each with an answer, greedy.

    python -m tools.demo_model.record_trace tests/data/demo-routing.trace
    python bench/policy_replay.py tests/data/demo-routing.trace

Owns nothing but the choice of passages. Hazard: the trace is test data; a new demo model needs a new trace.
"""

import sys
from pathlib import Path

from makeway import Engine, EngineConfig, SamplingParams

ROOT = Path(__file__).parents[2]
N_PASSAGES, N_PROMPT, N_ANSWER = 8, 256, 128


def main(out: Path) -> None:
    """Write the trace; passages are spread evenly over the held-out text."""
    text = (ROOT / "tests" / "data" / "heldout.txt").read_text(encoding="utf-8")
    config = EngineConfig(device="cpu", context=1024, parallel=1, trace=out, prefix_ram=0)
    sampling = SamplingParams(max_tokens=N_ANSWER, temperature=0.8, top_p=0.95, seed=7, ignore_eos=True)
    with Engine.load(ROOT / "src" / "makeway" / "data" / "demo.gguf", config) as engine:
        tokens = engine.encode(text)
        step = (len(tokens) - N_PROMPT) // (N_PASSAGES - 1)
        for i in range(N_PASSAGES):
            for _ in engine.generate(tokens[i * step : i * step + N_PROMPT], sampling):
                pass
            print(f"passage {i + 1} of {N_PASSAGES}", file=sys.stderr)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
