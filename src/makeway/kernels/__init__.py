"""The operations a model is made of: their names, and which implementation a device gets.

Owns the names and signatures. Never chooses (`engine/backend.py` does): what runs is named in the status document.
Hazard: `reference` defines the results; any other implementation is tested against it.

Row by row, on tensors of [n, ...] float32 (a matrix is a `Weight`):

    linear(x, w)  sigmoid  silu  softplus(x)  rms_norm(x, gamma, eps)  l2_norm(x)  rope(x, positions, n_rot, theta)
    decode(rows: Weight) -> f32 [n_rows, n_cols]
    route(logits, top_k) -> ids int64, weights f32 [n, top_k]      expert_ffn(x, gate, up, down)

Over a batch, told by `rows: Rows` which rows belong to which sequence and where its memory lies. Tensors are float32
unless named; an implementation needs nothing but `rows.on_device` (int32 tables) and the pools:

    write_kv(keys, values [n, kv_heads, d], kv, rows)      into the blocks of `kv: KVLayer`, in the pools' type
    attend(q [n, heads, d], kv, rows, selected, gate) -> [n, heads, d]      over keys up to each row's own position;
        with `selected` int32 [n, n_select] only over those indexer blocks (-1: none) and the incomplete block at the
        end; times sigmoid(gate)
    index_pool(raw [n, index_dim], gamma, kv, rows, eps, n_rot, theta)      new pooled keys; raw keys into the ring
    index_select(q [n, heads, index_dim], kv, rows, n_select) -> int32 [n, n_select]      block numbers, ascending,
        then -1; equal scores go to the lower block; all complete blocks when there are at most n_select
    conv_step(x [n, channels], kernel [channels, k], state: ConvState, rows, dilation) -> [n, channels]
    delta_step(q, k [n, k_heads, d_k], v [n, v_heads, d_v], decay, beta [n, v_heads], state: DeltaState, rows)
        -> [n, v_heads, d_v]
    replay_conv(state, rows), replay_delta(state, rows)      only the first of the three things below

The last four work on places of recurrent state, in place: they (1) replay the `n_replay` kept rows of each place,
(2) run the rows from there, (3) store the state after the rows; with `rows.keep` instead the state before the rows,
and the rows' inputs as the place's kept rows.

Larger steps, each the same as some of the above one after the other (`kernels/reference_blocks.py`); a layer uses them
where it can: linears, norm_rope, add_norm, attend_input, index_input, hc_mix, hc_combine, ple_gate, gated_delta,
moe_input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from torch import Tensor

from makeway.kernels import reference, reference_attention, reference_blocks
from makeway.kernels.reference import KEY_TILE, ROW_TILE
from makeway.kernels.reference_blocks import MixerWeights
from makeway.kernels.rows import ConvState, DeltaState, DeviceRows, KVLayer, Rows, Span
from makeway.kernels.weight import Weight


@dataclass(frozen=True)
class Ops:
    """One implementation of every operation; signatures and meaning are those of `kernels/reference*.py`.

    `notes`: calls that something else than the named implementation served, and what; it may grow with calls.
    """

    name: str
    linear: Callable[[Tensor, Weight], Tensor] = reference.linear
    decode: Callable[[Weight], Tensor] = reference.decode
    sigmoid: Callable[[Tensor], Tensor] = reference.sigmoid
    silu: Callable[[Tensor], Tensor] = reference.silu
    softplus: Callable[[Tensor], Tensor] = reference.softplus
    rms_norm: Callable[[Tensor, Tensor, float], Tensor] = reference.rms_norm
    l2_norm: Callable[[Tensor], Tensor] = reference.l2_norm
    rope: Callable[..., Tensor] = reference.rope
    route: Callable[[Tensor, int], tuple[Tensor, Tensor]] = reference.route
    expert_ffn: Callable[[Tensor, Weight, Weight, Weight], Tensor] = reference.expert_ffn
    write_kv: Callable[..., None] = reference_attention.write_kv
    attend: Callable[..., Tensor] = reference_attention.attend
    index_pool: Callable[..., None] = reference_attention.index_pool
    index_select: Callable[..., Tensor] = reference_attention.index_select
    conv_step: Callable[..., Tensor] = reference.conv_step
    delta_step: Callable[..., Tensor] = reference.delta_step
    replay_conv: Callable[[ConvState, Rows], None] = reference.replay_conv
    replay_delta: Callable[[DeltaState, Rows], None] = reference.replay_delta
    linears: Callable[[Tensor, Sequence[Weight]], tuple[Tensor, ...]] = reference_blocks.linears
    norm_rope: Callable[..., Tensor] = reference_blocks.norm_rope
    add_norm: Callable[..., tuple[Tensor, Tensor]] = reference_blocks.add_norm
    attend_input: Callable[..., Tensor] = reference_blocks.attend_input
    index_input: Callable[..., Tensor] = reference_blocks.index_input
    hc_mix: Callable[..., tuple[Tensor, Tensor, Tensor | None]] = reference_blocks.hc_mix
    hc_combine: Callable[[Tensor, Tensor, Tensor], Tensor] = reference_blocks.hc_combine
    ple_gate: Callable[..., tuple[Tensor, Tensor]] = reference_blocks.ple_gate
    gated_delta: Callable[..., Tensor] = reference_blocks.gated_delta
    moe_input: Callable[..., tuple[Tensor, Tensor, Tensor]] = reference_blocks.moe_input
    notes: Mapping[str, str] = field(default_factory=dict)

    @property
    def kernels(self) -> dict[str, str]:
        """What runs each operation: "reference", or the name of this implementation; and the notes."""
        found = {
            f.name: "reference" if getattr(self, f.name) is f.default else self.name
            for f in fields(self)
            if callable(f.default)
        }
        return found | dict(self.notes)


REFERENCE = Ops("reference")


__all__ = [
    "KEY_TILE",
    "REFERENCE",
    "ROW_TILE",
    "ConvState",
    "DeltaState",
    "DeviceRows",
    "KVLayer",
    "MixerWeights",
    "Ops",
    "Rows",
    "Span",
    "Weight",
]
