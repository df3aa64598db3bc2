"""The status document: what runs, on what, how many bytes, and what the cache and the hand-overs did.

Owns the names in the document. Never changes anything. Hazard: programs read it, so a name is an interface.
"""

from dataclasses import asdict
from typing import Any

from makeway.engine.loop import Loop
from makeway.engine.memory import EngineMemory
from makeway.gguf import GGUFFile


def status_document(memory: EngineMemory, loop: Loop, *, kernels: str, file: GGUFFile) -> dict[str, Any]:
    """Plain values only; bytes, seconds, tokens and counts."""
    plan, facts, swing = memory.plan, memory.model.facts, memory.swing
    swing.phases.count()
    counters, totals = swing.cache.counters, loop.totals
    routed = counters.hits + counters.misses
    drafting, drafts = loop.speculation.drafting, totals.drafts
    return {
        "phase": str(loop.phase),
        "failure": loop.failure,
        "model": {"architecture": facts.architecture, "name": facts.name, "n_layers": facts.n_layers},
        "device": str(memory.device.torch_device),
        "device_name": memory.device.name,
        "kernels": kernels,
        "kernel_notes": dict(memory.ops.notes),
        "file_bytes": file.n_bytes,
        "expert_bytes": memory.model.store.nbytes,
        "kv_bytes": memory.kv.nbytes,
        "context": plan.request.context,
        "parallel": plan.request.sequences,
        "plan": {
            "vram_bytes": plan.request.vram_bytes,
            "arena_bytes": plan.arena_bytes,
            "reserve_bytes": plan.reserve_bytes,
            "host_bytes": plan.host_bytes,
            "kv_type": plan.request.kv_type,
            "slots": plan.n_slots,
            "spares": plan.n_spares,
            "rows": plan.rows,
            "chunk": plan.shape.chunk,
            "max_sweep_tokens": plan.max_sweep_tokens,
            "short_sweep_tokens": plan.short_sweep_tokens,
            "lend_from_tokens": plan.lend_from_tokens,
            "copy_all_tokens": plan.copy_all_tokens,
            "handover": plan.request.handover,
            "uploads_per_layer": plan.request.uploads_per_layer,
            "guesses_per_layer": plan.request.guesses,
        },
        "experts": {
            "policy": swing.cache.policy.name,
            "published": swing.cache.table.n_published,
            "slots": plan.n_slots * len(plan.layers),
            "hits": counters.hits,
            "misses": counters.misses,
            "hit_rate": counters.hits / routed if routed else None,
            "uploads": counters.uploads,
            "evictions": counters.evictions,
            "guesses": counters.guesses,
            "right_guesses": counters.right_guesses,
            "link_bytes": counters.link_bytes,
            "yield": counters.served_bytes / counters.upload_bytes if counters.upload_bytes else None,
        },
        "link": {
            "bytes": memory.device.link_bytes,
            "n_copies": memory.device.n_copies,
            "loaded_bytes": memory.loaded_bytes,
            "rate_bytes_per_s": plan.rates.link_bytes_per_s,
        },
        "phases": {str(phase): asdict(totals) for phase, totals in swing.phases.totals.items()},
        "handovers": {
            "n": swing.n_handovers,
            "is_refilling": swing.is_refilling,
            "last": None if swing.last is None else asdict(swing.last),
        },
        "prefixes": {
            "bytes": memory.prefixes.nbytes,
            "budget_bytes": memory.prefixes.budget_bytes,
            "n": len(memory.prefixes),
            "hits": memory.prefixes.n_hits,
            "hit_tokens": memory.prefixes.n_hit_tokens,
        },
        "drafts": {
            "drafter": drafting.name,
            "depth": drafting.depth,
            "is_auto": drafting.is_auto,
            **asdict(drafts),
            "acceptance": drafts.acceptance,
            "tokens_per_step": drafts.tokens_per_step,
        },
        "n_waiting": len(loop.scheduler.waiting),
        "n_running": len(loop.scheduler.running),
        **{name: value for name, value in asdict(totals).items() if name != "drafts"},
    }
