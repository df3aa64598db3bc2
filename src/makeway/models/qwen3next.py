"""qwen3next and qwen35moe: Gated DeltaNet and gated attention in turn, MoE with a shared expert, pre-norm residual.

Owns the weights' views. Never knows the phase. Hazard: the two order V heads differently (`tiled`), and only
qwen35moe has an MTP block, whose state is the hidden *after* the output norm.
"""

import torch
from torch import Tensor

from makeway.experts.routed import RoutedInput
from makeway.experts.store import FileExperts
from makeway.gguf import GGUFFile
from makeway.kernels import Ops, Weight
from makeway.kv import Batch
from makeway.layers.attention import AttentionWeights, attention, remember
from makeway.layers.delta_net import delta_net
from makeway.layers.moe import moe_input
from makeway.models import blocks
from makeway.models.base import EMBEDDING, HOST, Header, Lookup, embedding
from makeway.models.weights import Place, WeightReader


class Qwen3Next:
    """Loads views only; raises UserError for a file whose tensors and metadata disagree."""

    tiled = False

    def __init__(self, file: GGUFFile, ops: Ops, device: torch.device, place: Place | None = None) -> None:
        head = Header.read(file)
        r = WeightReader(file, device, place)
        self.device = device
        self._ops, self._head = ops, head
        recurrent = head.recurrent_layers()
        self._attention_shape = blocks.attention_shape(head, gated=True)
        self._delta_shape = blocks.delta_net_shape(head, tiled=self.tiled, sigmoid_gate=False)
        self._embed, self._output = blocks.vocabulary_weights(r, head)
        self._output_norm = r.vector("output_norm.weight", (head.hidden,))
        n = range(head.n_blocks)
        self._mixers = [
            blocks.delta_net_weights(r, head, i, shape=self._delta_shape)
            if recurrent[i]
            else blocks.attention_weights(r, head, i, gated=True)
            for i in n
        ]
        self._norms = [r.vector(f"blk.{i}.attn_norm.weight", (head.hidden,)) for i in n]
        self._ffn_norms = [r.vector(f"blk.{i}.post_attention_norm.weight", (head.hidden,)) for i in n]
        self._moe = [blocks.moe_weights(r, head, i) for i in n]
        self.store = FileExperts(
            [r.experts(i, n_experts=head.n_experts, hidden=head.hidden, ff=head.expert_ff) for i in n]
        )
        if head.n_draft_layers:
            self._draft = blocks.draft_weights(r, head, embed=self._embed, output=self._output)
            self._draft_norm = r.vector(head.draft_prefix + "shared_head_norm.weight", (head.hidden,))
        self.facts = head.facts(
            kv_shapes={i: blocks.kv_shape(head) for i in n if not recurrent[i]},
            state_shapes={i: blocks.state_shape(head, self._delta_shape) for i in n if recurrent[i]},
        )

    def _norm(self, x: Tensor, gamma: Tensor) -> Tensor:
        return self._ops.add_norm(x, None, gamma=gamma, eps=self._head.eps)[1]

    @property
    def lookups(self) -> dict[int, Lookup]:
        return {EMBEDDING: Lookup(self._embed)}

    def gather(self, batch: Batch) -> dict[int, Weight]:
        return {EMBEDDING: self._embed.pick(batch.tokens, HOST)}

    @property
    def draft_lookups(self) -> dict[int, Lookup]:
        return {self.facts.n_layers: Lookup(self._draft.embed)}

    def draft_gather(self, batch: Batch) -> dict[int, Weight]:
        return {self.facts.n_layers: self._draft.embed.pick(batch.tokens, HOST)}

    def embed(self, batch: Batch) -> Tensor:
        return embedding(self._ops, self._embed, batch)

    def mix(
        self, layer: int, h: Tensor, batch: Batch, *, before: RoutedInput | None = None
    ) -> tuple[Tensor, RoutedInput]:
        ops, eps, w, added = self._ops, self._head.eps, self._mixers[layer], None if before is None else before.acc
        h, x = ops.add_norm(h, added, gamma=self._norms[layer], eps=eps)
        if isinstance(w, AttentionWeights):
            out = attention(ops, self._attention_shape, w, layer=layer, x=x, batch=batch)
        else:
            out = delta_net(ops, self._delta_shape, w, layer=layer, x=x, batch=batch)
        h, x = ops.add_norm(h, out, gamma=self._ffn_norms[layer], eps=eps)
        return h, moe_input(ops, self._moe[layer], x, top_k=self._head.top_k)

    def router(self, layer: int) -> Weight:
        return self._moe[layer].router

    def combine(self, layer: int, h: Tensor, moe: RoutedInput) -> Tensor:
        return h + moe.acc

    def head(self, h: Tensor) -> Tensor:
        return self._ops.linear(self._norm(h, self._output_norm), self._output)

    def trunk_state(self, h: Tensor) -> Tensor:
        return self._norm(h, self._output_norm)

    def draft_input(self, batch: Batch, state: Tensor) -> Tensor:
        e = embedding(self._ops, self._draft.embed, batch, key=self.facts.n_layers)
        e = self._norm(e, self._draft.enorm)
        return self._ops.linear(torch.cat((e, self._norm(state, self._draft.hnorm)), dim=-1), self._draft.eh_proj)

    def draft_remember(self, batch: Batch, state: Tensor) -> None:
        layer = self.facts.n_layers
        w = self._mixers[layer]
        assert isinstance(w, AttentionWeights)
        x = self._norm(self.draft_input(batch, state), self._norms[layer])
        remember(self._ops, self._attention_shape, w, layer=layer, x=x, batch=batch)

    def draft_state(self, h: Tensor) -> Tensor:
        return self._norm(h, self._draft_norm)

    def draft_head(self, h: Tensor) -> Tensor:
        return self._ops.linear(self._norm(h, self._draft_norm), self._draft.output)
