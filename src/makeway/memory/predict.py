"""Predictions from a plan: bytes over the link, seconds to the first token, seconds of a decode step.

Owns the formulas; never decides a size. Each prediction shows its parts, so that a measured run can be
laid beside it. Hazard: rates here are a roofline (link, FLOPs, device bytes), so a prediction is a bound
with overheads, not a promise.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from makeway.memory.facts import ExpertLayerFacts

if TYPE_CHECKING:
    from makeway.memory.plan import Lending, MemoryPlan


CLUSTERING = 4
"""Tokens of a text that together choose as many experts as one that routes on its own: routing is local (an eighth of
the experts serves two thirds of the look-ups on the real model). Moves only time, never bits."""


HIDDEN = 0.4
"""Share of the shorter one of a step's link and computation that hides behind the other where misses are guessed:
measured on an H200, 0.38 (Flash-Next, 82 % hits) to 0.45 (no hits)."""


@dataclass(frozen=True)
class TtftPrediction:
    """Time to first token. Work (link, flops, hbm bytes) and the seconds each would take alone.

    `total_s` overlaps copies and compute: per sweep the longer of the two when all experts are copied;
    routed-only copies wait for the router of their layer. `restore_s` runs behind the first tokens.
    """

    lending: "Lending"
    link_bytes: int
    flops: int
    hbm_bytes: int
    link_s: float
    flops_s: float
    hbm_s: float
    overhead_s: float
    restore_s: float
    total_s: float
    tokens_per_s: float


@dataclass(frozen=True)
class DecodePrediction:
    """One step of `rows` rows: misses over the link, the larger of device bytes and FLOPs, and overheads. With guesses
    HIDDEN of the shorter one of link and computation hides behind the other."""

    rows: int
    hit_rate: float
    link_bytes: int
    flops: int
    hbm_bytes: int
    link_s: float
    flops_s: float
    hbm_s: float
    overhead_s: float
    step_s: float
    steps_per_s: float


def distinct_share(n_experts: int, top_k: int, n_tokens: int) -> float:
    """Expected share of a layer's experts that `n_tokens` route to, were routing uniform: 1 - (1 - k/E)^n.

    Real routing is skewed and clustered, so this is an upper estimate; for prompts see `prompt_share`.
    """
    return float(1.0 - (1.0 - top_k / n_experts) ** n_tokens)


def prompt_share(n_experts: int, top_k: int, n_tokens: int) -> float:
    """Expected share of a layer's experts that a prompt of `n_tokens` routes to: as many as `n_tokens` / `CLUSTERING`
    tokens that route uniformly (at least one)."""
    return distinct_share(n_experts, top_k, max(1, n_tokens // CLUSTERING))


def copied_bytes(layers: Sequence[ExpertLayerFacts], n_kept: int, n_tokens: int, *, copies_all: bool) -> int:
    """Bytes one sweep of `n_tokens` copies with `n_kept` experts of each layer in place.

    Exact when everything is copied; for routed-only sweeps the expectation of `prompt_share`.
    """
    total = 0
    for layer in layers:
        absent_bytes = (layer.n_experts - min(n_kept, layer.n_experts)) * layer.expert_bytes
        share = 1.0 if copies_all else prompt_share(layer.n_experts, layer.top_k, n_tokens)
        total += absent_bytes if copies_all else int(absent_bytes * share)
    return total


def sweep_flops(plan: "MemoryPlan", n_tokens: int) -> tuple[int, int]:
    """(mixer and dense, routed experts) FLOPs of a prompt of `n_tokens` from position 0."""
    facts = plan.facts
    pairs = n_tokens * (n_tokens + 1) // 2
    budget = min(n_tokens, facts.attention_budget_tokens or n_tokens)
    seen = budget * (budget + 1) // 2 + (n_tokens - budget) * budget
    dense = n_tokens * facts.dense_flops_per_token
    dense += seen * facts.attention_flops_per_pair + pairs * facts.indexer_flops_per_pair
    return dense, n_tokens * facts.expert_flops_per_token(False)


def _sweep_hbm_bytes(plan: "MemoryPlan", lending: "Lending") -> tuple[int, int]:
    """(mixer, experts) device bytes of all sweeps: weights once per chunk; experts read, decoded, read."""
    facts = plan.facts
    chunk = min(lending.shape.chunk, lending.sweep_tokens)
    n_chunks = lending.n_sweeps * -(-lending.sweep_tokens // chunk)
    weights = facts.resident_bytes(on_host=False, is_mtp=False)
    share = 1.0 if lending.copies_all else None
    experts = 0
    for layer in plan.sizes.sweep_layers:
        part = share or prompt_share(layer.n_experts, layer.top_k, lending.sweep_tokens)
        decoded = 3 * facts.hidden * layer.width * facts.decoded_itemsize
        experts += int(layer.n_experts * part * (layer.expert_bytes + 2 * decoded))
    per_token = sum(n_bytes for _, n_bytes in facts.sweep_bytes_per_token())
    hidden = lending.n_tokens * 3 * per_token * facts.n_layers
    return n_chunks * weights + hidden, lending.n_sweeps * experts


def prefill_s(plan: "MemoryPlan", lending: "Lending") -> tuple[float, float, float, float]:
    """(total, link, mixer, experts) seconds of all sweeps of a lending."""
    rates = plan.rates
    dense, routed = sweep_flops(plan, lending.n_tokens)
    mixer_hbm, expert_hbm = _sweep_hbm_bytes(plan, lending)
    link_s = lending.copied_bytes / rates.link_bytes_per_s
    overhead_s = lending.n_sweeps * plan.facts.n_layers * rates.layer_overhead_s
    mixer_s = max(dense / rates.flops_per_s, mixer_hbm / rates.hbm_bytes_per_s) + overhead_s
    expert_s = max(routed / rates.flops_per_s, expert_hbm / rates.hbm_bytes_per_s)
    total_s = max(link_s, mixer_s + expert_s) if lending.copies_all else mixer_s + max(link_s, expert_s)
    return total_s, link_s, mixer_s, expert_s


def lending_cost_s(plan: "MemoryPlan", lending: "Lending") -> float:
    """Seconds that a way of running a prompt costs: its sweeps, and putting back what was lent."""
    return prefill_s(plan, lending)[0] + lending.restored_bytes / plan.rates.link_bytes_per_s


def copy_all_from(plan: "MemoryPlan") -> int:
    """Tokens of a sweep from which copying every absent expert ahead beats copying the routed ones late.

    Copying all hides behind the mixers of the same layers; routed-only copies start after each router.
    """

    def all_wins(n_tokens: int) -> bool:
        base = plan.lending(n_tokens, n_tokens, plan.stay_shape, n_kept=plan.decode.n_ranks)
        times = []
        for copies_all in (True, False):
            copied = copied_bytes(plan.sizes.sweep_layers, plan.n_slots, n_tokens, copies_all=copies_all)
            way = replace(base, copied_bytes=copied, copies_all=copies_all)
            times.append(prefill_s(plan, way)[0])
        return times[0] <= times[1]

    low, high = 1, max(1, plan.request.context)
    while low < high:
        middle = (low + high) // 2
        if all_wins(middle):
            high = middle
        else:
            low = middle + 1
    return low


def predict_ttft(plan: "MemoryPlan", n_tokens: int) -> TtftPrediction:
    """Time to first token of a prompt of `n_tokens` on an idle engine with a full cache."""
    rates = plan.rates
    lending = plan.lend_for(n_tokens)
    total_s, link_s, _, _ = prefill_s(plan, lending)
    flops = sum(sweep_flops(plan, n_tokens))
    hbm_bytes = sum(_sweep_hbm_bytes(plan, lending))
    return TtftPrediction(
        lending=lending,
        link_bytes=lending.copied_bytes,
        flops=flops,
        hbm_bytes=hbm_bytes,
        link_s=link_s,
        flops_s=flops / rates.flops_per_s,
        hbm_s=hbm_bytes / rates.hbm_bytes_per_s,
        overhead_s=lending.n_sweeps * plan.facts.n_layers * rates.layer_overhead_s,
        restore_s=lending.restored_bytes / rates.link_bytes_per_s,
        total_s=total_s,
        tokens_per_s=n_tokens / total_s,
    )


def predict_decode(plan: "MemoryPlan", hit_rate: float, rows: int, *, context_tokens: int = 0) -> DecodePrediction:
    """One step of `rows` rows whose distinct routed experts are found in slots at `hit_rate` (0..1).

    `context_tokens` per row are read from the KV cache (at most the sparse budget). A row of a real text
    shares experts with its neighbours, so the distinct experts are an upper estimate.
    """
    if not 0.0 <= hit_rate <= 1.0:
        raise ValueError("hit_rate is a share between 0 and 1")
    facts, rates = plan.facts, plan.rates
    used = 0.0
    for layer in plan.layers:
        n_distinct = layer.n_experts * distinct_share(layer.n_experts, layer.top_k, rows)
        used += n_distinct * layer.expert_bytes
    link_bytes = int(used * (1.0 - hit_rate))
    seen = min(context_tokens, facts.attention_budget_tokens or context_tokens)
    kv_bytes = seen * facts.kv_bytes_per_token[plan.request.kv_type]
    kv_bytes += context_tokens * facts.indexer_bytes_per_token.get(plan.request.kv_type, 0)
    weights = facts.resident_bytes(on_host=False, is_mtp=False)
    if plan.sizes.with_mtp:
        weights += facts.resident_bytes(on_host=False, is_mtp=True)
    hbm_bytes = weights + int(used) + rows * (kv_bytes + 2 * facts.state_bytes_per_sequence)
    per_row = facts.dense_flops_per_token + facts.expert_flops_per_token(plan.sizes.with_mtp)
    per_row += seen * facts.attention_flops_per_pair + context_tokens * facts.indexer_flops_per_pair
    link_s = link_bytes / rates.fetch_bytes_per_s
    hbm_s = hbm_bytes / rates.hbm_bytes_per_s
    flops_s = rows * per_row / rates.flops_per_s
    overhead_s = rates.step_overhead_s + len(plan.layers) * rates.step_layer_overhead_s
    compute_s = max(hbm_s, flops_s) + overhead_s
    step_s = link_s + compute_s - (HIDDEN * min(link_s, compute_s) if plan.request.guesses else 0)
    return DecodePrediction(
        rows=rows,
        hit_rate=hit_rate,
        link_bytes=link_bytes,
        flops=rows * per_row,
        hbm_bytes=hbm_bytes,
        link_s=link_s,
        flops_s=flops_s,
        hbm_s=hbm_s,
        overhead_s=overhead_s,
        step_s=step_s,
        steps_per_s=1.0 / step_s if step_s > 0 else float("inf"),
    )
