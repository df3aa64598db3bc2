"""The memory plan: which byte of the arena belongs to whom, in every phase, and what a prompt borrows.

Owns `plan_memory` and `MemoryPlan`; pure integers, no torch, no device, and never a guess at run time: the
engine executes the plan and checks itself against it.
Hazard: the plan must hold for every prompt length from 1 to the context; whoever changes a size formula
changes `sizes.py` and runs the property tests.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from makeway.errors import OutOfPlan
from makeway.memory import predict, table
from makeway.memory.facts import ALIGN_BYTES, ExpertLayerFacts, PlanFacts, align_up
from makeway.memory.rates import DEFAULT_RATES, Rates
from makeway.memory.sizes import TARGET_SWEEP_TOKENS, PlanRequest, Sizes, SweepShape


@dataclass(frozen=True)
class Region:
    """Bytes [offset, offset + n_bytes) of the arena; offset and size are multiples of ALIGN_BYTES."""

    name: str
    offset: int
    n_bytes: int

    @property
    def end(self) -> int:
        """First byte behind the region."""
        return self.offset + self.n_bytes


@dataclass(frozen=True)
class DecodeLayout:
    """The swing region while decoding: slots by rank then layer, transient region, workspace.

    `n_ranks` = published slots + spares, per layer. Rank 0 is lent last.
    """

    slots: Region
    transient: Region
    workspace: Region
    n_ranks: int
    rank_bytes: int
    layer_offsets: tuple[int, ...]

    @property
    def regions(self) -> tuple[Region, ...]:
        """In order of their offsets."""
        return (self.slots, self.transient, self.workspace)

    def slot_offset(self, layer: int, slot: int) -> int:
        """Arena offset of slot `slot` (its rank) of MoE layer `layer`. Raises IndexError."""
        if not 0 <= slot < self.n_ranks or not 0 <= layer < len(self.layer_offsets):
            raise IndexError(f"no slot {slot} in layer {layer}")
        return self.slots.offset + slot * self.rank_bytes + self.layer_offsets[layer]


@dataclass(frozen=True)
class Lending:
    """What one prompt borrows. `n_lent` ranks (slots of every layer) go, `n_kept` stay.

    `sweep_tokens`: tokens of its longest sweep. `copies_all`: sweeps copy every non-resident expert, else
    only the routed ones. `copied_bytes` (all sweeps; expected, for routed ones an upper estimate) and
    `restored_bytes` cross the link.
    """

    n_tokens: int
    n_lent: int
    n_kept: int
    sweep_tokens: int
    n_sweeps: int
    shape: SweepShape
    copies_all: bool
    copied_bytes: int
    restored_bytes: int


@dataclass(frozen=True)
class PrefillLayout:
    """The swing region during prefill: kept slots, staging ring, workspace, hidden states of the sweep."""

    kept: Region
    ring: Region
    workspace: Region
    sweep: tuple[Region, ...]
    n_buffers: int
    buffer_bytes: int
    piece_experts: int
    chunk: int
    sweep_tokens: int

    @property
    def regions(self) -> tuple[Region, ...]:
        """In order of their offsets."""
        return (self.kept, self.ring, self.workspace, *self.sweep)


@dataclass(frozen=True)
class MemoryPlan:
    """A plan that fits. Offsets are in the arena, which takes `arena_bytes` of the `vram_bytes`.

    `shape`, `stay_shape`: how sweeps are cut that lend, and that do not. `n_slots`: published slots per layer;
    `max_sweep_tokens`: the longest sweep (everything lent);
    `short_sweep_tokens`: the longest sweep that lends nothing; `lend_from_tokens`: shortest prompt that
    lends (None: none does); `copy_all_tokens`: from so many tokens a sweep copies all experts.
    """

    facts: PlanFacts
    request: PlanRequest
    rates: Rates
    regions: tuple[Region, ...]
    decode: DecodeLayout
    swing: Region
    arena_bytes: int
    reserve_bytes: int
    n_slots: int
    n_spares: int
    rows: int
    shape: SweepShape
    stay_shape: SweepShape
    max_sweep_tokens: int
    short_sweep_tokens: int
    lend_from_tokens: int | None
    copy_all_tokens: int
    host: tuple[tuple[str, int], ...]
    ple_in_ram: bool
    ple_bytes: int

    @cached_property
    def sizes(self) -> Sizes:
        """The formulas, for this request."""
        return Sizes(self.facts, self.request)

    @property
    def layers(self) -> tuple[ExpertLayerFacts, ...]:
        """MoE layers in cache order (the MTP block's last, when planned)."""
        return self.sizes.layers

    @property
    def host_bytes(self) -> int:
        """RAM that the plan takes, with the PLE table when it is held there."""
        return sum(n_bytes for _, n_bytes in self.host) + (self.ple_bytes if self.ple_in_ram else 0)

    def region(self, name: str) -> Region:
        """The fixed region called `name`. Raises KeyError."""
        for region in self.regions:
            if region.name == name:
                return region
        raise KeyError(name)

    def lend_for(self, n_tokens: int) -> Lending:
        """What a prompt (or several together) of `n_tokens` >= 1 borrows."""
        if n_tokens < 1:
            raise ValueError("a prompt has at least one token")
        threshold = self.lend_from_tokens
        if threshold is None or n_tokens < threshold:
            return self.lending(n_tokens, self.short_sweep_tokens, self.stay_shape, n_kept=self.decode.n_ranks)
        if self.request.handover == "always":
            return self.lending(n_tokens, self.max_sweep_tokens, self.shape, n_kept=0)
        return self.lending(n_tokens, self.max_sweep_tokens, self.shape)

    def lending(self, n_tokens: int, longest: int, shape: SweepShape, *, n_kept: int | None = None) -> Lending:
        """`n_tokens` in equal sweeps of at most `longest`; as many ranks kept as fit unless given."""
        n_sweeps = -(-n_tokens // longest)
        per_sweep = -(-n_tokens // n_sweeps)
        if n_kept is None:
            spare_bytes = self.swing.n_bytes - self.sizes.need_bytes(shape, per_sweep)
            n_kept = min(self.decode.n_ranks, spare_bytes // self.decode.rank_bytes)
        n_lent = self.decode.n_ranks - n_kept
        copies_all = per_sweep >= self.copy_all_tokens
        copied = predict.copied_bytes(
            self.sizes.sweep_layers, min(n_kept, self.n_slots), per_sweep, copies_all=copies_all
        )
        restored = (self.n_slots - min(n_kept, self.n_slots)) * sum(la.expert_bytes for la in self.layers)
        return Lending(
            n_tokens=n_tokens,
            n_lent=n_lent,
            n_kept=n_kept,
            sweep_tokens=per_sweep,
            n_sweeps=n_sweeps,
            shape=shape,
            copies_all=copies_all,
            copied_bytes=n_sweeps * copied,
            restored_bytes=restored,
        )

    def prefill_layout(self, lending: Lending) -> PrefillLayout:
        """Where the sweep's parts lie; the workspace takes what is left over."""
        sizes, shape = self.sizes, lending.shape
        kept = Region("kept slots", self.swing.offset, lending.n_kept * self.decode.rank_bytes)
        ring = Region("staging ring", kept.end, sizes.ring_bytes(shape))
        hidden = sizes.sweep_bytes(lending.sweep_tokens)
        workspace = Region("prefill workspace", ring.end, self.swing.end - ring.end - hidden)
        if workspace.n_bytes < sizes.workspace_bytes(shape, lending.sweep_tokens):
            raise OutOfPlan(f"a sweep of {lending.sweep_tokens} tokens does not fit beside {lending.n_kept} slots")
        sweep, at = [], workspace.end
        for name, per_token in self.facts.sweep_bytes_per_token():
            sweep.append(Region(name, at, align_up(lending.sweep_tokens * per_token)))
            at = sweep[-1].end
        return PrefillLayout(
            kept=kept,
            ring=ring,
            workspace=workspace,
            sweep=tuple(sweep),
            n_buffers=shape.n_buffers,
            buffer_bytes=shape.piece_experts * sizes.stride_bytes,
            piece_experts=shape.piece_experts,
            chunk=sizes.chunk(shape, lending.sweep_tokens),
            sweep_tokens=lending.sweep_tokens,
        )

    def predict_ttft(self, n_tokens: int) -> predict.TtftPrediction:
        """Seconds until the first token of a prompt of `n_tokens`, with its parts."""
        return predict.predict_ttft(self, n_tokens)

    def predict_decode(
        self, hit_rate: float, rows: int | None = None, *, context_tokens: int = 0
    ) -> predict.DecodePrediction:
        """Seconds of one step of `rows` at a hit rate (0..1), with its parts."""
        return predict.predict_decode(self, hit_rate, rows or self.rows, context_tokens=context_tokens)

    def to_json(self) -> dict[str, object]:
        """The plan as a dict of plain values (bytes, tokens), for programs."""
        return table.plan_json(self)


def minimum_vram(facts: PlanFacts, request: PlanRequest) -> int:
    """The smallest `vram_bytes` that `plan_memory` accepts for this request."""
    request.check(facts)
    sizes = Sizes(facts, request)
    return align_up(request.reserve_bytes) + sizes.fixed_bytes + sizes.least_swing_bytes


def plan_memory(facts: PlanFacts, request: PlanRequest, *, rates: Rates = DEFAULT_RATES) -> MemoryPlan:
    """Plan the arena and the host for a model and a request.

    The same for a GPU and for a CPU that pretends to have `vram_bytes`. Raises OutOfPlan with a table when
    VRAM or RAM is too small, UserError when a flag cannot be used at all.
    """
    request.check(facts)
    sizes = Sizes(facts, request)
    reserve_bytes = align_up(request.reserve_bytes)
    arena_bytes = (request.vram_bytes - reserve_bytes) // ALIGN_BYTES * ALIGN_BYTES
    swing_bytes = arena_bytes - sizes.fixed_bytes
    if swing_bytes < sizes.least_swing_bytes:
        raise OutOfPlan(table.refuse_vram(sizes, reserve_bytes, smaller=_smaller(facts, request)))
    ple_in_ram = _check_host(sizes)

    regions, at = [], 0
    for name, n_bytes, _ in sizes.fixed_parts:
        regions.append(Region(name, at, n_bytes))
        at += n_bytes
    swing = Region("swing region", at, swing_bytes)
    n_slots, n_ranks = _count_slots(sizes, swing_bytes)
    slots = Region("slots", at, n_ranks * sizes.rank_bytes)
    transient = Region("transient region", slots.end, sizes.transient_bytes)
    workspace = Region("decode workspace", transient.end, swing.end - transient.end)
    decode = DecodeLayout(slots, transient, workspace, n_ranks, sizes.rank_bytes, sizes.layer_offsets)

    shape, longest = _choose_shape(sizes, swing_bytes)
    limit = min(request.context, request.sweep_tokens or request.context)
    grows = request.slots is not None or n_slots == sizes.n_experts
    short = min(limit, sizes.longest(sizes.short_shape, swing.end - slots.end if grows else sizes.tail_bytes))
    stay_shape = _stay_shape(sizes, swing.end - slots.end, short)
    if request.handover == "never":
        shape, longest = stay_shape, short
    plan = MemoryPlan(
        facts=facts,
        request=request,
        rates=rates,
        regions=tuple(regions),
        decode=decode,
        swing=swing,
        arena_bytes=arena_bytes,
        reserve_bytes=request.vram_bytes - arena_bytes,
        n_slots=n_slots,
        n_spares=n_ranks - n_slots,
        rows=sizes.rows,
        shape=shape,
        stay_shape=stay_shape,
        max_sweep_tokens=max(longest, short) if request.handover == "auto" else longest,
        short_sweep_tokens=short,
        lend_from_tokens=None,
        copy_all_tokens=request.copy_all_tokens or 0,
        host=tuple((name, n_bytes) for name, n_bytes, _ in sizes.host_parts),
        ple_in_ram=ple_in_ram,
        ple_bytes=facts.ple_bytes,
    )
    if request.copy_all_tokens is None:
        plan = replace(plan, copy_all_tokens=predict.copy_all_from(plan))
    return replace(plan, lend_from_tokens=_lend_from(plan, longest))


def render_plan(plan: MemoryPlan, *, prompts: Sequence[int] = ()) -> str:
    """The plan as plain text for people: VRAM, host, phases, and predictions for some prompt lengths."""
    return table.render(plan, prompts=prompts)


def _count_slots(sizes: Sizes, swing_bytes: int) -> tuple[int, int]:
    """(published slots, ranks) per layer."""
    explicit = sizes.explicit_slots
    n_slots = explicit
    if n_slots is None:
        n_ranks = (swing_bytes - sizes.tail_bytes) // sizes.rank_bytes
        n_slots = max(0, min(n_ranks - sizes.n_spares, sizes.n_experts))
    return n_slots, n_slots + sizes.n_spares if n_slots else 0


def _choose_shape(sizes: Sizes, swing_bytes: int) -> tuple[SweepShape, int]:
    """The roomiest shape whose longest sweep (everything lent) reaches the target, and that length.

    Below the top of the ladder the length is held to the target, so that more VRAM, which may buy a
    roomier shape, never makes sweeps shorter.
    """
    context = sizes.request.context
    explicit = sizes.request.sweep_tokens
    target = min(context, explicit or TARGET_SWEEP_TOKENS)
    top = sizes.shapes[0]
    for shape in sizes.shapes:
        longest = sizes.longest(shape, swing_bytes)
        if longest >= target:
            return shape, longest if shape == top and explicit is None else target
    last = max((*sizes.shapes[-1:], sizes.short_shape), key=lambda shape: sizes.longest(shape, swing_bytes))
    return last, min(target, sizes.longest(last, swing_bytes))


def _stay_shape(sizes: Sizes, room_bytes: int, n_tokens: int) -> SweepShape:
    """The roomiest shape that reads `n_tokens` beside all slots; at least the one that there is always room for."""
    least = sizes.short_shape
    for shape in sizes.shapes:
        larger = shape.piece_experts >= least.piece_experts and shape.chunk >= least.chunk
        if larger and sizes.need_bytes(shape, n_tokens) <= room_bytes:
            return shape
    return least


def _lend_from(plan: MemoryPlan, longest: int) -> int | None:
    """Shortest prompt for which borrowing and restoring takes less time than more sweeps in a small room.

    A prompt that fits one short sweep never lends. Beyond that every multiple of the short sweep adds a
    crossing of the experts, so only those lengths are looked at.
    """
    request, short = plan.request, plan.short_sweep_tokens
    if request.handover == "never":
        return None
    if request.handover == "always":
        return 1
    if longest <= short or short >= request.context:
        return None
    for multiple in range(1, 65):
        n_tokens = multiple * short + 1
        if n_tokens > request.context:
            return None
        stay = plan.lending(n_tokens, short, plan.stay_shape, n_kept=plan.decode.n_ranks)
        lend = plan.lending(n_tokens, longest, plan.shape)
        if predict.lending_cost_s(plan, lend) <= predict.lending_cost_s(plan, stay):
            return n_tokens
    return 64 * short + 1


def _check_host(sizes: Sizes) -> bool:
    """Refuse when RAM is too small; tell whether the PLE table also fits there (else it stays mapped)."""
    ram_bytes = sizes.request.ram_bytes
    need = sum(n_bytes for _, n_bytes, _ in sizes.host_parts)
    if ram_bytes is None:
        return sizes.facts.ple_bytes > 0
    if need > ram_bytes:
        raise OutOfPlan(table.refuse_ram(sizes, ram_bytes))
    return 0 < sizes.facts.ple_bytes <= ram_bytes - need


def _smaller(facts: PlanFacts, request: PlanRequest) -> tuple[str, ...]:
    """Changes of one flag each that would make the request fit, as "--flag value"."""

    def fits(**change: object) -> bool:
        changed = replace(request, **change)  # type: ignore[arg-type]
        return minimum_vram(facts, changed) <= request.vram_bytes

    found = [f"--vram {minimum_vram(facts, request)} (bytes)"]
    context = _largest(1, request.context - 1, lambda n: fits(context=n))
    if context:
        found.append(f"--context {context}")
    if request.slots:
        slots = _largest(0, request.slots - 1, lambda n: fits(slots=n))
        if slots is not None:
            found.append(f"--slots {slots}")
    found += [
        f"--kv-type {kind}"
        for kind, per_token in sorted(facts.kv_bytes_per_token.items())
        if per_token < facts.kv_bytes_per_token[request.kv_type] and fits(kv_type=kind)
    ]
    if request.sequences > 1:
        sequences = _largest(1, request.sequences - 1, lambda n: fits(sequences=n))
        if sequences:
            found.append(f"--parallel {sequences}")
    if request.drafts:
        drafts = _largest(0, request.drafts - 1, lambda n: fits(drafts=n))
        if drafts is not None:
            found.append(f"--draft-depth {drafts}")
    if request.chunk and request.chunk > 1:
        chunk = _largest(1, request.chunk - 1, lambda n: fits(chunk=n))
        if chunk:
            found.append(f"--chunk {chunk}")
    if request.sweep_tokens and request.sweep_tokens > 1:
        tokens = _largest(1, request.sweep_tokens - 1, lambda n: fits(sweep_tokens=n))
        if tokens:
            found.append(f"--sweep-tokens {tokens}")
    return tuple(found)


def _largest(low: int, high: int, fits: Callable[[int], bool]) -> int | None:
    """Largest n in low..high that fits, where smaller always fits when larger does; None when none does."""
    if high < low or not fits(low):
        return None
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low
