"""What every model offers, and the facts that are read off a file's header.

Owns the protocol between models and the engine. Never names an architecture. Hazard: `mix` and `combine` are halves of
one layer; between them the routed experts must have been added to `acc`, for every row exactly once.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from makeway.errors import UserError
from makeway.experts.executors import Experts
from makeway.experts.routed import RoutedInput
from makeway.experts.store import FileExperts
from makeway.gguf import GGUFFile
from makeway.kernels import Ops, Weight
from makeway.kv import Batch, KVShape, StateShape


@dataclass(frozen=True)
class ModelFacts:
    """Integers and floats of a model. Layer `n_layers` (if n_draft_layers is 1) is the MTP block."""

    architecture: str
    name: str
    n_layers: int
    n_draft_layers: int
    hidden: int
    n_streams: int
    n_vocab: int
    context_length: int
    n_experts: int
    top_k: int
    expert_ff: int
    shared_ff: int
    eps: float
    kv_shapes: dict[int, KVShape]
    state_shapes: dict[int, StateShape]
    ple_tails: dict[int, tuple[int, int]]

    @property
    def n_blocks(self) -> int:
        """Layers with experts, the MTP block included."""
        return self.n_layers + self.n_draft_layers

    @property
    def draft_tails(self) -> dict[int, tuple[int, ...]]:
        """By MTP block: the shape of what it needs of the trunk for one token."""
        shape = (self.n_streams, self.hidden) if self.n_streams > 1 else (self.hidden,)
        return dict.fromkeys(range(self.n_layers, self.n_blocks), shape)


HOST = torch.device("cpu")
EMBEDDING = -1
"""Where the rows of the embedding stand among those of n-gram tables, which have the numbers of their layers."""


@dataclass(frozen=True)
class Lookup:
    """A table of which single rows are read, so many for each token."""

    table: Weight
    per_token: int = 1


class Model(Protocol):
    """h is the residual: f32 [n, hidden], or [n, streams, hidden] where there are hyper-connections."""

    facts: ModelFacts
    store: FileExperts
    device: torch.device

    @property
    def lookups(self) -> dict[int, "Lookup"]:
        """Tables of which the trunk reads single rows: n-grams by layer, and `EMBEDDING`."""
        ...

    def gather(self, batch: Batch) -> dict[int, Weight]:
        """Those rows of the batch's tokens, on the host, for `Batch.gathered`; moves the n-gram windows on."""
        ...

    @property
    def draft_lookups(self) -> dict[int, "Lookup"]:
        """The same of the MTP block: its embedding, by its layer."""
        ...

    def draft_gather(self, batch: Batch) -> dict[int, Weight]: ...

    def embed(self, batch: Batch) -> Tensor: ...

    def mix(
        self, layer: int, h: Tensor, batch: Batch, *, before: RoutedInput | None = None
    ) -> tuple[Tensor, RoutedInput]:
        """The layer up to its routed experts: the residual after the mixer, and what the experts need.

        before: the experts of the layer before, all in `acc`, whose `combine` is done here then."""
        ...

    def router(self, layer: int) -> Weight:
        """Of a layer: f32 [n_experts, hidden], for the same input as its experts."""
        ...

    def combine(self, layer: int, h: Tensor, moe: RoutedInput) -> Tensor:
        """The residual after the layer, once the routed experts are in `moe.acc`."""
        ...

    def head(self, h: Tensor) -> Tensor:
        """Logits f32 [n, vocab] of the residual after the last layer."""
        ...

    def trunk_state(self, h: Tensor) -> Tensor:
        """What the MTP block gets of the residual after the last trunk layer."""
        ...

    def draft_input(self, batch: Batch, state: Tensor) -> Tensor:
        """The MTP block's residual from the batch's tokens and the state of the position before each."""
        ...

    def draft_remember(self, batch: Batch, state: Tensor) -> None:
        """Writes what the MTP block's attention keeps of rows whose output nobody needs; arguments as above."""
        ...

    def draft_state(self, h: Tensor) -> Tensor:
        """What a chained draft gets of the residual after the MTP block."""
        ...

    def draft_head(self, h: Tensor) -> Tensor:
        """Draft logits f32 [n, vocab] of the residual after the MTP block."""
        ...


def run_layer(model: Model, experts: Experts, layer: int, *, h: Tensor, batch: Batch) -> Tensor:
    """One whole layer over the batch's rows."""
    h, moe = model.mix(layer, h, batch)
    experts(layer, moe)
    return model.combine(layer, h, moe)


def run_trunk(model: Model, experts: Experts, batch: Batch) -> Tensor:
    """All trunk layers over the batch's rows; the sequences advance, or hold the rows of a verify step. Returns the
    residual after the last layer."""
    h = model.embed(batch)
    for layer in range(model.facts.n_layers):
        h = run_layer(model, experts, layer, h=h, batch=batch)
    batch.complete()
    return h


