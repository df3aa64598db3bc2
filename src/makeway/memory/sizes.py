"""How big each part of the arena must be for a request: the formulas behind the plan.

Owns `PlanRequest` (what the user asked for) and `Sizes` (bytes that follow from facts and request, before
any budget is known); never decides how many slots there are or what is lent (`plan.py` does).
Hazard: `Sizes.need_bytes` must never shrink when a sweep gets longer, or a plan would not hold for every
prompt length.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from makeway.errors import UserError
from makeway.memory.facts import ExpertLayerFacts, PlanFacts, align_up

MIB = 1 << 20
GIB = 1 << 30

Handover = Literal["auto", "never", "always"]

MAX_ROWS = 8  # token rows of a decode step; see the glossary
SHORT_TOKENS = 256  # a prompt of so many tokens never needs a loan: the room is part of the decode layout
NEVER_TOKENS = 2048  # sweep length that `handover="never"` keeps room for, unless given
TARGET_SWEEP_TOKENS = 32768  # a smaller chunk and ring are chosen before sweeps get shorter than this
TILE_ROWS_PER_EXPERT = 256  # (token, expert) rows of MoE scratch per expert of a piece
GUESS_ROUNDS = (2, 1)  # a layer's misses are guessed so many layers before it, in turn
GUESS_LISTS = GUESS_ROUNDS[0] + 1  # layers whose guesses are under way at once
LONGEST_CHUNK = 8192  # tokens; beyond this nothing is gained
SHORT_PIECE = 16  # experts of a piece when nothing is lent, if three such pieces are worth no more than a slot a layer
DEFAULT_RESERVE_BYTES = 768 * MIB
"""VRAM left to the driver context, cuBLAS, graph pools and compiled kernels on a GPU (CPU: pass 0)."""
DEFAULT_PREFIX_BYTES = 2 * GIB  # RAM for what earlier requests have read
DEFAULT_HOST_RESERVE_BYTES = 4 * GIB
"""RAM left to the operating system, Python, torch and CUDA's host side."""


@dataclass(frozen=True)
class PlanRequest:
    """What the user asked for; None means auto. All sizes in bytes or tokens.

    `context`: most tokens of one sequence, and of all KV together (one pool for all sequences).
    `chunk`, `slots` (per layer), `sweep_tokens`: explicit values are reserved before anything is chosen.
    `prefix_bytes` of RAM keep what earlier requests have read. `reserve_bytes` of VRAM and
    `host_reserve_bytes` of RAM stay unplanned; `scratch_bytes` of the former are for what passes between the kernels of
    a chunk, and let chunks be longer than the sweep's shape says. `copy_all_tokens`: from so many tokens a sweep copies
    all non-resident experts. `uploads_per_layer`: kept misses per layer and step,
    so spares per set; two sets exist. `guesses`: misses of a layer that are fetched ahead, in all rounds. `mtp`: the
    drafts come from the MTP block; without it they are guessed from the text, and the block is not loaded.
    """

    vram_bytes: int
    context: int
    ram_bytes: int | None = None
    sequences: int = 1
    drafts: int = 0
    mtp: bool = True
    kv_type: str = "f16"
    chunk: int | None = None
    slots: int | None = None
    sweep_tokens: int | None = None
    handover: Handover = "auto"
    uploads_per_layer: int = 2
    guesses: int = 0
    kv_block_tokens: int = 64
    copy_all_tokens: int | None = None
    prefix_bytes: int = DEFAULT_PREFIX_BYTES
    reserve_bytes: int = DEFAULT_RESERVE_BYTES
    scratch_bytes: int = 0
    host_reserve_bytes: int = DEFAULT_HOST_RESERVE_BYTES

    def check(self, facts: PlanFacts) -> None:
        """Refuse values that no budget can satisfy. Raises UserError naming the flag."""
        at_least = {
            "--vram": (self.vram_bytes, 0),
            "--context": (self.context, 1),
            "--parallel": (self.sequences, 1),
            "--draft-depth": (self.drafts, 0),
            "--chunk": (self.chunk, 1),
            "--slots": (self.slots, 0),
            "--sweep-tokens": (self.sweep_tokens, 1),
            "--uploads-per-layer": (self.uploads_per_layer, 0),
            "--guesses": (self.guesses, 0),
            "--ram": (self.ram_bytes, 0),
            "--prefix-ram": (self.prefix_bytes, 0),
            "KV block": (self.kv_block_tokens, 1),
            "copy-all threshold": (self.copy_all_tokens, 0),
            "reserve": (min(self.reserve_bytes, self.host_reserve_bytes), 0),
        }
        for flag, (value, least) in at_least.items():
            if value is not None and value < least:
                raise UserError(f"{flag} is {value}; it must be at least {least}")
        if self.context > facts.context_length:
            raise UserError(
                f"--context {self.context} is more than the {facts.context_length} tokens that {facts.name} "
                f"was made for; use --context {facts.context_length} or less"
            )
        if self.drafts > MAX_ROWS - 1:
            raise UserError(f"--draft-depth {self.drafts} needs {self.drafts + 1} rows; a step has {MAX_ROWS}")
        if self.drafts and self.mtp and not facts.has_mtp:
            raise UserError(f"--draft-depth {self.drafts}: {facts.name} has no MTP block; use 0")
        if self.kv_type not in facts.kv_bytes_per_token:
            known = ", ".join(sorted(facts.kv_bytes_per_token))
            raise UserError(f"--kv-type {self.kv_type} is not supported by {facts.name}; choose from {known}")
        if self.handover not in ("auto", "never", "always"):
            raise UserError(f"--handover {self.handover} is not one of auto, never, always")


