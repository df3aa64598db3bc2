"""A golden model, its experts in a planned arena, and a device that keeps its own tally."""

import numpy as np
import torch

from makeway.device import CpuDevice
from makeway.experts.cache import ExpertCache
from makeway.experts.cached import CachedExperts
from makeway.experts.loader import load_experts
from makeway.experts.pieces import ReferencePieces
from makeway.experts.policies import Gate, Policy
from makeway.experts.refill import Refill
from makeway.experts.streamed import StreamedExperts
from makeway.kernels import REFERENCE
from makeway.kv import Batch
from makeway.memory.arena import Arena
from makeway.memory.plan import Region, minimum_vram, plan_memory
from makeway.memory.sizes import PlanRequest
from makeway.models.base import run_trunk
from makeway.models.plan_facts import plan_facts
from tests.conftest import golden_path
from tests.devices import RecordingDevice
from tests.models.runner import Runner

FILES = ("qwen4exp-k96-UD-Q4_K_XL.gguf", "qwen35moe-base-bf16.gguf", "qwen3moe-base-bf16.gguf")


class Rig:
    """Slots of one golden model, decode layout published."""

    def __init__(self, file, *, slots, policy="lru", gate=None, uploads=2, guesses=0, device=None, ops=REFERENCE):
        self.runner = Runner(golden_path(file))
        facts = plan_facts(self.runner.file, self.runner.model.facts)
        request = {
            "context": 256,
            "slots": slots,
            "uploads_per_layer": uploads,
            "guesses": guesses,
            "reserve_bytes": 0,
        }
        least = minimum_vram(facts, PlanRequest(vram_bytes=0, **request))
        ring = 2 * facts.expert_layers[0].n_experts * max(layer.stride_bytes for layer in facts.expert_layers)
        self.plan = plan_memory(facts, PlanRequest(vram_bytes=least + ring, **request))
        self.arena = Arena(self.plan.arena_bytes, CpuDevice())
        self.device = device or RecordingDevice()
        self.ops = ops
        n_layers, n_experts = len(self.plan.layers), self.plan.sizes.n_experts
        profile = np.random.default_rng(3).random((n_layers, n_experts)) if policy == "static" else None
        self.policy = Policy(
            policy,
            n_layers,
            n_experts=n_experts,
            uploads_per_layer=uploads,
            gate=gate or Gate(1, 4),
            profile=profile,
        )
        store = load_experts(self.runner.file, self.runner.model.store.layers, self.device)
        slots_view, self.transient, _ = self.arena.layout(self.plan.decode.regions)
        self.cache = ExpertCache(store, self.plan, slots_view, policy=self.policy, device=self.device)

    @property
    def layers(self):
        """The layers of the store that the plan holds."""
        return self.cache.store.layers[: len(self.plan.layers)]

    def lend(self, n_kept):
        """Lends, and says [n, 2] (layer, expert) who lost a slot."""
        before = self.cache.table.is_published()
        self.cache.lend(n_kept)
        return np.argwhere(before & ~self.cache.table.is_published())

    def restore(self, n_per_layer):
        """Publish experts 0, 2, 4, ... of every layer."""
        wishes = [(i, 2 * e) for e in range(n_per_layer) for i in range(len(self.layers))]
        wishes = [(i, e) for i, e in wishes if e < self.layers[i].n_experts]
        return self.refill([i for i, _ in wishes], [e for _, e in wishes])

    def refill(self, layers, experts):
        """Fill free slots with these experts, first wishes first, and wait; returns how many found room."""
        refill = Refill(self.cache, np.stack([layers, experts], axis=1), batch_bytes=1 << 30)
        n = 0
        while not refill.is_done:
            n += refill.wait()
        return n

    def streamed(self, *, piece, copies_all, buffers=2, n_kept=None, pieces=None):
        """Publish a prefill layout with a ring of `buffers` pieces behind the kept ranks."""
        n_ranks = self.plan.decode.n_ranks if n_kept is None else n_kept
        kept = Region("kept slots", self.plan.swing.offset, n_ranks * self.plan.decode.rank_bytes)
        ring = Region("ring", kept.end, buffers * piece * self.plan.sizes.stride_bytes)
        kept_view, ring_view = self.arena.layout([kept, ring])
        self.cache.attach(kept_view)
        pieces = pieces or ReferencePieces(self.cache.store, self.ops, arena=self.arena.whole)
        return StreamedExperts(self.cache, pieces, ring=ring_view, piece_experts=piece, copies_all=copies_all)

    def cached(self, *, n_transient=None):
        """Publish the decode layout again; `n_transient` cuts the transient region to so many experts."""
        transient = self.plan.decode.transient
        if n_transient is not None:
            n_bytes = n_transient * self.plan.sizes.stride_bytes
            transient = Region("transient region", transient.offset, n_bytes)
        slots_view, transient_view = self.arena.layout([self.plan.decode.slots, transient])
        self.cache.attach(slots_view)
        return CachedExperts(self.cache, self.ops, transient=transient_view)


def decode(runner, experts, sequence, *, token, n_steps, end_step=lambda: None):
    """Greedy tokens and logits of `n_steps` steps of one row."""
    tokens, logits = [], []
    for _ in range(n_steps):
        sequence.reserve(1)
        h = run_trunk(runner.model, experts, Batch.of([(sequence, [token])], device=runner.model.device))
        logits.append(runner.model.head(h))
        token = int(logits[-1][0].argmax())
        tokens.append(token)
        end_step()
    return tokens, torch.cat(logits)
