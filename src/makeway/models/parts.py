"""Which part of a model a tensor belongs to, by its name.

Owns the names of the parts, which `inspect` and the planner print. Never reads a tensor.
Hazard: a name that fits nothing is "norms and other", so a new big tensor must be added here.
"""

PARTS = (
    "experts",
    "shared experts",
    "routers",
    "attention",
    "linear attention",
    "indexer",
    "hyper-connections",
    "PLE",
    "n-gram table",
    "embedding",
    "output",
    "MTP block",
    "MTP experts",
    "norms and other",
)


def part_of(name: str, *, first_draft_block: int) -> str:
    """The part of the model a tensor belongs to, one of `PARTS`."""
    block, _, rest = name.removeprefix("blk.").partition(".") if name.startswith("blk.") else ("", "", name)
    stem = rest.removesuffix(".weight").removesuffix(".bias")
    if block.isdigit() and int(block) >= first_draft_block:
        return "MTP experts" if stem.endswith("_exps") else "MTP block"
    if stem.endswith("_exps"):
        return "experts"
    if stem.endswith("_shexp"):
        return "shared experts"
    if stem == "ffn_gate_inp":
        return "routers"
    if stem.startswith("indexer."):
        return "indexer"
    if "hc_" in stem:
        return "hyper-connections"
    if stem.startswith("ple_"):
        return "PLE"
    if stem.startswith("per_layer_"):
        return "n-gram table"
    if stem.startswith("ssm_") or stem in ("attn_qkv", "attn_gate"):
        return "linear attention"
    if stem in ("attn_q", "attn_k", "attn_v", "attn_output", "attn_q_norm", "attn_k_norm"):
        return "attention"
    if stem == "token_embd":
        return "embedding"
    return "output" if stem == "output" else "norms and other"
