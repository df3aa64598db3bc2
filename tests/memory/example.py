"""Example facts for the planner's tests: Qwen3.8-Flash-Next in UD-Q4_K_XL, and a small model."""

from makeway.memory.facts import ExpertLayerFacts, PlanFacts, ResidentPart

MIB = 1 << 20
GIB = 1 << 30


def example_flash_next() -> PlanFacts:
    """48 layers (36 GDN, 12 attention), 512 experts top-10 of 3.06 MiB on average, MTP, PLE; Q5_K dense."""
    q5, q6 = 0.6875, 0.8203  # bytes per weight
    attention, gdn = 49_800_000, 57_900_000  # weights per layer
    expert = 3_208_640  # mean of the file: 73.5 GiB / (48 * 512), a multiple of 256

    def part(name: str, weights: int, per_weight: float, *, on_host: bool = False, is_mtp: bool = False):
        return ResidentPart(name, int(weights * per_weight), on_host=on_host, is_mtp=is_mtp)

    return PlanFacts(
        name="Qwen3.8-Flash-Next",
        n_layers=48,
        hidden=2560,
        vocab_size=248_320,
        context_length=262_144,
        n_streams=4,
        expert_layers=tuple(ExpertLayerFacts(block, 512, 10, expert, 640, is_mtp=block == 48) for block in range(49)),
        resident=(
            part("attention", 12 * attention, q5),
            part("linear attention", 36 * gdn, q5),
            part("shared experts", 48 * 3 * 2560 * 640, q5),
            part("routers", 48 * 2560 * 512, 2),
            part("hyper-connections", 629_000_000, q5),
            part("indexer", 12 * 2560 * 5 * 128, q5),
            part("head", 248_320 * 2560, q6),
            part("embeddings", 248_320 * 2560, q6, on_host=True),
            part("MTP block", attention + 13_000_000 + 2 * 2560 * 2560 + 6_500_000, q5, is_mtp=True),
        ),
        kv_bytes_per_token={"f16": 24 * 1024, "q8_0": 24 * 1024 * 34 // 64},
        mtp_kv_bytes_per_token={"f16": 2048, "q8_0": 2048 * 34 // 64},
        indexer_bytes_per_token={"f16": 768, "q8_0": 768 * 34 // 64},
        mtp_indexer_bytes_per_token={"f16": 64, "q8_0": 64 * 34 // 64},
        state_bytes_per_sequence=112 * MIB,
        replay_bytes_per_row=36 * 4 * (2 * 2048 + 6144 + 2 * 48),
        ple_bytes=int(26.8 * GIB),
        ple_bytes_per_token=16 * 160 * 2,
        chunk_row_bytes=180_000,
        decode_row_bytes=2 * MIB,
        score_bytes_per_pair=1,
        attention_flops_per_pair=4 * 24 * 256 * 12,
        attention_budget_tokens=2051,
        indexer_flops_per_pair=2 * 4 * 128 * 12 // 4,
        dense_flops_per_token=2 * 4_200_000_000,
        n_parameters=180_000_000_000,
        n_active_parameters=6_000_000_000,
    )


def small_facts(
    *,
    n_layers: int = 2,
    n_experts: int = 8,
    top_k: int = 2,
    expert_bytes: int = 1000,
    context_length: int = 512,
    uneven: bool = True,
) -> PlanFacts:
    """A model for exhaustive tests; with an MTP block, a state, and layers of unequal expert size."""
    return PlanFacts(
        name="small",
        n_layers=n_layers,
        hidden=32,
        vocab_size=64,
        context_length=context_length,
        expert_layers=tuple(
            ExpertLayerFacts(i, n_experts, top_k, expert_bytes + (300 * i if uneven else 0), 16, is_mtp=i == n_layers)
            for i in range(n_layers + 1)
        ),
        resident=(
            ResidentPart("attention", 4001),
            ResidentPart("embeddings", 4096, on_host=True),
            ResidentPart("MTP block", 700, is_mtp=True),
        ),
        kv_bytes_per_token={"f32": 64, "f16": 32},
        mtp_kv_bytes_per_token={"f32": 16, "f16": 8},
        state_bytes_per_sequence=500,
        replay_bytes_per_row=90,
        ple_bytes=10_000,
        ple_bytes_per_token=64,
        chunk_row_bytes=300,
        decode_row_bytes=200,
        dense_flops_per_token=20_000,
    )
