"""What the planner must know of a model, read off its header.

Owns the way from names and shapes to `PlanFacts`. Never reads tensor bytes. Hazard: scratch sizes are the
largest any layer needs; a layer that needs more must be added here, or a plan does not hold.
"""

from collections import Counter
from collections.abc import Collection

from makeway.gguf import GGUFFile
from makeway.kv import KV_TYPES, KVShape, StateShapes
from makeway.memory.facts import ExpertLayerFacts, PlanFacts, ResidentPart, align_up
from makeway.models.base import ModelFacts
from makeway.models.parts import part_of

# Parts whose weights are multiplied with every token; the others are looked up by row or are experts.
_DENSE = (
    "shared experts",
    "routers",
    "attention",
    "linear attention",
    "indexer",
    "hyper-connections",
    "PLE",
    "output",
    "norms and other",
)


def plan_facts(file: GGUFFile, facts: ModelFacts, *, residual_itemsize: int = 2, input_itemsize: int = 2) -> PlanFacts:
    """The planner's view of an open model file. A part is as big as its tensors, each at an aligned offset;
    `residual_itemsize`: bytes of a value of the residual (2 on a GPU, 4 on the CPU)."""
    n_bytes: Counter[str] = Counter()
    n_weights: Counter[str] = Counter()
    for tensor in file.tensors.values():
        part = part_of(tensor.name, first_draft_block=facts.n_layers)
        n_bytes[part] += align_up(tensor.n_bytes)
        n_weights[part] += tensor.n_elements
    tied = "output.weight" not in file.tensors
    resident = [ResidentPart(part, n_bytes[part]) for part in _DENSE if n_bytes[part]]
    # A tied embedding is also the output matrix, so it must be where the products run.
    resident.append(ResidentPart("embedding", n_bytes["embedding"], on_host=not tied))
    if facts.n_draft_layers:
        resident.append(ResidentPart("MTP block", n_bytes["MTP block"], is_mtp=True))
    trunk = {i: s for i, s in facts.kv_shapes.items() if i < facts.n_layers}
    draft = [s for i, s in facts.kv_shapes.items() if i >= facts.n_layers]
    state = StateShapes.of(facts.state_shapes, kv=trunk, ple=facts.ple_tails)
    whole_state = StateShapes.of(facts.state_shapes, kv=facts.kv_shapes, ple=facts.ple_tails, draft=facts.draft_tails)
    n_heads = file.get_int(f"{facts.architecture}.attention.head_count")
    head_dim = file.get_int(f"{facts.architecture}.attention.key_length")
    indexed = [s for s in trunk.values() if s.index_dim]
    dense_weights = sum(n_weights[p] for p in _DENSE) + (n_weights["embedding"] if tied else 0)
    experts = n_weights["experts"]
    active = dense_weights + experts * facts.top_k // facts.n_experts
    index_heads = top_k = 0
    if indexed:
        index_heads = file.get_int(f"{facts.architecture}.attention.indexer.head_count")
        top_k = file.get_int(f"{facts.architecture}.attention.indexer.top_k")
    return PlanFacts(
        name=facts.name or facts.architecture,
        n_layers=facts.n_layers,
        hidden=facts.hidden,
        vocab_size=facts.n_vocab,
        context_length=facts.context_length,
        n_streams=facts.n_streams,
        residual_itemsize=residual_itemsize,
        input_itemsize=input_itemsize,
        expert_layers=tuple(_experts(file, facts, block) for block in range(facts.n_blocks)),
        resident=tuple(resident),
        kv_bytes_per_token=_kv(trunk.values()),
        mtp_kv_bytes_per_token=_kv(draft) if draft else None,
        indexer_bytes_per_token=_indexer(trunk.values()),
        mtp_indexer_bytes_per_token=_indexer(draft),
        state_bytes_per_sequence=state.bytes_per_sequence,
        mtp_state_bytes_per_sequence=whole_state.bytes_per_sequence - state.bytes_per_sequence,
        replay_bytes_per_row=state.bytes_per_kept_row,
        ple_bytes=n_bytes["n-gram table"],
        ple_bytes_per_token=_ple_row_bytes(file, facts),
        chunk_row_bytes=_chunk_row_bytes(facts, n_heads * head_dim),
        decode_row_bytes=8 * _chunk_row_bytes(facts, n_heads * head_dim),
        score_bytes_per_pair=1 if indexed else 0,
        attention_flops_per_pair=4 * n_heads * head_dim * len(trunk),
        attention_budget_tokens=top_k + indexed[0].ratio - 1 if indexed else 0,
        indexer_flops_per_pair=sum(2 * index_heads * s.index_dim // s.ratio for s in indexed),
        dense_flops_per_token=2 * dense_weights,
        n_parameters=sum(n_weights.values()),
        n_active_parameters=active,
    )


def _experts(file: GGUFFile, facts: ModelFacts, block: int) -> ExpertLayerFacts:
    prefix = f"blk.{block}.ffn_"
    stacked = [t.n_bytes for t in file.tensors.values() if t.name.startswith(prefix) and "_exps." in t.name]
    return ExpertLayerFacts(
        block=block,
        n_experts=facts.n_experts,
        top_k=facts.top_k,
        expert_bytes=sum(stacked) // facts.n_experts,
        width=facts.expert_ff,
        is_mtp=block >= facts.n_layers,
    )


def _kv(shapes: Collection[KVShape]) -> dict[str, int]:
    return {name: sum(s.bytes_per_token(t.itemsize) for s in shapes) for name, t in KV_TYPES.items()}


def _indexer(shapes: Collection[KVShape]) -> dict[str, int]:
    return {name: sum(s.index_bytes_per_token(t.itemsize) for s in shapes) for name, t in KV_TYPES.items()}


def _ple_row_bytes(file: GGUFFile, facts: ModelFacts) -> int:
    if not facts.ple_tails:
        return 0
    key = f"{facts.architecture}."
    n_heads = (file.get_int(key + "ple.ngram_size") - 1) * file.get_int(key + "ple.heads_per_ngram")
    return n_heads * file.get_int(key + "embedding_length_per_layer_input") * 2


def _chunk_row_bytes(facts: ModelFacts, query_width: int) -> int:
    """Scratch of the widest mixer per token: its projections twice (before and after conv or rope), its output and
    gate, in float32; and the normed, gated residual of the hyper-connections in bf16."""
    linear = [2 * s.conv_channels + 3 * s.n_heads * s.value_dim for s in facts.state_shapes.values()]
    full = [4 * query_width + 4 * s.n_kv_heads * s.key_dim + 2 * s.index_dim for s in facts.kv_shapes.values()]
    return 4 * max(linear + full) + 6 * facts.n_streams * facts.hidden
