"""Reading the parts that several architectures share: attention, delta net and MoE weights of a block.

Owns the tensor names. Never computes. Hazard: `qwen3next` orders its V heads unlike the others.
"""

from dataclasses import dataclass

from torch import Tensor

from makeway.errors import UserError
from makeway.kernels import Weight
from makeway.kv import KVShape, StateShape
from makeway.layers.attention import AttentionShape, AttentionWeights
from makeway.layers.delta_net import DeltaNetShape, DeltaNetWeights
from makeway.layers.moe import MoEWeights
from makeway.layers.sparse_attention import IndexerWeights
from makeway.models.base import Header
from makeway.models.weights import WeightReader


def vocabulary_weights(r: WeightReader, head: Header) -> tuple[Weight, Weight]:
    """The embedding and the output matrix, which may be one and the same."""
    shape = (head.n_vocab, head.hidden)
    embed = r.matrix("token_embd.weight", shape)
    return embed, r.matrix("output.weight", shape) if r.has("output.weight") else embed


@dataclass(frozen=True)
class DraftWeights:
    """What every MTP block has besides its layer; `hnorm` [streams * hidden]."""

    eh_proj: Weight
    enorm: Tensor
    hnorm: Tensor
    embed: Weight
    output: Weight


def draft_weights(r: WeightReader, head: Header, *, embed: Weight, output: Weight, n_streams: int = 1) -> DraftWeights:
    """The MTP block's own input and output; where the file has none, the trunk's embedding and output matrix."""
    if head.n_draft_layers != 1:
        raise UserError(f"{r.file.paths[0]}: {head.n_draft_layers} MTP blocks; makeway reads files with one")
    p, shape = head.draft_prefix, (head.n_vocab, head.hidden)
    own_embed, own_output = p + "embed_tokens.weight", p + "shared_head_head.weight"
    return DraftWeights(
        eh_proj=r.matrix(p + "eh_proj.weight", (head.hidden, 2 * head.hidden)),
        enorm=r.vector(p + "enorm.weight", (head.hidden,)),
        hnorm=r.vector(p + "hnorm.weight", (n_streams * head.hidden,)),
        embed=r.matrix(own_embed, shape) if r.has(own_embed) else embed,
        output=r.matrix(own_output, shape) if r.has(own_output) else output,
    )


def attention_shape(head: Header, *, gated: bool) -> AttentionShape:
    return AttentionShape(head.n_heads, head.n_kv_heads, head.head_dim, head.n_rot, head.theta, head.eps, gated)


def attention_weights(
    r: WeightReader, head: Header, i: int, *, gated: bool, indexer: IndexerWeights | None = None
) -> AttentionWeights:
    p, width = f"blk.{i}.attn_", head.n_heads * head.head_dim
    kv_width = head.n_kv_heads * head.head_dim
    return AttentionWeights(
        q=r.matrix(p + "q.weight", (width * (2 if gated else 1), head.hidden)),
        k=r.matrix(p + "k.weight", (kv_width, head.hidden)),
        v=r.matrix(p + "v.weight", (kv_width, head.hidden)),
        output=r.matrix(p + "output.weight", (head.hidden, width)),
        q_norm=r.vector(p + "q_norm.weight", (head.head_dim,)),
        k_norm=r.vector(p + "k_norm.weight", (head.head_dim,)),
        indexer=indexer,
    )


def kv_shape(head: Header, indexer: IndexerWeights | None = None) -> KVShape:
    if indexer is None:
        return KVShape(head.n_kv_heads, head.head_dim, head.head_dim)
    return KVShape(head.n_kv_heads, head.head_dim, head.head_dim, indexer.dim, indexer.ratio)


def delta_net_shape(head: Header, *, tiled: bool, sigmoid_gate: bool) -> DeltaNetShape:
    def number(key: str) -> int:
        return head.file.get_int(f"{head.arch}.ssm.{key}")

    n_k, n_v, k_dim, inner = (number(k) for k in ("group_count", "time_step_rank", "state_size", "inner_size"))
    for key, value in (("group_count", n_k), ("time_step_rank", n_v), ("state_size", k_dim), ("inner_size", inner)):
        if value < 1:
            raise head.fault(f"ssm.{key}", f"is {value}, but must be above 0")
    if n_v % n_k or inner % n_v:
        raise head.fault(
            "ssm.time_step_rank", f"is {n_v}, which does not fit {n_k} K heads and an inner size of {inner}"
        )
    return DeltaNetShape(
        n_k_heads=n_k,
        n_v_heads=n_v,
        k_dim=k_dim,
        v_dim=inner // n_v,
        eps=head.eps,
        tiled=tiled,
        sigmoid_gate=sigmoid_gate,
    )


def delta_net_weights(r: WeightReader, head: Header, i: int, *, shape: DeltaNetShape) -> DeltaNetWeights:
    p, hidden = f"blk.{i}.", head.hidden
    inner = shape.n_v_heads * shape.v_dim
    channels = 2 * shape.n_k_heads * shape.k_dim + inner
    taps = head.file.get_int(f"{head.arch}.ssm.conv_kernel")
    fused = r.has(p + "ssm_ba.weight")
    return DeltaNetWeights(
        qkv=r.matrix(p + "attn_qkv.weight", (channels, hidden)),
        gate=r.matrix(p + "attn_gate.weight", (inner, hidden)),
        out=r.matrix(p + "ssm_out.weight", (hidden, inner)),
        conv=r.vector(p + "ssm_conv1d.weight", (channels, taps)),
        a=r.vector(p + "ssm_a", (shape.n_v_heads,)),
        dt_bias=r.vector(p + "ssm_dt.bias", (shape.n_v_heads,)),
        norm=r.vector(p + "ssm_norm.weight", (shape.v_dim,)),
        alpha=None if fused else r.matrix(p + "ssm_alpha.weight", (shape.n_v_heads, hidden)),
        beta=None if fused else r.matrix(p + "ssm_beta.weight", (shape.n_v_heads, hidden)),
        ba=r.matrix(p + "ssm_ba.weight", (2 * shape.n_v_heads, hidden)) if fused else None,
    )


def state_shape(head: Header, shape: DeltaNetShape) -> StateShape:
    channels = 2 * shape.n_k_heads * shape.k_dim + shape.n_v_heads * shape.v_dim
    taps = head.file.get_int(f"{head.arch}.ssm.conv_kernel")
    return StateShape(
        shape.n_v_heads, shape.k_dim, shape.v_dim, channels, taps, n_k_heads=shape.n_k_heads, tiled=shape.tiled
    )


def moe_weights(r: WeightReader, head: Header, i: int) -> MoEWeights:
    p, hidden, ff = f"blk.{i}.ffn_", head.hidden, head.shared_ff
    router = r.matrix(p + "gate_inp.weight", (head.n_experts, hidden))
    if not ff:
        return MoEWeights(router)
    shared = (
        r.matrix(p + "gate_shexp.weight", (ff, hidden)),
        r.matrix(p + "up_shexp.weight", (ff, hidden)),
        r.matrix(p + "down_shexp.weight", (hidden, ff)),
    )
    gate_name = p + "gate_inp_shexp.weight"
    # Some converters squeeze the one-row gate to a vector.
    squeezed = len(r.file.get_tensor(gate_name).shape) == 1
    gate = r.row(gate_name, hidden) if squeezed else r.matrix(gate_name, (1, hidden))
    return MoEWeights(router, shared, gate)
