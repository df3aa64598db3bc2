"""What the planner must know about a model: plain integers that a model fills from a GGUF header.

Owns `PlanFacts` and the sizes that follow from it by arithmetic alone; never reads a file and never
knows a budget, a device or an architecture by name.
Hazard: bytes are those of the file (quantised as stored); a fact that is too small makes a plan that
does not hold, so a model states the largest case (all layers, the widest row).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from makeway.errors import UserError

ALIGN_BYTES = 256
"""Every region, slot and sub-region starts at a multiple of this. 256 B is enough for 16-byte loads, TMA
and whole memory sectors; larger pages bring nothing inside one allocation and would waste tiny plans."""


def align_up(n_bytes: int) -> int:
    """The smallest multiple of `ALIGN_BYTES` that holds `n_bytes`."""
    return -(-n_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True)
class ExpertLayerFacts:
    """The routed experts of one MoE layer.

    `block` is the block's number in the file, `expert_bytes` one expert's gate + up + down as stored,
    `width` the expert's inner width, `is_mtp` true for the MTP block's layer (planned only with drafts).
    """

    block: int
    n_experts: int
    top_k: int
    expert_bytes: int
    width: int
    is_mtp: bool = False

    @property
    def stride_bytes(self) -> int:
        """Bytes from one expert to the next, in a slot and in the expert store."""
        return align_up(self.expert_bytes)


@dataclass(frozen=True)
class ResidentPart:
    """Weights that are always at hand: `name` for people, bytes as in the file.

    `on_host` parts stay in RAM and are read row by row (embeddings); `is_mtp` parts need drafts > 0.
    """

    name: str
    n_bytes: int
    on_host: bool = False
    is_mtp: bool = False


@dataclass(frozen=True)
class PlanFacts:
    """All that `plan_memory` knows about a model.

    KV: `kv_bytes_per_token` maps each KV type the model supports ("f16", "q8_0", ...) to bytes per token
    over all trunk layers; the MTP block's own are separate. Indexer keys are the pooled ones that are kept, per
    KV type too (empty: no indexer).
    State: `state_bytes_per_sequence` holds delta-rule state, conv tails, PLE tail and raw indexer tail
    (the MTP block's apart); `replay_bytes_per_row` is what a verify step keeps per row to replay it (all layers).
    Workspace: `chunk_row_bytes` is the largest mixer scratch per token of a chunk, `decode_row_bytes` the
    scratch per row of a step (without logits), `score_bytes_per_pair` what an unfused score matrix takes
    per (query token, context token), tiled by `score_tile_rows` queries. `decoded_itemsize` is the size
    of a decoded expert weight in the sweep's scratch (0: the kernel decodes in registers).
    FLOPs: `dense_flops_per_token` is everything but routed experts and attention scores.
    """

    name: str
    n_layers: int
    hidden: int
    vocab_size: int
    context_length: int
    expert_layers: tuple[ExpertLayerFacts, ...]
    resident: tuple[ResidentPart, ...]
    kv_bytes_per_token: Mapping[str, int]
    chunk_row_bytes: int
    decode_row_bytes: int
    dense_flops_per_token: int
    n_streams: int = 1
    residual_itemsize: int = 2
    input_itemsize: int = 2
    decoded_itemsize: int = 2
    mtp_kv_bytes_per_token: Mapping[str, int] | None = None
    indexer_bytes_per_token: Mapping[str, int] = field(default_factory=dict)
    mtp_indexer_bytes_per_token: Mapping[str, int] = field(default_factory=dict)
    state_bytes_per_sequence: int = 0
    mtp_state_bytes_per_sequence: int = 0
    replay_bytes_per_row: int = 0
    ple_bytes: int = 0
    ple_bytes_per_token: int = 0
    score_bytes_per_pair: int = 0
    score_tile_rows: int = 256
    attention_flops_per_pair: int = 0
    attention_budget_tokens: int = 0  # sparse attention reads at most so many tokens; 0: all of them
    indexer_flops_per_pair: int = 0
    n_parameters: int = 0
    n_active_parameters: int = 0

    def __post_init__(self) -> None:
        """Refuse facts that cannot be a model. Raises UserError."""
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 0:
                raise UserError(f"{self.name}: {name} is {value}; a size cannot be negative")
        for name in ("n_layers", "hidden", "vocab_size", "context_length", "n_streams", "score_tile_rows"):
            if getattr(self, name) < 1:
                raise UserError(f"{self.name}: {name} must be at least 1")
        if not any(not layer.is_mtp for layer in self.expert_layers):
            raise UserError(f"{self.name}: no layer has experts; makeway runs Mixture-of-Experts models only")
        for layer in self.expert_layers:
            if not 1 <= layer.top_k <= layer.n_experts or layer.expert_bytes < 1 or layer.width < 1:
                raise UserError(
                    f"{self.name}: block {layer.block} has {layer.n_experts} experts of {layer.expert_bytes} "
                    f"bytes and width {layer.width}, top-{layer.top_k}: not a usable MoE layer"
                )
        mtp_from = [layer.is_mtp for layer in self.expert_layers]
        if mtp_from != sorted(mtp_from):
            raise UserError(f"{self.name}: MTP layers must come after the trunk's layers")
        if not self.kv_bytes_per_token:
            raise UserError(f"{self.name}: no KV type is supported")
        mtp_kv = self.mtp_kv_bytes_per_token
        if mtp_kv is not None and set(mtp_kv) != set(self.kv_bytes_per_token):
            raise UserError(f"{self.name}: trunk and MTP block must support the same KV types")
        for indexer in (self.indexer_bytes_per_token, self.mtp_indexer_bytes_per_token):
            if indexer and set(indexer) != set(self.kv_bytes_per_token):
                raise UserError(f"{self.name}: indexer keys must support the KV types, or be absent")

    @property
    def has_mtp(self) -> bool:
        """Whether the file has an MTP block that can draft."""
        return any(layer.is_mtp for layer in self.expert_layers) or any(p.is_mtp for p in self.resident)

    def layers_with_experts(self, with_mtp: bool) -> tuple[ExpertLayerFacts, ...]:
        """MoE layers that a plan holds, trunk first; their position is the `layer` of an ExpertKey."""
        return tuple(layer for layer in self.expert_layers if with_mtp or not layer.is_mtp)

    def resident_bytes(self, *, on_host: bool, is_mtp: bool) -> int:
        """Bytes of resident parts of one kind, each part aligned."""
        chosen = (p for p in self.resident if p.on_host == on_host and p.is_mtp == is_mtp)
        return sum(align_up(p.n_bytes) for p in chosen)

    @cached_property
    def max_top_k(self) -> int:
        """The largest top-k of any layer."""
        return max(layer.top_k for layer in self.expert_layers)

    def sweep_bytes_per_token(self) -> tuple[tuple[str, int], ...]:
        """(name, bytes per token) of the arrays that a sweep keeps for each of its tokens.

        The residual (all streams), the MoE input, the f32 sum over experts, f32 inject factors (with several
        streams only) and the routing: per chosen expert an int32 id, an f32 weight and an int32 place in the
        order by expert.
        """
        arrays = [
            ("sweep residual", self.n_streams * self.hidden * self.residual_itemsize),
            ("sweep input", self.hidden * self.input_itemsize),
            ("sweep sum", self.hidden * 4),
            ("sweep routing", self.max_top_k * 12),
        ]
        if self.n_streams > 1:
            arrays.append(("sweep inject", self.n_streams * 4))
        return tuple(arrays)

    def decoded_expert_bytes(self) -> int:
        """Decoded gate + up + down of the widest expert, 0 when kernels decode in registers."""
        return 3 * self.hidden * max(layer.width for layer in self.expert_layers) * self.decoded_itemsize

    def moe_row_bytes(self) -> int:
        """Scratch per (token, expert) pair: gathered input, gate, up and activation, f32 output."""
        width = max(layer.width for layer in self.expert_layers)
        return self.input_itemsize * (self.hidden + 3 * width) + 4 * self.hidden

    def expert_flops_per_token(self, with_mtp: bool) -> int:
        """FLOPs of the routed experts of one token: 2 per weight, 3 matrices, top-k experts a layer."""
        layers = self.layers_with_experts(with_mtp)
        return sum(2 * 3 * self.hidden * layer.width * layer.top_k for layer in layers)