@dataclass(frozen=True)
class Header:
    """The keys that all supported architectures share, read once."""

    file: GGUFFile
    arch: str
    n_blocks: int
    n_draft_layers: int
    hidden: int
    n_vocab: int
    context_length: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_rot: int
    theta: float
    eps: float
    n_experts: int
    top_k: int
    expert_ff: int
    shared_ff: int

    @property
    def n_layers(self) -> int:
        return self.n_blocks - self.n_draft_layers

    @property
    def draft_prefix(self) -> str:
        """Where the names of the MTP block's own tensors begin."""
        return f"blk.{self.n_layers}.nextn."

    @classmethod
    def read(cls, file: GGUFFile) -> "Header":
        arch = file.get_str("general.architecture")

        def number(key: str, default: int | None = None) -> int:
            if default is None:
                return file.get_int(f"{arch}.{key}")
            return file.get_int(f"{arch}.{key}", default=default)

        head_dim = number("attention.key_length")
        head = cls(
            file=file,
            arch=arch,
            n_blocks=number("block_count"),
            n_draft_layers=number("nextn_predict_layers", 0),
            hidden=number("embedding_length"),
            n_vocab=file.get_tensor("token_embd.weight").shape[0],
            context_length=number("context_length"),
            n_heads=number("attention.head_count"),
            n_kv_heads=number("attention.head_count_kv"),
            head_dim=head_dim,
            n_rot=number("rope.dimension_count", head_dim),
            theta=file.get_float(f"{arch}.rope.freq_base"),
            eps=file.get_float(f"{arch}.attention.layer_norm_rms_epsilon"),
            n_experts=number("expert_count"),
            top_k=number("expert_used_count"),
            expert_ff=number("expert_feed_forward_length"),
            shared_ff=number("expert_shared_feed_forward_length", 0),
        )
        head._check()
        return head

    def facts(
        self,
        *,
        kv_shapes: dict[int, KVShape],
        state_shapes: dict[int, StateShape],
        n_streams: int = 1,
        ple_tails: dict[int, tuple[int, int]] | None = None,
    ) -> ModelFacts:
        """The facts of the model with this header and these caches."""
        return ModelFacts(
            architecture=self.arch,
            name=str(self.file.metadata.get("general.name", "")),
            n_layers=self.n_layers,
            n_draft_layers=self.n_draft_layers,
            hidden=self.hidden,
            n_streams=n_streams,
            n_vocab=self.n_vocab,
            context_length=self.context_length,
            n_experts=self.n_experts,
            top_k=self.top_k,
            expert_ff=self.expert_ff,
            shared_ff=self.shared_ff,
            eps=self.eps,
            kv_shapes=kv_shapes,
            state_shapes=state_shapes,
            ple_tails=ple_tails or {},
        )

    def fault(self, key: str, why: str) -> UserError:
        """The error for a key of this architecture whose value cannot be."""
        return UserError(
            f"{self.file.paths[0]}: '{self.arch}.{key}' {why}; the header is damaged or from a faulty converter, "
            "convert the model again"
        )

    def _check(self) -> None:
        """Refuses numbers that no model has; shapes of tensors are checked where they are read."""
        positive = {
            "block_count": self.n_blocks,
            "embedding_length": self.hidden,
            "context_length": self.context_length,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv_heads,
            "attention.key_length": self.head_dim,
            "expert_count": self.n_experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.expert_ff,
            "rope.freq_base": self.theta,
            "attention.layer_norm_rms_epsilon": self.eps,
        }
        for key, value in positive.items():
            if not (0 < value < math.inf):
                raise self.fault(key, f"is {value}, but must be above 0")
        if not 0 <= self.n_draft_layers < self.n_blocks:
            raise self.fault("nextn_predict_layers", f"is {self.n_draft_layers} of {self.n_blocks} blocks")
        if self.top_k > self.n_experts:
            raise self.fault("expert_used_count", f"is {self.top_k}, but there are {self.n_experts} experts")
        if self.n_heads % self.n_kv_heads:
            raise self.fault("attention.head_count", f"is {self.n_heads}, no multiple of {self.n_kv_heads} KV heads")
        value_dim = self.file.get_int(f"{self.arch}.attention.value_length", default=self.head_dim)
        if value_dim != self.head_dim:
            raise self.fault("attention.value_length", f"is {value_dim}, but keys have {self.head_dim} values")
        if self.n_rot % 2 or not 0 < self.n_rot <= self.head_dim:
            raise self.fault("rope.dimension_count", f"is {self.n_rot}; it must be even and at most {self.head_dim}")

    def recurrent_layers(self) -> tuple[bool, ...]:
        """By block: is it linear attention? From the list, or from the interval; the MTP block never is."""
        key = "attention.recurrent_layers"
        if f"{self.arch}.{key}" not in self.file.metadata:
            every = self.file.get_int(f"{self.arch}.full_attention_interval")
            if every < 1:
                raise self.fault("full_attention_interval", f"is {every}, but must be above 0")
            flags = tuple((i + 1) % every != 0 for i in range(self.n_layers))
        else:
            flags = tuple(self.file.get_bools(f"{self.arch}.{key}"))[: self.n_layers]
            if len(flags) != self.n_layers:
                raise self.fault(key, f"has {len(flags)} entries for {self.n_layers} layers")
        return flags + (False,) * self.n_draft_layers


def embedding(ops: Ops, weight: Weight, batch: Batch, *, key: int = EMBEDDING) -> Tensor:
    """Rows of an embedding matrix, f32 [n, hidden], on the batch's device; those fetched ahead stand under `key`."""
    rows = batch.gathered.get(key)
    if rows is None:  # by the host's tokens: the table lies there, and those of the device would have to be waited for
        rows = weight.pick(torch.tensor(batch.host_tokens, dtype=torch.int64), batch.tokens.device)
    return ops.decode(rows)
