"""From a plan to memory: the arena, what lies in it, the expert store, and the swing region on top.

Owns every byte an engine holds on a device, and the order in which they are made. Never serves a request.
Hazard: tensors are views of the arena; whoever keeps one past `close` reads memory that belongs to nobody.
"""

import os
from collections import Counter
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from makeway.config import EngineConfig
from makeway.device import Device
from makeway.engine.backend import Backend, Graphs
from makeway.engine.handover import Swing
from makeway.engine.planning import plan_for
from makeway.engine.warm import PromptWarmUp
from makeway.errors import UserError
from makeway.experts.loader import load_experts
from makeway.experts.policies import Policy
from makeway.experts.trace import TraceReader
from makeway.gguf import GGUFFile
from makeway.kv import BLOCK_TOKENS, KV_TYPES, KVCache, KVRoom, SequenceState, StatePool, StateShapes
from makeway.kv.prefix import PrefixCache
from makeway.memory.arena import Arena
from makeway.memory.facts import align_up
from makeway.memory.plan import MemoryPlan
from makeway.memory.rates import RATES, Rates, rates_of
from makeway.models import load_model
from makeway.models.parts import part_of

Progress = Callable[[int, int], None]


class EngineMemory:
    """Executes a plan on a device: `model`, `kv`, `swing`, and a place for each sequence."""

    def __init__(
        self,
        file: GGUFFile,
        backend: Backend,
        config: EngineConfig,
        *,
        device: Device,
        rates: Rates | None = None,
        progress: Progress | None = None,
        warming: Progress | None = None,
    ) -> None:
        """Loads the weights, compiles the kernels of prompts and captures the passes that one answer needs;
        `progress(bytes done, bytes in all)` while the experts are read, `warming(steps done, steps in all)` while
        kernels are compiled. `rates` of this machine for the plan. Raises UserError, OutOfPlan, EngineFailed; nothing
        stays allocated then."""
        self.device, self.ops, self._file, self._config = device, backend.ops, file, config
        self._backend = backend
        on_gpu = device.torch_device.type == "cuda"
        self.plan = plan_for(
            file,
            config,
            backend.numbers,
            vram_bytes=config.vram or (device.free_bytes() if on_gpu else None),
            ram_bytes=config.ram or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            rates=rates or (rates_of(device.name) if on_gpu else RATES["cpu"]),
        )
        self.arena = Arena(self.plan.arena_bytes, device)
        self._placer = _Placer(self.plan, self.arena, device)
        self.model = load_model(file, self.ops, device=device.torch_device, place=self._placer)
        device.synchronize()
        self.kv, self.states = self._caches()
        self.prefixes = PrefixCache(
            self.kv, budget_bytes=self.plan.request.prefix_bytes, needs_state=bool(self.states.shapes.shapes)
        )
        layers = self.model.store.layers[: len(self.plan.layers)]
        self.store = load_experts(file, layers, device, progress=progress)
        self.input_type = torch.bfloat16 if backend.numbers.input_itemsize == 2 else torch.float32
        try:
            self.swing = self._new_swing()
            self.graphs = self._new_graphs()
            self._warm_up(warming or (lambda done, total: None))
        except BaseException:
            self.store.close()
            raise
        self.loaded_bytes = device.link_bytes

    def open_sequence(self) -> SequenceState:
        """A fresh sequence; KV blocks come with `reserve`. Raises UserError when all places are taken."""
        return SequenceState(self.kv, self.states)

    def rebuild(self) -> None:
        """After a fault: weights and store are as they were, slots start empty in the same arena."""
        self.device.synchronize()
        self.swing = self._new_swing(after=self.swing)
        self.graphs = self._new_graphs()

    def close(self) -> None:
        """Gives everything back, the device's memory too: the model's weights are views of it."""
        self.device.synchronize()  # copies under way write into the arena
        del self.model, self.ops
        self.graphs = self.swing.decode = None
        self._backend.close()
        self.prefixes.clear()
        self.kv.close()
        self.states.close()
        self.store.close()
        self.arena.close()

    def _caches(self) -> tuple[KVCache, StatePool]:
        """KV cache and recurrent states in the regions that the plan names."""
        plan, facts, device = self.plan, self.model.facts, self.device.torch_device
        views = {r.name: self.arena.fixed(r).tensor for r in plan.regions if not r.name.startswith("weights: ")}
        trunk = [i for i in facts.kv_shapes if i < facts.n_layers]
        rooms = [KVRoom(trunk, views.get("KV cache"), views.get("indexer keys"))]
        with_mtp = plan.sizes.with_mtp
        if with_mtp:
            draft = [i for i in facts.kv_shapes if i >= facts.n_layers]
            rooms.append(KVRoom(draft, views.get("MTP KV cache"), views.get("MTP indexer keys")))
        kv = KVCache(
            {i: facts.kv_shapes[i] for room in rooms for i in room.layers},
            plan.sizes.kv_tokens // BLOCK_TOKENS,
            device=device,
            item_type=KV_TYPES[plan.request.kv_type],
            rooms=rooms,
        )
        shapes = StateShapes.of(
            facts.state_shapes, kv=kv.shapes, ple=facts.ple_tails, draft=facts.draft_tails if with_mtp else None
        )
        states = StatePool(
            shapes,
            plan.request.sequences,
            device=device,
            room=views.get("recurrent state"),
            n_kept=1 + plan.request.drafts if plan.request.drafts else 0,
            kept_room=views.get("replay rows"),
        )
        return kv, states

    def _warm_up(self, warming: Progress) -> None:
        """Compiles what prompts and one answer need."""
        if self.graphs is None:
            return
        n_drafts, with_mtp = self.plan.request.drafts, self.plan.sizes.with_mtp
        prompts = PromptWarmUp(
            self._file,
            self.model,
            self.plan,
            backend=self._backend,
            arena=self.arena,
            cache=self.swing.cache,
            kv=self.kv,
            states=self.states,
            input_type=self.input_type,
        )
        for done, total in self.graphs.warm_up(n_sequences=1, n_drafts=n_drafts, with_mtp=with_mtp):
            if done == 0:
                warming(0, total + 1)
                prompts.run()
            warming(done + 1, total + 1)

    def _new_graphs(self) -> Graphs | None:
        """Captured steps, where the backend has them."""
        assert self.swing.decode is not None
        return self._backend.graphs(
            self.model,
            self.swing.decode,
            cache=self.kv,
            states=self.states,
            context=self.plan.request.context,
        )

    def _new_swing(self, after: Swing | None = None) -> Swing:
        plan, config = self.plan, self._config
        policy = Policy(
            config.policy,
            len(plan.layers),
            n_experts=plan.sizes.n_experts,
            uploads_per_layer=config.uploads_per_layer,
            profile=None if config.profile is None else read_profile(config, plan),
        )
        return Swing(
            plan,
            self.store,
            self._backend,
            arena=self.arena,
            policy=policy,
            device=self.device,
            audits=config.audit,
            after=after,
        )


