"""From a configuration to the plan that an engine executes, the same for `makeway plan` as for the engine itself.

Owns what "auto" means for every setting that the planner needs. Never allocates and never looks at tensors.
Hazard: numbers of a backend are part of the plan; a plan for other kernels than those that run is worthless.
"""

from dataclasses import dataclass, replace

import torch

from makeway.config import EngineConfig
from makeway.engine.depth import Drafting
from makeway.errors import UserError
from makeway.gguf import GGUFFile
from makeway.kernels import REFERENCE
from makeway.kv import BLOCK_TOKENS
from makeway.memory.facts import PlanFacts
from makeway.memory.plan import MemoryPlan, minimum_vram, plan_memory
from makeway.memory.rates import Rates
from makeway.memory.sizes import DEFAULT_PREFIX_BYTES, DEFAULT_RESERVE_BYTES, TARGET_SWEEP_TOKENS, PlanRequest
from makeway.models import ModelFacts, load_model
from makeway.models.plan_facts import plan_facts

DEFAULT_CONTEXT = 8192
ROOMY_CHUNK = 512  # tokens of a chunk that a CPU is given room for
CHUNK_BYTES = 1 << 30  # activations between the kernels of a chunk, which torch allocates beside the arena
SCRATCH_BYTES = CHUNK_BYTES + (256 << 20)  # the same, what the kernels share, and what the allocator leaves unused
GUESSES = 8  # a layer: four in each round


@dataclass(frozen=True)
class Numbers:
    """What a backend means for a plan: type of the KV cache unless asked for, bytes of a value of the residual and of
    the input of a sweep's experts, VRAM that stays unplanned, how much of it passes between a chunk's kernels, and the
    misses of a layer that decode guesses, at most: a power of two in each round."""

    kv_type: str
    residual_itemsize: int
    input_itemsize: int
    reserve_bytes: int
    scratch_bytes: int = 0
    guesses: int = 0


CPU_NUMBERS = Numbers("f32", 4, 4, 0)
GPU_REFERENCE_NUMBERS = Numbers("f32", 4, 4, DEFAULT_RESERVE_BYTES + CHUNK_BYTES)
TRITON_NUMBERS = Numbers("f16", 4, 2, DEFAULT_RESERVE_BYTES + SCRATCH_BYTES, CHUNK_BYTES, GUESSES)


def plan_for(
    file: GGUFFile,
    config: EngineConfig,
    numbers: Numbers,
    *,
    vram_bytes: int | None,
    ram_bytes: int | None,
    rates: Rates,
) -> MemoryPlan:
    """The plan of an engine with this configuration.

    `vram_bytes` None: what holds every expert in a slot and long sweeps, at most a quarter of `ram_bytes` (a CPU
    pretends to have it). `ram_bytes` None: not checked. Raises UserError, OutOfPlan.
    """
    # A model opens as views; only its small vectors are read.
    facts = load_model(file, REFERENCE, device=torch.device("cpu")).facts
    planned = plan_facts(
        file, facts, residual_itemsize=numbers.residual_itemsize, input_itemsize=numbers.input_itemsize
    )
    drafting = Drafting.of(config, has_mtp=facts.n_draft_layers > 0)
    request = PlanRequest(
        vram_bytes=vram_bytes or 0,
        context=_context(facts, config.context),
        ram_bytes=ram_bytes,
        sequences=config.parallel,
        drafts=drafting.depth,
        mtp="mtp" in drafting.sources,
        kv_type=config.kv_type or numbers.kv_type,
        chunk=config.chunk,
        slots=config.slots,
        sweep_tokens=config.sweep_tokens,
        handover=config.handover,
        uploads_per_layer=config.uploads_per_layer,
        guesses=numbers.guesses if config.guesses else 0,
        kv_block_tokens=BLOCK_TOKENS,
        reserve_bytes=numbers.reserve_bytes,
        scratch_bytes=numbers.scratch_bytes,
        prefix_bytes=DEFAULT_PREFIX_BYTES if config.prefix_ram is None else config.prefix_ram,
    )
    if vram_bytes is None:
        request = replace(request, vram_bytes=_roomy(planned, request))
    return plan_memory(planned, request, rates=rates)


def _context(facts: ModelFacts, wanted: int | None) -> int:
    longest = facts.context_length
    if wanted is None:
        return min(longest, DEFAULT_CONTEXT)
    if wanted > longest:
        raise UserError(f"--context {wanted}: the model's longest context is {longest}; use at most that")
    return wanted


def _roomy(facts: PlanFacts, request: PlanRequest) -> int:
    """All experts in slots, and room for long sweeps in chunks that are worth their overhead; with a number of slots
    that was asked for, no more than these need."""
    least = minimum_vram(facts, request)
    if request.slots is not None:
        return least
    roomy = replace(
        request,
        slots=max(layer.n_experts for layer in facts.expert_layers),
        chunk=request.chunk or ROOMY_CHUNK,
        sweep_tokens=request.sweep_tokens or min(request.context, TARGET_SWEEP_TOKENS),
    )
    everything = minimum_vram(facts, roomy)
    return max(least, everything if request.ram_bytes is None else min(everything, request.ram_bytes // 4))
