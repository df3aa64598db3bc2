"""Bytes over the link, both ways: sweeps that borrow what they need, and the way the system this follows works.

That way, the control arm: a prompt of any length takes every slot, goes through the model in micro-batches that each
stream all experts, then every slot is filled again. It exists here only: an engine whose plan always lends everything,
sweeps no more than a micro-batch, and copies all experts for each. Same model, same memory, same slots, and the tokens
must be the same.

python bench/control_arm.py [--micro-batch 256] [--slots 12] [--prompts 1024 24 300 24] [MODEL.gguf]
"""

import argparse
import json
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from unittest import mock

import torch

from makeway import Engine, EngineConfig, SamplingParams
from makeway.engine import memory
from makeway.memory.plan import MemoryPlan

N_ANSWER = 16
TEXT = Path(__file__).resolve().parent.parent / "tests" / "data" / "heldout.txt"
PLAN_FOR = memory.plan_for


def streams_all(*args, **options) -> MemoryPlan:
    """The plan, but every sweep copies all experts however few tokens it has."""
    return replace(PLAN_FOR(*args, **options), copy_all_tokens=1)


def serve(path: Path, config: EngineConfig, prompts: list[list[int]], *, is_control: bool) -> tuple[list[dict], int]:
    """One prompt after the other with its answer: tokens and bytes of each, and the device memory of the plan."""
    way = mock.patch.object(memory, "plan_for", streams_all) if is_control else nullcontext()
    rows = []
    with way, Engine.load(path, config) as engine:
        for prompt in prompts:
            before = engine.status()["experts"]["link_bytes"]
            events = engine.generate(prompt, SamplingParams(max_tokens=N_ANSWER, ignore_eos=True))
            tokens = [e.token for e in events if e.kind == "token"]
            while engine.busy:
                engine.step()
            status = engine.status()
            last, moved = status["handovers"]["last"], status["experts"]["link_bytes"] - before
            rows.append(
                {
                    "tokens": tokens,
                    "n_prompt": len(prompt),
                    "lent": last["n_lent"],
                    "sweeps": last["copied_bytes"],
                    "restored": last["restored_bytes"],
                    "answer": moved - last["copied_bytes"] - last["restored_bytes"],
                    "total": moved,
                }
            )
        return rows, engine.plan.request.vram_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", type=Path, default=resources.files("makeway") / "data" / "demo.gguf")
    parser.add_argument(
        "--micro-batch", type=int, default=256, help="2048 in the original; the demo's context is short"
    )
    parser.add_argument("--slots", type=int, default=12)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--prompts", type=int, nargs="+", default=[1024, 24, 300, 24])
    args = parser.parse_args()
    torch.set_num_threads(1)
    common = {
        "device": "cpu",
        "context": args.context,
        "parallel": 1,
        "slots": args.slots,
        "prefix_ram": 0,
        "drafter": "none",
    }
    control = EngineConfig(handover="always", sweep_tokens=args.micro_batch, chunk=args.micro_batch, **common)
    with Engine.load(args.model, control) as engine:
        text = engine.encode(TEXT.read_text(encoding="utf-8"))
        set_bytes = sum(layer.n_experts * layer.expert_bytes for layer in engine.plan.layers)
    prompts = [text[sum(args.prompts[:i]) :][:n] for i, n in enumerate(args.prompts)]
    old, vram = serve(args.model, control, prompts, is_control=True)
    new, _ = serve(args.model, EngineConfig(vram=vram, **common), prompts, is_control=False)
    assert [row["tokens"] for row in old] == [row["tokens"] for row in new], "tokens differ between the two ways"
    print(f"experts {set_bytes / 1e6:.2f} MB; {args.slots} slots a layer; --vram {vram}; tokens of both ways are equal")
    print("bytes over the link, in sets of all experts:\n")
    print("| prompt | way | ranks lent | sweeps | restored | answer of 16 | total |")
    print(f"|{' --- |' * 7}")
    for before, after in zip(old, new, strict=True):
        for way, row in (("micro-batches", before), ("sweeps", after)):
            parts = " | ".join(f"{row[key] / set_bytes:.2f}" for key in ("sweeps", "restored", "answer", "total"))
            print(f"| {row['n_prompt']} | {way} | {row['lent']} | {parts} |")
    ratio = sum(row["total"] for row in old) / sum(row["total"] for row in new)
    print(f"\nin all {ratio:.2f} times as many bytes the old way\n")
    for row in (*old, *new):
        del row["tokens"]
    print(
        json.dumps(
            {
                "bench": "control_arm",
                "model": Path(str(args.model)).name,
                "micro_batch": args.micro_batch,
                "slots": args.slots,
                "vram_bytes": vram,
                "expert_bytes": set_bytes,
                "micro_batches": old,
                "sweeps": new,
                "ratio": ratio,
            }
        )
    )


if __name__ == "__main__":
    main()