class _Placer:
    """Puts each resident tensor into the region of its part, one behind the other."""

    def __init__(self, plan: MemoryPlan, arena: Arena, device: Device) -> None:
        self._first_draft_block = plan.facts.n_layers
        self._device = device
        self._views = {
            region.name.removeprefix("weights: "): arena.fixed(region)
            for region in plan.regions
            if region.name.startswith("weights: ")
        }
        self._used: Counter[str] = Counter()

    def __call__(self, name: str, raw: Tensor) -> Tensor:
        part = part_of(name, first_draft_block=self._first_draft_block)
        if part not in self._views:
            return raw  # kept on the host: rows are read singly, or the MTP block is not used
        start = self._used[part]
        self._used[part] += align_up(raw.numel())
        target = self._views[part].tensor[start : start + raw.numel()]
        self._device.copy(target, raw)
        return target


def read_profile(config: EngineConfig, plan: MemoryPlan) -> NDArray[np.int64]:
    """Uses [layers, experts] counted in the routing trace `config.profile`. Raises UserError when it is of another
    model."""
    assert config.profile is not None
    with TraceReader(config.profile) as trace:
        counts = np.zeros((trace.header.n_layers, trace.header.n_experts), dtype=np.int64)
        for record in trace:
            for layer in range(trace.header.n_layers):
                ids = record.ids[:, layer]
                counts[layer] += np.bincount(ids[ids >= 0], minlength=trace.header.n_experts)
    wanted = (len(plan.layers), plan.sizes.n_experts)
    if counts.shape != wanted:
        raise UserError(
            f"--profile {config.profile}: recorded with {counts.shape} (layers, experts), this engine has {wanted}; "
            "record a trace of this model with --trace"
        )
    return counts
