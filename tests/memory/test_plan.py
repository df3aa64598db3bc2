"""The plan: nothing overlaps, everything adds up, more is never less, and it holds at every prompt length."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import OutOfPlan, UserError
from makeway.memory.facts import ALIGN_BYTES, ExpertLayerFacts, PlanFacts, ResidentPart
from makeway.memory.plan import MemoryPlan, minimum_vram, plan_memory
from makeway.memory.rates import RATES
from makeway.memory.sizes import DEFAULT_RESERVE_BYTES, PlanRequest, Sizes
from tests.memory.example import GIB, example_flash_next, small_facts

LINK = RATES["rtx3090"]


@st.composite
def facts_strategy(draw) -> PlanFacts:
    n_layers = draw(st.integers(1, 4))
    n_experts = draw(st.integers(1, 24))
    has_mtp = draw(st.booleans())
    sizes = draw(st.lists(st.integers(1, 3000), min_size=n_layers + 1, max_size=n_layers + 1))
    counts = draw(st.lists(st.integers(max(1, n_experts - 3), n_experts), min_size=n_layers + 1, max_size=n_layers + 1))
    layers = tuple(
        ExpertLayerFacts(i, counts[i], draw(st.integers(1, counts[i])), sizes[i], 8, is_mtp=i == n_layers)
        for i in range(n_layers + has_mtp)
    )
    mtp = (ResidentPart("MTP", draw(st.integers(1, 2000)), is_mtp=True),) if has_mtp else ()
    kv = draw(st.integers(1, 100))
    return PlanFacts(
        name="drawn",
        n_layers=n_layers,
        hidden=draw(st.integers(1, 64)),
        vocab_size=draw(st.integers(1, 300)),
        context_length=draw(st.integers(1, 700)),
        n_streams=draw(st.integers(1, 4)),
        residual_itemsize=draw(st.sampled_from((2, 4))),
        decoded_itemsize=draw(st.sampled_from((0, 2))),
        expert_layers=layers,
        resident=(
            ResidentPart("dense", draw(st.integers(0, 9000))),
            ResidentPart("embed", 100, on_host=True),
            *mtp,
        ),
        kv_bytes_per_token={"f16": kv, "f32": 2 * kv},
        mtp_kv_bytes_per_token={"f16": kv, "f32": 2 * kv} if has_mtp else None,
        indexer_bytes_per_token=draw(st.sampled_from(({}, {"f16": 3, "f32": 6}, {"f16": 20, "f32": 40}))),
        state_bytes_per_sequence=draw(st.integers(0, 900)),
        replay_bytes_per_row=draw(st.integers(0, 90)),
        ple_bytes=draw(st.integers(0, 4000)),
        ple_bytes_per_token=draw(st.integers(0, 30)),
        chunk_row_bytes=draw(st.integers(0, 800)),
        decode_row_bytes=draw(st.integers(0, 800)),
        score_bytes_per_pair=draw(st.integers(0, 2)),
        dense_flops_per_token=draw(st.integers(0, 10**6)),
        attention_flops_per_pair=draw(st.integers(0, 1000)),
    )


@st.composite
def request_strategy(draw, facts: PlanFacts) -> PlanRequest:
    """A request with a budget somewhere from the minimum to far more than everything."""
    request = PlanRequest(
        vram_bytes=0,
        context=draw(st.integers(1, facts.context_length)),
        sequences=draw(st.integers(1, 10)),
        drafts=draw(st.integers(0, 7)) if facts.has_mtp else 0,
        mtp=draw(st.booleans()),
        kv_type=draw(st.sampled_from(("f16", "f32"))),
        chunk=draw(st.none() | st.integers(1, 900)),
        slots=draw(st.none() | st.integers(0, 30)),
        sweep_tokens=draw(st.none() | st.integers(1, 900)),
        handover=draw(st.sampled_from(("auto", "never", "always"))),
        uploads_per_layer=draw(st.integers(0, 3)),
        kv_block_tokens=draw(st.sampled_from((1, 16, 64))),
        reserve_bytes=draw(st.sampled_from((0, 1000))),
    )
    extra = draw(st.integers(0, 3000) | st.integers(0, 400_000) | st.integers(0, 20_000_000))
    return replace(request, vram_bytes=minimum_vram(facts, request) + extra)


@st.composite
def case(draw) -> tuple[PlanFacts, PlanRequest]:
    facts = draw(facts_strategy())
    return facts, draw(request_strategy(facts))


def plan_of(facts: PlanFacts, request: PlanRequest) -> MemoryPlan:
    return plan_memory(facts, request, rates=LINK)


def check_adjacent(regions, start: int, end: int) -> None:
    """Regions follow one another without a gap or an overlap, aligned, from start to end."""
    at = start
    for region in regions:
        assert region.offset == at
        assert region.n_bytes >= 0
        assert region.offset % ALIGN_BYTES == 0
        at = region.end
    assert at == end


def check_prefill(plan: MemoryPlan, n_tokens: int) -> None:
    lending = plan.lend_for(n_tokens)
    assert lending.n_lent + lending.n_kept == plan.decode.n_ranks
    assert lending.n_sweeps * lending.sweep_tokens >= n_tokens
    assert (lending.n_sweeps - 1) * lending.sweep_tokens < n_tokens
    layout = plan.prefill_layout(lending)
    check_adjacent(layout.regions, plan.swing.offset, plan.swing.end)
    assert layout.n_buffers >= min(2, plan.sizes.transient_experts)
    assert layout.n_buffers * layout.buffer_bytes <= layout.ring.n_bytes
    assert layout.buffer_bytes >= layout.piece_experts * max(la.expert_bytes for la in plan.layers)
    assert layout.workspace.n_bytes >= plan.sizes.workspace_bytes(lending.shape, lending.sweep_tokens)
    for region, (_, per_token) in zip(layout.sweep, plan.facts.sweep_bytes_per_token(), strict=True):
        assert region.n_bytes >= lending.sweep_tokens * per_token
    if lending.n_lent == 0:
        assert layout.kept.end == plan.decode.slots.end, "the slots are not touched"
    if plan.request.handover == "never":
        assert lending.n_lent == 0
    if plan.request.handover == "always":
        assert lending.n_kept == 0
    if plan.request.chunk:
        assert layout.chunk <= plan.request.chunk
    if plan.request.sweep_tokens:
        assert lending.sweep_tokens <= plan.request.sweep_tokens


@given(case())
@settings(max_examples=80, deadline=None)
def test_regions_fill_the_budget_exactly(drawn):
    facts, request = drawn
    plan = plan_of(facts, request)
    check_adjacent((*plan.regions, plan.swing), 0, plan.arena_bytes)
    check_adjacent(plan.decode.regions, plan.swing.offset, plan.swing.end)
    assert plan.arena_bytes + plan.reserve_bytes == request.vram_bytes
    assert plan.reserve_bytes >= request.reserve_bytes
    assert plan.decode.transient.n_bytes >= 2 * max(la.expert_bytes for la in plan.layers)
    assert plan.decode.workspace.n_bytes >= plan.sizes.decode_workspace_bytes
    assert plan.decode.n_ranks == plan.n_slots + plan.n_spares
    if request.slots is not None:
        assert plan.n_slots == min(request.slots, plan.sizes.n_experts)


@given(case())
@settings(max_examples=80, deadline=None)
def test_slots_are_apart_and_ranks_are_ordered(drawn):
    plan = plan_of(*drawn)
    at = plan.decode.slots.offset
    for slot in range(plan.decode.n_ranks):
        for index, layer in enumerate(plan.layers):
            offset = plan.decode.slot_offset(index, slot)
            assert offset == at
            assert offset % ALIGN_BYTES == 0
            at += layer.stride_bytes
    assert at == plan.decode.slots.end
    for layer, slot in ((0, -1), (0, plan.decode.n_ranks), (len(plan.layers), 0), (-1, 0)):
        with pytest.raises(IndexError):
            plan.decode.slot_offset(layer, slot)


@given(case(), st.data())
@settings(max_examples=80, deadline=None)
def test_every_prompt_length_fits(drawn, data):
    facts, request = drawn
    plan = plan_of(facts, request)
    lengths = data.draw(st.lists(st.integers(1, request.context), max_size=20))
    edges = (plan.short_sweep_tokens, plan.max_sweep_tokens, plan.lend_from_tokens or 1)
    for n_tokens in {*lengths, 1, request.context, *edges, *(n + 1 for n in edges), 3 * request.context + 1}:
        check_prefill(plan, n_tokens)


@pytest.mark.parametrize("handover", ["auto", "never", "always"])
@pytest.mark.parametrize("extra", [0, 20_000, 60_000, 10**7])
def test_every_length_of_a_small_model_and_lending_only_grows(handover, extra):
    facts = small_facts(context_length=1500)
    request = PlanRequest(0, 1500, sequences=2, drafts=1, handover=handover, reserve_bytes=0)
    plan = plan_of(facts, replace(request, vram_bytes=minimum_vram(facts, request) + extra))
    lent = -1
    for n_tokens in range(1, 1501):
        check_prefill(plan, n_tokens)
        lending = plan.lend_for(n_tokens)
        if n_tokens <= plan.max_sweep_tokens:
            assert lending.n_lent >= lent, "a longer prompt lends at least as much"
            lent = lending.n_lent
        if lending.n_lent:
            assert plan.lend_from_tokens is not None
            assert n_tokens >= plan.lend_from_tokens


@given(case(), st.data())
@settings(max_examples=80, deadline=None)
def test_lending_grows_with_the_prompt_up_to_the_longest_sweep(drawn, data):
    plan = plan_of(*drawn)
    lengths = sorted(data.draw(st.lists(st.integers(1, plan.max_sweep_tokens), min_size=2, max_size=12)))
    lent = [plan.lend_for(n).n_lent for n in lengths]
    assert lent == sorted(lent)


@given(case(), st.integers(1, 10**6))
@settings(max_examples=80, deadline=None)
def test_more_vram_never_means_less(drawn, more):
    facts, request = drawn
    small = plan_of(facts, request)
    large = plan_of(facts, replace(request, vram_bytes=request.vram_bytes + more))
    assert large.n_slots >= small.n_slots
    assert large.max_sweep_tokens >= small.max_sweep_tokens
    assert large.short_sweep_tokens >= small.short_sweep_tokens
    assert large.arena_bytes >= small.arena_bytes


@given(case())
@settings(max_examples=80, deadline=None)
def test_one_byte_below_the_minimum_is_refused(drawn):
    facts, request = drawn
    least = minimum_vram(facts, request)
    plan = plan_of(facts, replace(request, vram_bytes=least))
    check_prefill(plan, request.context)
    with pytest.raises(OutOfPlan, match="too big by"):
        plan_of(facts, replace(request, vram_bytes=least - 1))


@given(case(), st.integers(0, 10**6), st.integers(0, 10**6))
@settings(max_examples=100, deadline=None)
def test_more_ram_never_refuses_what_fitted(drawn, ram, more):
    facts, request = drawn
    request = replace(request, host_reserve_bytes=0, ram_bytes=ram)
    need = sum(n_bytes for _, n_bytes, _ in Sizes(facts, request).host_parts)
    if ram < need:
        with pytest.raises(OutOfPlan, match="--ram"):
            plan_of(facts, request)
        return
    small = plan_of(facts, request)
    large = plan_of(facts, replace(request, ram_bytes=ram + more))
    assert small.host_bytes <= ram
    assert large.host_bytes <= ram + more
    assert large.ple_in_ram >= small.ple_in_ram
    assert small.host == large.host


@given(case())
@settings(max_examples=100, deadline=None)
def test_every_advice_of_a_refusal_works(drawn):
    facts, request = drawn
    request = replace(request, vram_bytes=minimum_vram(facts, request) // 2)
    with pytest.raises(OutOfPlan) as refused:
        plan_of(facts, request)
    fields = {
        "--vram": "vram_bytes",
        "--context": "context",
        "--slots": "slots",
        "--kv-type": "kv_type",
        "--parallel": "sequences",
        "--draft-depth": "drafts",
        "--chunk": "chunk",
        "--sweep-tokens": "sweep_tokens",
    }
    advice = [line.split()[1:3] for line in str(refused.value).splitlines() if line.startswith(("Either", "or  "))]
    assert advice
    for flag, value in advice:
        change = {fields[flag]: value if flag == "--kv-type" else int(value)}
        plan_of(facts, replace(request, **change))


def test_a_refusal_names_the_part_and_the_flag():
    facts = example_flash_next()
    with pytest.raises(OutOfPlan) as refused:
        plan_memory(facts, PlanRequest(8 * GIB, 262_144, sequences=2, drafts=3))
    text = str(refused.value)
    row = next(line for line in text.splitlines() if line.startswith("KV cache"))
    assert "--context" in row
    assert "GiB" in row
    assert "--kv-type q8_0" in text
    with pytest.raises(OutOfPlan, match=r"slots \(512 a layer\).*--slots"):
        plan_memory(facts, PlanRequest(24 * GIB, 262_144, slots=512))
    with pytest.raises(OutOfPlan, match=r"experts \(pinned\)"):
        plan_memory(facts, PlanRequest(24 * GIB, 262_144, ram_bytes=64 * GIB))


@pytest.mark.parametrize(
    ("change", "flag"),
    [
        ({"context": 262_145}, "--context"),
        ({"context": 0}, "--context"),
        ({"sequences": 0}, "--parallel"),
        ({"drafts": 8}, "--draft-depth"),
        ({"drafts": -1}, "--draft-depth"),
        ({"kv_type": "q2"}, "--kv-type"),
        ({"slots": -1}, "--slots"),
        ({"chunk": 0}, "--chunk"),
        ({"sweep_tokens": 0}, "--sweep-tokens"),
        ({"handover": "sometimes"}, "--handover"),
        ({"uploads_per_layer": -1}, "--uploads-per-layer"),
    ],
)
def test_flags_that_no_budget_can_satisfy(change, flag):
    with pytest.raises(UserError, match=flag):
        plan_memory(example_flash_next(), replace(PlanRequest(24 * GIB, 8192), **change))


def test_drafts_need_an_mtp_block():
    facts = small_facts()
    trunk = replace(
        facts,
        expert_layers=facts.layers_with_experts(False),
        resident=tuple(part for part in facts.resident if not part.is_mtp),
        mtp_kv_bytes_per_token=None,
    )
    plan_memory(trunk, PlanRequest(10**6, 64, reserve_bytes=0))
    with pytest.raises(UserError, match="no MTP block"):
        plan_memory(trunk, PlanRequest(10**6, 64, drafts=1, reserve_bytes=0))


def test_drafts_from_the_text_need_rows_and_no_block():
    request = PlanRequest(10**6, 128, sequences=2, drafts=3, reserve_bytes=0)
    with_block = plan_memory(small_facts(), request)
    without = plan_memory(small_facts(), replace(request, mtp=False))
    assert without.rows == with_block.rows == 8
    assert without.region("replay rows") == replace(
        with_block.region("replay rows"), offset=without.region("replay rows").offset
    )
    assert not any("MTP" in region.name for region in without.regions)
    assert len(without.layers) == len(with_block.layers) - 1 == len(without.sizes.sweep_layers)
    trunk = replace(
        small_facts(), expert_layers=small_facts().expert_layers[:2], resident=(), mtp_kv_bytes_per_token=None
    )
    assert plan_memory(trunk, replace(request, mtp=False)).rows == 8


def test_slots_may_be_zero_and_rows_are_at_most_eight():
    plan = plan_memory(small_facts(), PlanRequest(10**6, 128, sequences=5, drafts=3, slots=0, reserve_bytes=0))
    assert (plan.n_slots, plan.decode.n_ranks, plan.rows) == (0, 0, 8)
    for n_tokens in range(1, 129):
        check_prefill(plan, n_tokens)


def test_a_chunk_or_sweep_given_is_reserved_first():
    facts = example_flash_next()
    plain = PlanRequest(24 * GIB, 131_072)
    long = replace(plain, sweep_tokens=131_072)
    assert minimum_vram(facts, long) > minimum_vram(facts, plain)
    plan = plan_memory(facts, replace(long, vram_bytes=minimum_vram(facts, long)))
    assert plan.lend_for(131_072).n_sweeps == 1
    wide = replace(plain, chunk=8192)
    assert minimum_vram(facts, wide) > minimum_vram(facts, plain)
    assert plan_memory(facts, wide).prefill_layout(plan_memory(facts, wide).lend_for(20_000)).chunk == 8192


def test_scratch_beside_the_arena_makes_chunks_longer():
    facts = example_flash_next()
    request = PlanRequest(24 * GIB, 65_536, ram_bytes=128 * GIB)

    def chunks(request):
        plan = plan_memory(facts, request)
        return [plan.prefill_layout(plan.lend_for(n)).chunk for n in (3000, 40_000)]

    assert chunks(request) == [2048, 2048]
    fits = 5000 * facts.chunk_row_bytes
    assert chunks(replace(request, scratch_bytes=fits)) == [3000, 4096]
    assert chunks(replace(request, scratch_bytes=100 * fits)) == [3000, 8192]
    assert chunks(replace(request, scratch_bytes=1000 * facts.chunk_row_bytes)) == [2048, 2048], "never shorter"
    assert chunks(replace(request, scratch_bytes=fits, chunk=512)) == [512, 512]


def test_flash_next_on_a_24_gib_card():
    """facts.md section 1: about 82 slots a layer; 8k lends ~19 %, 32k 26 %, 119k 50 %, 262k 89 %.

    Got (2 sequences, 3 drafts, MTP layer cached too): 84 slots + 4 spares of 49 layers in a swing region of
    13.4 GiB (not 12: the reserve is 0.75 GiB and 0.2 GiB of indexer keys are kept, not 0.8), and 10, 17,
    38 and 74 % lent: ring and scratch take 1.4 GiB instead of 2, of which the decode layout's own tail pays
    0.5; hidden states per token are those of facts.md.
    """
    facts = example_flash_next()
    plan = plan_memory(
        facts, PlanRequest(24 * GIB, 262_144, ram_bytes=128 * GIB, sequences=2, drafts=3), rates=RATES["h200"]
    )
    assert sum(per_token for _, per_token in facts.sweep_bytes_per_token()) == 20_480 + 5_120 + 10_240 + 16 + 120
    assert plan.reserve_bytes == DEFAULT_RESERVE_BYTES
    assert 78 <= plan.n_slots <= 90
    assert plan.max_sweep_tokens == 262_144
    share = {n: plan.lend_for(n).n_lent * plan.decode.rank_bytes / plan.swing.n_bytes for n in (8192, 32768, 119_000)}
    share[262_144] = plan.lend_for(262_144).n_lent * plan.decode.rank_bytes / plan.swing.n_bytes
    for n_tokens, about in ((8192, 0.19), (32768, 0.26), (119_000, 0.50), (262_144, 0.89)):
        assert about - 0.18 <= share[n_tokens] <= about + 0.03
        assert plan.lend_for(n_tokens).n_sweeps == 1, "every expert crosses the link once"
    assert plan.lend_for(256).n_lent == 0
    assert plan.ple_in_ram
    assert 100 * GIB < plan.host_bytes < 112 * GIB


@pytest.mark.parametrize("vram", [6, 8, 12, 16, 24, 32, 48, 80, 140])
@pytest.mark.parametrize("context", [8192, 65_536, 262_144])
def test_flash_next_fits_or_is_refused_on_every_card(vram, context):
    facts = example_flash_next()
    request = PlanRequest(vram * GIB, context, drafts=3)
    if minimum_vram(facts, request) > request.vram_bytes:
        with pytest.raises(OutOfPlan):
            plan_memory(facts, request)
        return
    plan = plan_memory(facts, request)
    for n_tokens in {1, 16, 255, 256, 257, 1000, 2048, context // 3, context}:
        check_prefill(plan, n_tokens)


def test_a_card_that_holds_everything_never_needs_to_lend_for_a_usual_prompt():
    plan = plan_memory(example_flash_next(), PlanRequest(140 * GIB, 131_072))
    assert plan.n_slots == 512
    assert plan.lend_for(131_072).n_lent == 0
    assert plan.predict_ttft(8192).link_bytes == 0


@pytest.mark.parametrize(
    "change",
    [
        {"hidden": -1},
        {"n_layers": 0},
        {"expert_layers": ()},
        {"expert_layers": (ExpertLayerFacts(0, 4, 5, 100, 8),)},
        {"expert_layers": (ExpertLayerFacts(0, 4, 1, 100, 8, is_mtp=True), ExpertLayerFacts(1, 4, 1, 100, 8))},
        {"kv_bytes_per_token": {}},
        {"mtp_kv_bytes_per_token": {"f32": 1}},
        {"indexer_bytes_per_token": {"f16": 1}},
    ],
)
def test_facts_that_cannot_be_a_model(change):
    with pytest.raises(UserError, match="small"):
        replace(small_facts(), **change)
