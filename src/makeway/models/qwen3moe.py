"""qwen3moe: dense attention without gate in every layer, MoE without a shared expert, pre-norm residual.

Owns the weights' views. Never knows the phase. Hazard: gammas are w itself here, as in every GGUF of this family.
"""

import torch
from torch import Tensor

from makeway.errors import UserError
from makeway.experts.routed import RoutedInput
from makeway.experts.store import FileExperts
from makeway.gguf import GGUFFile
from makeway.kernels import Ops, Weight
from makeway.kv import Batch
from makeway.layers.attention import attention
from makeway.layers.moe import moe_input
from makeway.models import blocks
from makeway.models.base import EMBEDDING, HOST, Header, Lookup, embedding
from makeway.models.weights import Place, WeightReader


class Qwen3Moe:
    """Loads views only; raises UserError for a file whose tensors and metadata disagree."""

    def __init__(self, file: GGUFFile, ops: Ops, device: torch.device, place: Place | None = None) -> None:
        head = Header.read(file)
        if head.n_draft_layers:
            raise UserError(f"{file.paths[0]}: qwen3moe files have no MTP block, this one names {head.n_draft_layers}")
        r = WeightReader(file, device, place)
        self.device = device
        self._ops, self._head = ops, head
        self._shape = blocks.attention_shape(head, gated=False)
        self._embed, self._output = blocks.vocabulary_weights(r, head)
        self._output_norm = r.vector("output_norm.weight", (head.hidden,))
        n = range(head.n_blocks)
        self._attention = [blocks.attention_weights(r, head, i, gated=False) for i in n]
        self._norms = [r.vector(f"blk.{i}.attn_norm.weight", (head.hidden,)) for i in n]
        self._ffn_norms = [r.vector(f"blk.{i}.ffn_norm.weight", (head.hidden,)) for i in n]
        self._moe = [blocks.moe_weights(r, head, i) for i in n]
        self.store = FileExperts(
            [r.experts(i, n_experts=head.n_experts, hidden=head.hidden, ff=head.expert_ff) for i in n]
        )
        self.facts = head.facts(
            kv_shapes={i: blocks.kv_shape(head) for i in n},
            state_shapes={},
        )

    @property
    def lookups(self) -> dict[int, Lookup]:
        return {EMBEDDING: Lookup(self._embed)}

    def gather(self, batch: Batch) -> dict[int, Weight]:
        return {EMBEDDING: self._embed.pick(batch.tokens, HOST)}

    def embed(self, batch: Batch) -> Tensor:
        return embedding(self._ops, self._embed, batch)

    def mix(
        self, layer: int, h: Tensor, batch: Batch, *, before: RoutedInput | None = None
    ) -> tuple[Tensor, RoutedInput]:
        ops, eps, added = self._ops, self._head.eps, None if before is None else before.acc
        h, x = ops.add_norm(h, added, gamma=self._norms[layer], eps=eps)
        out = attention(ops, self._shape, self._attention[layer], layer=layer, x=x, batch=batch)
        h, x = ops.add_norm(h, out, gamma=self._ffn_norms[layer], eps=eps)
        return h, moe_input(ops, self._moe[layer], x, top_k=self._head.top_k)

    def router(self, layer: int) -> Weight:
        return self._moe[layer].router

    def combine(self, layer: int, h: Tensor, moe: RoutedInput) -> Tensor:
        return h + moe.acc

    def head(self, h: Tensor) -> Tensor:
        _, x = self._ops.add_norm(h, None, gamma=self._output_norm, eps=self._head.eps)
        return self._ops.linear(x, self._output)

    def trunk_state(self, h: Tensor) -> Tensor:
        raise AssertionError("qwen3moe has no MTP block")

    @property
    def draft_lookups(self) -> dict[int, Lookup]:
        return {}

    def draft_gather(self, batch: Batch) -> dict[int, Weight]:
        raise AssertionError("qwen3moe has no MTP block")

    def draft_input(self, batch: Batch, state: Tensor) -> Tensor:
        raise AssertionError("qwen3moe has no MTP block")

    def draft_remember(self, batch: Batch, state: Tensor) -> None:
        raise AssertionError("qwen3moe has no MTP block")

    def draft_state(self, h: Tensor) -> Tensor:
        raise AssertionError("qwen3moe has no MTP block")

    def draft_head(self, h: Tensor) -> Tensor:
        raise AssertionError("qwen3moe has no MTP block")
