"""Stage 4: training on one GPU. `python -m tools.demo_model.train --out DIR --seconds 500`.

Owns the schedule: warm-up, constant rate, linear decay to zero over the last `--decay` of the run; attention is dense
for the first `--dense` of it (the indexer learns meanwhile), sparse after. Hazard: the run is planned in seconds, so
the number of steps follows the machine; the log records it.
"""

from __future__ import annotations

import argparse
import json
import lzma
import math
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from tools.demo_model import layers as L
from tools.demo_model.model import Model, Side
from tools.demo_model.optim import Optimiser
from tools.demo_model.shape import Shape, first_values, with_hashes

DATA = Path(__file__).parent / "work" / "data"
N_PARTS = 4


def load_tokens(name: str, device: str) -> Tensor:
    data = np.frombuffer(lzma.decompress((DATA / f"{name}.bin.xz").read_bytes()), dtype=np.uint16)
    return torch.from_numpy(data.astype(np.int32)).to(device)


def save(tensors: dict[str, Tensor], folder: Path) -> None:
    """bfloat16, in a few files of about equal size."""
    sizes = [0] * N_PARTS
    parts: list[dict[str, Tensor]] = [{} for _ in range(N_PARTS)]
    for name, value in sorted(tensors.items(), key=lambda t: -t[1].numel()):
        i = sizes.index(min(sizes))
        parts[i][name] = value.bfloat16()
        sizes[i] += value.numel()
    for i, part in enumerate(parts):
        torch.save(part, folder / f"model.{i}.pt")


def load(folder: Path) -> dict[str, Tensor]:
    """From a run's folder, or from a GGUF file (whose quantised values then are the start)."""
    if folder.suffix == ".gguf":
        from tools.demo_model.gguf_io import read_gguf

        return read_gguf(folder)[1]
    out: dict[str, Tensor] = {}
    for i in range(N_PARTS):
        out |= torch.load(folder / f"model.{i}.pt", map_location="cpu")
    return {name: value.float() for name, value in out.items()}


