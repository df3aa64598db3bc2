"""Synthetic routing: Zipf-skewed experts with temporal locality, for tests of policies and of the replay."""

from pathlib import Path

import numpy as np

from makeway.experts.trace import TraceHeader, TraceRecord, TraceWriter


def synthetic_routing(
    n_steps: int,
    *,
    n_layers: int,
    n_experts: int,
    top_k: int,
    rows: int = 1,
    skew: float = 0.8,
    locality: float = 0.6,
    window: int = 8,
    seed: int = 0,
) -> np.ndarray:
    """ids int32 [n_steps, rows, n_layers, top_k], distinct within a row.

    An expert's rank (a permutation per layer) gives weight rank^-skew; with probability `locality` an expert
    is instead drawn from those of the last `window` steps of its layer.
    """
    random = np.random.default_rng(seed)
    weights = np.arange(1, n_experts + 1) ** -skew
    weights /= weights.sum()
    order = np.stack([random.permutation(n_experts) for _ in range(n_layers)])
    ids = np.empty((n_steps, rows, n_layers, top_k), dtype=np.int32)
    for layer in range(n_layers):
        for step in range(n_steps):
            recent = ids[max(0, step - window) : step, :, layer].reshape(-1)
            for row in range(rows):
                chosen: list[int] = []
                while len(chosen) < top_k:
                    if recent.size and random.random() < locality:
                        expert = int(recent[random.integers(recent.size)])
                    else:
                        expert = int(order[layer, random.choice(n_experts, p=weights)])
                    if expert not in chosen:
                        chosen.append(expert)
                ids[step, row, layer] = chosen
    return ids


def records_of(ids: np.ndarray) -> list[TraceRecord]:
    """One decode record per step."""
    return [TraceRecord("decode", 0, step) for step in ids]


def write_trace(path: Path, header: TraceHeader, ids: np.ndarray, *, prompt: np.ndarray | None = None) -> None:
    """A trace with an optional prompt [n_tokens, n_layers, top_k], then the decode steps."""
    with TraceWriter(path, header) as writer:
        if prompt is not None:
            writer.write("prefill", prompt)
        for step in ids:
            writer.write("decode", step)