@dataclass(frozen=True)
class SweepShape:
    """How a sweep is cut: tokens of a mixer chunk, experts of a piece, buffers of the staging ring."""

    chunk: int
    piece_experts: int
    n_buffers: int


LADDER = (
    SweepShape(2048, 64, 5),
    SweepShape(1024, 32, 3),
    SweepShape(512, 16, 3),
    SweepShape(256, 8, 3),
    SweepShape(128, 4, 3),
    SweepShape(64, 2, 2),
    SweepShape(16, 1, 2),
)
"""Shapes from roomy to tight; the plan takes the first that reaches its target sweep length."""


@dataclass(frozen=True)
class Sizes:
    """Bytes that follow from facts and request. Offsets in a rank: rank r of layer i lies at
    `r * rank_bytes + layer_offsets[i]`, so the tail of the slots is the highest ranks of every layer."""

    facts: PlanFacts
    request: PlanRequest

    @property
    def with_mtp(self) -> bool:
        """The MTP block is loaded only when it drafts."""
        return self.request.drafts > 0 and self.request.mtp

    @cached_property
    def layers(self) -> tuple[ExpertLayerFacts, ...]:
        """MoE layers in the order of their index in the expert cache."""
        return self.facts.layers_with_experts(self.with_mtp)

    @cached_property
    def sweep_layers(self) -> tuple[ExpertLayerFacts, ...]:
        """MoE layers whose experts a sweep runs: of the MTP block it needs keys and values alone."""
        return self.facts.layers_with_experts(False)

    @cached_property
    def layer_offsets(self) -> tuple[int, ...]:
        """Offset of each layer's slot inside a rank."""
        offsets, at = [], 0
        for layer in self.layers:
            offsets.append(at)
            at += layer.stride_bytes
        return tuple(offsets)

    @cached_property
    def rank_bytes(self) -> int:
        """One slot of every layer."""
        return sum(layer.stride_bytes for layer in self.layers)

    @cached_property
    def stride_bytes(self) -> int:
        """The largest expert's stride."""
        return max(layer.stride_bytes for layer in self.layers)

    @cached_property
    def n_experts(self) -> int:
        """Experts of the layer that has most; no use for more slots than this."""
        return max(layer.n_experts for layer in self.layers)

    @property
    def rows(self) -> int:
        """Token rows of the largest step."""
        return min(MAX_ROWS, self.request.sequences * (1 + self.request.drafts))

    @property
    def n_spares(self) -> int:
        """Unpublished slots per layer: two sets of `uploads_per_layer`."""
        return 2 * self.request.uploads_per_layer

    @property
    def explicit_slots(self) -> int | None:
        """Slots asked for, at most one per expert; None for auto."""
        return None if self.request.slots is None else min(self.request.slots, self.n_experts)

    @property
    def least_ranks(self) -> int:
        """Ranks that must exist whatever the budget: explicit slots and their spares."""
        slots = self.explicit_slots or 0
        return slots + self.n_spares if slots else 0

    # -- parts that keep their place -------------------------------------------------------------

    @cached_property
    def kv_tokens(self) -> int:
        """Tokens of the KV pool: the context in whole blocks, and one more block per sequence for its
        partly filled last block and its drafts."""
        block = self.request.kv_block_tokens
        n_blocks = -(-self.request.context // block) + self.request.sequences * -(-(1 + self.request.drafts) // block)
        return n_blocks * block

    @cached_property
    def fixed_parts(self) -> tuple[tuple[str, int, str], ...]:
        """(region, bytes, flag that makes it smaller) of what keeps its place in every phase."""
        facts, request = self.facts, self.request
        kinds = (False, True) if self.with_mtp else (False,)
        parts: list[tuple[str, int, str]] = [
            (f"weights: {part.name}", align_up(part.n_bytes), "--draft-depth" if part.is_mtp else "--vram")
            for is_mtp in kinds
            for part in facts.resident
            if part.is_mtp == is_mtp and not part.on_host
        ]
        per_token: list[tuple[str, Mapping[str, int]]] = [
            ("KV cache", facts.kv_bytes_per_token),
            ("indexer keys", facts.indexer_bytes_per_token),
        ]
        if self.with_mtp:
            per_token.append(("MTP KV cache", facts.mtp_kv_bytes_per_token or {}))
            per_token.append(("MTP indexer keys", facts.mtp_indexer_bytes_per_token))
        for name, by_type in per_token:
            parts.append((name, align_up(self.kv_tokens * by_type.get(request.kv_type, 0)), "--context"))
        state = facts.state_bytes_per_sequence + (facts.mtp_state_bytes_per_sequence if self.with_mtp else 0)
        parts.append(("recurrent state", align_up(request.sequences * state), "--parallel"))
        if request.drafts:
            rows = request.sequences * (1 + request.drafts)
            parts.append(("replay rows", align_up(rows * facts.replay_bytes_per_row), "--draft-depth"))
        return tuple(part for part in parts if part[1] > 0)

    @property
    def fixed_bytes(self) -> int:
        """Sum of `fixed_parts`."""
        return sum(n_bytes for _, n_bytes, _ in self.fixed_parts)

    # -- the swing region ------------------------------------------------------------------------

    @cached_property
    def transient_experts(self) -> int:
        """Misses of one layer and step that may be in flight at once; at least two, it is also a ring."""
        return max(2, *(min(layer.n_experts, self.rows * layer.top_k) for layer in self.layers))

    @property
    def transient_bytes(self) -> int:
        """rows x top-k of the largest expert (never more than a layer has), and what is guessed for three layers."""
        return (self.transient_experts + GUESS_LISTS * self.request.guesses) * self.stride_bytes

    @cached_property
    def decode_workspace_bytes(self) -> int:
        """Scratch of a step: per row, its logits, and unfused scores if the model has them."""
        facts, rows = self.facts, self.rows
        scores = rows * self.kv_tokens * facts.score_bytes_per_pair
        return align_up(rows * (facts.decode_row_bytes + 4 * facts.vocab_size) + scores)

    @cached_property
    def short_shape(self) -> SweepShape:
        """The shape of a sweep that lends nothing in the least room: its ring takes the transient region, or what one
        slot a layer takes, which is about as much."""
        chunk = self.request.chunk or (512 if self.request.handover == "never" else SHORT_TOKENS)
        worth = max(self.transient_experts, len(self.layers))
        piece = max(1, min(SHORT_PIECE, self.n_experts, worth // 3))
        return SweepShape(chunk, piece, max(self.transient_experts // piece, min(3, worth // piece)))

    @cached_property
    def short_tokens(self) -> int:
        """Tokens of a sweep that the decode layout always has room for."""
        context, request = self.request.context, self.request
        if request.handover == "never":
            return min(context, request.sweep_tokens or NEVER_TOKENS)
        return min(context, SHORT_TOKENS, request.sweep_tokens or context)

    @cached_property
    def tail_bytes(self) -> int:
        """Least bytes behind the slots: transient region and workspace, enough for a short sweep."""
        short = self.need_bytes(self.short_shape, self.short_tokens)
        return max(self.transient_bytes + self.decode_workspace_bytes, short)

    @cached_property
    def shapes(self) -> tuple[SweepShape, ...]:
        """The ladder for this model and request."""
        seen: dict[SweepShape, None] = {}
        for shape in LADDER:
            chunk = min(self.request.chunk or shape.chunk, self.request.context)
            seen[SweepShape(chunk, min(shape.piece_experts, self.n_experts), shape.n_buffers)] = None
        return tuple(seen)

    def chunk(self, shape: SweepShape, n_tokens: int) -> int:
        """Tokens of a chunk in a sweep of `n_tokens`: as many as the shape says, or as the scratch beside the arena
        holds, for fewer chunks decode fewer weights and launch fewer kernels; unless a number was asked for."""
        fits = self.request.scratch_bytes // max(1, self.facts.chunk_row_bytes) if self.request.chunk is None else 0
        longest = max(shape.chunk, min(LONGEST_CHUNK, 1 << fits.bit_length() >> 1))
        return min(n_tokens, longest)

    def ring_bytes(self, shape: SweepShape) -> int:
        """The staging ring; at least the transient region when nothing is lent."""
        ring = shape.n_buffers * shape.piece_experts * self.stride_bytes
        return max(ring, self.transient_bytes) if shape == self.short_shape else ring

    def workspace_bytes(self, shape: SweepShape, n_tokens: int) -> int:
        """Scratch of a sweep of `n_tokens`: mixer of a chunk, then MoE of a piece, then logits; the largest."""
        facts = self.facts
        rows = min(shape.chunk, n_tokens)
        scores = min(rows, facts.score_tile_rows) * self.kv_tokens * facts.score_bytes_per_pair
        tile_rows = min(n_tokens * facts.max_top_k, TILE_ROWS_PER_EXPERT * shape.piece_experts)
        mixer = rows * facts.chunk_row_bytes + scores
        moe = tile_rows * facts.moe_row_bytes() + shape.piece_experts * facts.decoded_expert_bytes()
        logits = self.request.sequences * facts.vocab_size * 4
        return align_up(max(mixer, moe, logits))

    def sweep_bytes(self, n_tokens: int) -> int:
        """Hidden states of a sweep of `n_tokens`, each array aligned."""
        return sum(align_up(n_tokens * per_token) for _, per_token in self.facts.sweep_bytes_per_token())

    def need_bytes(self, shape: SweepShape, n_tokens: int) -> int:
        """All that a sweep needs of the swing region; grows with `n_tokens`."""
        return self.ring_bytes(shape) + self.workspace_bytes(shape, n_tokens) + self.sweep_bytes(n_tokens)

    def longest(self, shape: SweepShape, room_bytes: int) -> int:
        """Most tokens of one sweep of `shape` in `room_bytes`: 0 .. context."""
        low, high = 0, self.request.context
        while low < high:
            middle = (low + high + 1) // 2
            if self.need_bytes(shape, middle) <= room_bytes:
                low = middle
            else:
                high = middle - 1
        return low

    @cached_property
    def least_swing_parts(self) -> tuple[tuple[str, int, str], ...]:
        """(part, bytes, flag) of the smallest swing region: the decode layout with the slots asked for,
        and what an explicit chunk or sweep needs beyond it."""
        request = self.request
        parts = []
        if self.least_ranks:
            parts.append((f"slots ({request.slots} a layer)", self.least_ranks * self.rank_bytes, "--slots"))
        parts.append(("transient region", self.transient_bytes, "--parallel, --draft-depth"))
        short = "--sweep-tokens, --chunk" if request.handover == "never" else "--chunk"
        parts.append(("step and short-prompt workspace", self.tail_bytes - self.transient_bytes, short))
        have = sum(n_bytes for _, n_bytes, _ in parts)
        wanted = []
        if request.chunk is not None:
            wanted.append((self.need_bytes(self.short_shape, min(request.chunk, request.context)), "--chunk"))
        if request.sweep_tokens is not None and request.handover != "never":
            n = min(request.sweep_tokens, request.context)
            shapes = (*self.shapes, self.short_shape)
            wanted.append((min(self.need_bytes(shape, n) for shape in shapes), "--sweep-tokens"))
        for need, flag in wanted:
            if need > have:
                parts.append((f"prefill beyond that ({flag[2:]})", need - have, flag))
                have = need
        return tuple(parts)

    @property
    def least_swing_bytes(self) -> int:
        """Sum of `least_swing_parts`."""
        return sum(n_bytes for _, n_bytes, _ in self.least_swing_parts)

    # -- host ------------------------------------------------------------------------------------

    @cached_property
    def host_parts(self) -> tuple[tuple[str, int, str], ...]:
        """(part, bytes, flag) of RAM that must be there; the PLE table is apart (it may stay on disk)."""
        facts, request = self.facts, self.request
        experts = sum(layer.n_experts * layer.stride_bytes for layer in self.layers)
        embeddings = facts.resident_bytes(on_host=True, is_mtp=False)
        if self.with_mtp:
            embeddings += facts.resident_bytes(on_host=True, is_mtp=True)
        rows = max(2 * self.rows, request.context if facts.ple_bytes_per_token else 0)
        staging = align_up(rows * facts.ple_bytes_per_token) + align_up(2 * self.rows * facts.vocab_size * 4)
        parts = [
            ("experts (pinned)", experts, "--ram"),
            ("weights kept on the host", embeddings, "--ram"),
            ("staging (pinned)", staging, "--context"),
            ("prefixes of earlier prompts", request.prefix_bytes, "--prefix-ram"),
            ("left to the system", request.host_reserve_bytes, "--ram"),
        ]
        return tuple(part for part in parts if part[1] > 0)