def batches(tokens: Tensor, n: int, t: int, seed: int):
    """Windows of t + 1 tokens, every epoch with another offset and order."""
    g = torch.Generator().manual_seed(seed)
    while True:
        offset = int(torch.randint(0, t, (1,), generator=g))
        starts = torch.randperm((len(tokens) - offset - 1) // t, generator=g) * t + offset
        for i in range(0, len(starts) - n + 1, n):
            at = starts[i : i + n].to(tokens.device)[:, None] + torch.arange(t + 1, device=tokens.device)
            yield tokens[at].long()


def losses(model: Model, window: Tensor, positions: Tensor) -> dict[str, Tensor | Side]:
    side, tokens, labels = Side(), window[:, :-1].contiguous(), window[:, 1:].contiguous()
    h = model.trunk(tokens, side, positions)
    main, best = model.f["head_loss"](model.head_weights(), h, labels)
    wide = model.mtp(tokens, h, side, positions)
    mtp, draft = model.f["head_loss"](model.head_weights(mtp=True), wide, labels)
    return {"main": main, "mtp": mtp, "index": torch.stack(side.indexer).mean(), "best": best, "draft": draft,
            "balance": torch.stack(side.balance).mean(), "side": side, "wide": wide}  # fmt: skip


def evaluate(model: Model, held: Tensor, n: int, t: int, positions: Tensor) -> dict[str, object]:
    """Held-out loss, acceptance of three chained drafts against the trunk's own choice, use of the experts."""
    sums, used, count = np.zeros(3), 0.0, 0
    hits, tries = np.zeros(3), np.zeros(3)
    for window in [w for w, _ in zip(batches(held, n, t, 7), range(max(1, len(held) // (n * t))), strict=False)]:
        out = losses(model, window, positions)
        sums += [float(out[k].detach()) for k in ("main", "mtp", "index")]
        used = used + torch.stack(out["side"].used).detach()
        best, state, ok = out["best"], out["wide"].detach().requires_grad_(), None
        for depth in range(3):
            if depth:
                state = model.mtp(window[:, :-1].contiguous(), state, Side(), positions).detach().requires_grad_()
                draft = model.f["head_loss"](model.head_weights(mtp=True), state, window[:, 1:].contiguous())[1]
            else:
                draft = out["draft"]
            hit = (draft == best)[:, 8:]
            tries[depth] += hit.numel() if ok is None else float(ok.sum())
            ok = hit if ok is None else ok & hit
            hits[depth] += float(ok.sum())
            ok = torch.nn.functional.pad(ok[:, :-1], (1, 0))
        count += 1
        del out
    share = used / count
    return {"loss": sums[0] / count, "mtp_loss": sums[1] / count, "indexer_kl": sums[2] / count,
            "perplexity": math.exp(sums[0] / count), "acceptance": (hits / tries).round(4).tolist(),
            "tokens": count * n * t, "expert_share": [[round(float(v), 4) for v in row] for row in share]}  # fmt: skip


def warm_up(model: Model, window: Tensor, positions: Callable[[], Tensor]) -> None:
    """Compiles the dense and the sparse form."""
    for model.sparse in (False, True):
        out = losses(model, window, positions())
        (out["main"] + out["mtp"] + out["index"] + out["balance"]).backward()
        print(f"warm, peak {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True)


def main() -> None:
    a = argparse.ArgumentParser()
    a.add_argument("--out", type=Path, required=True)
    a.add_argument("--resume", type=Path)
    a.add_argument("--seconds", type=float, default=480)
    a.add_argument("--limit", type=float, default=565, help="wall seconds of the whole command")
    a.add_argument("--batch", type=int, default=16)
    a.add_argument("--accumulate", type=int, default=2)
    a.add_argument("--context", type=int, default=4096)
    a.add_argument("--lr", type=float, default=3e-3)
    a.add_argument("--decay", type=float, default=0.4)
    a.add_argument("--dense", type=float, default=0.35)
    a.add_argument("--seed", type=int, default=0)
    o = a.parse_args()
    begun = time.time()
    torch.set_float32_matmul_precision("high")
    torch._dynamo.config.cache_size_limit = 64
    train_tokens, held = load_tokens("train", "cuda"), load_tokens("held", "cuda")
    print(f"{len(train_tokens):,} training tokens, {len(held):,} held out", flush=True)
    s = with_hashes(Shape())
    model = Model(s, load(o.resume) if o.resume else first_values(s, o.seed), dtype=torch.bfloat16).cuda()
    model.delta_rule = partial(L.delta_rule, chunk=128)
    optimiser = Optimiser(model.p)
    stream = batches(train_tokens, o.batch, o.context, o.seed)
    g = torch.Generator().manual_seed(o.seed)
    n_queries = o.context // 16

    def positions() -> Tensor:
        return (torch.arange(n_queries) * 16 + torch.randint(0, 16, (n_queries,), generator=g)).cuda()

    warm = next(batches(held, o.batch, o.context, 3))
    plain = dict(model.f)
    model.compile()
    try:
        warm_up(model, warm, positions)
    except Exception:  # noqa: BLE001 - whatever the compiler raises, the plain functions do the same
        traceback.print_exc()
        model.f = plain
        o.batch, o.accumulate = o.batch // 4, o.accumulate * 4
        stream = batches(train_tokens, o.batch, o.context, o.seed)
        print("not compiled", flush=True)
    for p in model.p.values():
        p.grad = None
    torch.cuda.synchronize()
    print(
        f"compiled after {time.time() - begun:.0f} s, {torch.cuda.max_memory_allocated() / 2**30:.0f} GiB", flush=True
    )
    o.seconds = min(o.seconds, o.limit - (time.time() - begun) - 45)
    start, step, log, per_step = time.time(), 0, [], o.batch * o.accumulate * o.context
    while (now := (time.time() - start) / o.seconds) < 1:
        model.sparse = now >= o.dense
        rate = o.lr * min(1.0, (step + 1) / 60) * min(1.0, max(0.02, (1 - now) / o.decay))
        total: dict[str, Tensor] = {}
        for _ in range(o.accumulate):
            out = losses(model, next(stream), positions())
            loss = out["main"] + 0.3 * out["mtp"] + out["index"] + 0.005 * out["balance"]
            (loss / o.accumulate).backward()
            for key in ("main", "mtp", "index", "balance"):
                total[key] = total.get(key, 0) + out[key].detach() / o.accumulate
            del out, loss
        optimiser.step(rate)
        step += 1
        if step % 10 == 0:
            row = {k: round(float(v), 4) for k, v in total.items()}
            row |= {"step": step, "tokens": step * per_step, "seconds": round(time.time() - start, 1), "lr": rate}
            log.append(row)
            if step % 100 == 0:
                print(row, f"{step * per_step / row['seconds']:,.0f} tokens/s", flush=True)
            if not math.isfinite(row["main"]):
                raise SystemExit("the loss is not finite")
        if step % 1000 == 0:
            save(model.tensors(), o.out)
    seconds = time.time() - start
    rounded = {name: value.bfloat16().float() for name, value in model.tensors().items()}
    save(rounded, o.out)
    (o.out / "log.json").write_text(json.dumps({"options": {k: str(v) for k, v in vars(o).items()}, "log": log}))
    model.load(rounded)
    model.sparse = True
    result = evaluate(model, held, o.batch, o.context, positions())
    result |= {
        "steps": step,
        "tokens_seen": step * per_step,
        "seconds": round(seconds),
        "tokens_per_s": round(step * per_step / seconds),
    }
    (o.out / "log.json").write_text(
        json.dumps({"options": {k: str(v) for k, v in vars(o).items()}, "result": result, "log": log})
    )
    print({k: v for k, v in result.items() if k != "expert_share"})
    print("least and most used expert by layer:", [(min(r), max(r)) for r in result["expert_share"]])


if __name__ == "__main__":
    main()
