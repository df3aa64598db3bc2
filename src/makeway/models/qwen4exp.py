"""qwen4exp (Qwen3.8-Flash-Next): GDN and sparse attention, hyper-connections, PLE, shared expert, MTP block.

Owns the weights' views. Never knows the phase. Hazard: there are no layer norms and no output norm; the mixers of the
hyper-connections take their place, and the MTP block gets the wide residual *before* the output mixer.
"""

import torch
from torch import Tensor

from makeway.errors import UserError
from makeway.experts.routed import RoutedInput
from makeway.experts.store import FileExperts
from makeway.gguf import GGUFFile
from makeway.kernels import Ops, Weight
from makeway.kv import Batch
from makeway.layers import hyper_connections as hc
from makeway.layers.attention import AttentionWeights, attention, remember
from makeway.layers.delta_net import delta_net
from makeway.layers.moe import moe_input
from makeway.layers.ple import PleHash, PleWeights, gather, ple
from makeway.layers.sparse_attention import IndexerWeights
from makeway.models import blocks
from makeway.models.base import EMBEDDING, HOST, Header, Lookup, embedding
from makeway.models.weights import Place, WeightReader


class Qwen4Exp:
    """Loads views only; raises UserError for a file whose tensors and metadata disagree."""

    def __init__(self, file: GGUFFile, ops: Ops, device: torch.device, place: Place | None = None) -> None:
        head = Header.read(file)
        r = WeightReader(file, device, place)
        self.device = device
        self._ops, self._head, self._file = ops, head, file
        self._n_streams = file.get_int(f"{head.arch}.hyper_connection.count")
        self._low_rank = file.get_int(f"{head.arch}.hyper_connection.low_rank")
        if self._n_streams < 1:
            raise head.fault("hyper_connection.count", f"is {self._n_streams}, but must be above 0")
        recurrent = head.recurrent_layers()
        self._attention_shape = blocks.attention_shape(head, gated=True)
        self._delta_shape = blocks.delta_net_shape(head, tiled=True, sigmoid_gate=True)
        self._embed, self._output = blocks.vocabulary_weights(r, head)
        self._output_mixer = self._mixer(r, "output_hc_", inject=False)
        n = range(head.n_blocks)
        indexers = {i: self._indexer(r, i) for i in n if not recurrent[i]}
        self._mixers = [
            blocks.delta_net_weights(r, head, i, shape=self._delta_shape)
            if recurrent[i]
            else blocks.attention_weights(r, head, i, gated=True, indexer=indexers[i])
            for i in n
        ]
        self._hc_attn = [self._mixer(r, f"blk.{i}.hc_attn_", inject=True) for i in n]
        self._hc_ffn = [self._mixer(r, f"blk.{i}.hc_ffn_", inject=True) for i in n]
        self._moe = [blocks.moe_weights(r, head, i) for i in n]
        self.store = FileExperts(
            [r.experts(i, n_experts=head.n_experts, hidden=head.hidden, ff=head.expert_ff) for i in n]
        )
        self._read_ple(r)
        if head.n_draft_layers:
            self._draft = blocks.draft_weights(
                r, head, embed=self._embed, output=self._output, n_streams=self._n_streams
            )
            self._draft_mixer = self._mixer(r, head.draft_prefix + "hc_head_", inject=False)
        width = self._n_streams * head.hidden
        self.facts = head.facts(
            kv_shapes={i: blocks.kv_shape(head, indexers[i]) for i in n if not recurrent[i]},
            state_shapes={i: blocks.state_shape(head, self._delta_shape) for i in n if recurrent[i]},
            n_streams=self._n_streams,
            ple_tails={i: ((w.conv.shape[1] - 1) * h.ngram, width) for i, (w, h) in self._ple.items()},
        )

    def _mixer(self, r: WeightReader, prefix: str, *, inject: bool) -> hc.MixerWeights:
        width, rank = self._n_streams * self._head.hidden, self._low_rank
        return hc.MixerWeights(
            norm=r.vector(prefix + "norm.weight", (width,)),
            down=r.matrix(prefix + "down.weight", (rank, width)),
            up=r.matrix(prefix + "up.weight", (width, rank)),
            inject=r.matrix(prefix + "inject.weight", (self._n_streams, width)) if inject else None,
        )

    def _indexer(self, r: WeightReader, i: int) -> IndexerWeights | None:
        head, p = self._head, f"blk.{i}.indexer."
        if not r.has(p + "q_proj.weight"):
            return None
        key = f"{head.arch}.attention.compress_ratios"
        ratios = self._file.get_ints(key)
        ratio = int(ratios[i]) if i < len(ratios) else 0
        if ratio < 1 or 64 % ratio:
            raise UserError(
                f"{self._file.paths[0]}: '{key}' is {ratio} for layer {i}, which has a sparse-attention indexer "
                "(a known converter fault would make it attend densely); convert the model again with the plain "
                "config.json"
            )

        def number(name: str) -> int:
            return self._file.get_int(f"{head.arch}.attention.indexer.{name}")

        n_heads, dim = number("head_count"), number("key_length")
        if number("top_k") < ratio or head.n_rot > dim:
            raise head.fault("attention.indexer.top_k", f"is {number('top_k')} with keys of {dim} in blocks of {ratio}")
        return IndexerWeights(
            q_proj=r.matrix(p + "q_proj.weight", (n_heads * dim, head.hidden)),
            k_proj=r.matrix(p + "k_proj.weight", (dim, head.hidden)),
            q_norm=r.vector(p + "q_norm.weight", (dim,)),
            k_norm=r.vector(p + "k_norm.weight", (dim,)),
            n_heads=n_heads,
            dim=dim,
            ratio=ratio,
            n_select=number("top_k") // ratio,
            n_rot=head.n_rot,
            theta=head.theta,
            eps=head.eps,
        )

    def _read_ple(self, r: WeightReader) -> None:
        head, file, a = self._head, self._file, f"{self._head.arch}.ple."
        self._ple: dict[int, tuple[PleWeights, PleHash]] = {}
        if a + "layers" not in file.metadata:
            return
        ngram, per_ngram = file.get_int(a + "ngram_size"), file.get_int(a + "heads_per_ngram")
        row, taps = (
            file.get_int(f"{head.arch}.embedding_length_per_layer_input"),
            file.get_int(a + "conv_kernel"),
        )
        if ngram < 2 or per_ngram < 1:
            raise head.fault(
                "ple.ngram_size", f"is {ngram} with {per_ngram} heads per n-gram; it needs 2-grams at least"
            )
        n_heads, width = (ngram - 1) * per_ngram, self._n_streams * head.hidden
        table = r.matrix("per_layer_token_embd.weight", (file.get_tensor("per_layer_token_embd.weight").shape[0], row))
        multipliers, offsets, sizes = (
            [int(v) for v in file.get_ints(a + key)]
            for key in ("layer_multipliers", "head_offsets", "head_vocab_sizes")
        )
        for j, i in enumerate(int(v) for v in file.get_ints(a + "layers")):
            p, part = f"blk.{i}.ple_", slice(j * n_heads, (j + 1) * n_heads)
            hashes = PleHash(
                multipliers=tuple(multipliers[j * ngram : (j + 1) * ngram]),
                offsets=tuple(offsets[part]),
                sizes=tuple(sizes[part]),
                heads_per_ngram=per_ngram,
                eos=file.get_int(a + "eos_token_id"),
            )
            if len(hashes.multipliers) != ngram or not len(hashes.offsets) == len(hashes.sizes) == n_heads:
                raise head.fault(
                    "ple.layer_multipliers", f"and its relatives do not fit {ngram}-grams of {n_heads} heads"
                )
            ends = [o + s for o, s in zip(hashes.offsets, hashes.sizes, strict=True)]
            if min(hashes.sizes) < 1 or min(hashes.offsets) < 0 or max(ends) > table.n_rows:
                raise head.fault("ple.head_vocab_sizes", f"and offsets do not fit the table of {table.n_rows} rows")
            weights = PleWeights(
                table=table,
                key=r.matrix(p + "key.weight", (width, n_heads * row)),
                value=r.matrix(p + "value.weight", (head.hidden, n_heads * row)),
                norm_key=r.vector(p + "norm_key.weight", (width,)),
                norm_query=r.vector(p + "norm_query.weight", (width,)),
                norm_conv=r.vector(p + "norm_conv.weight", (width,)),
                conv=r.vector(p + "conv1d.weight", (width, taps)),
            )
            self._ple[i] = (weights, hashes)

    @property
    def lookups(self) -> dict[int, Lookup]:
        ngrams = {layer: Lookup(w.table, len(hashes.sizes)) for layer, (w, hashes) in self._ple.items()}
        return {EMBEDDING: Lookup(self._embed)} | ngrams

    def gather(self, batch: Batch) -> dict[int, Weight]:
        ngrams = {
            layer: gather(w.table, hashes, layer=layer, batch=batch, device=HOST)
            for layer, (w, hashes) in self._ple.items()
        }
        return {EMBEDDING: self._embed.pick(batch.tokens, HOST)} | ngrams

    @property
    def draft_lookups(self) -> dict[int, Lookup]:
        return {self.facts.n_layers: Lookup(self._draft.embed)}

    def draft_gather(self, batch: Batch) -> dict[int, Weight]:
        return {self.facts.n_layers: self._draft.embed.pick(batch.tokens, HOST)}

    def embed(self, batch: Batch) -> Tensor:
        return embedding(self._ops, self._embed, batch)[:, None].repeat(1, self._n_streams, 1)

    def mix(
        self, layer: int, h: Tensor, batch: Batch, *, before: RoutedInput | None = None
    ) -> tuple[Tensor, RoutedInput]:
        ops, eps, w = self._ops, self._head.eps, self._mixers[layer]
        if before is not None and layer in self._ple:  # its gate reads the streams
            h, before = self.combine(layer - 1, h, before), None
        if layer in self._ple:
            weights, hashes = self._ple[layer]
            h = h + ple(ops, weights, hashes, layer=layer, h=h, batch=batch, eps=eps)
        h, x, inject = hc.mix(ops, self._hc_attn[layer], h, eps=eps, added=_added(before))
        assert inject is not None
        if isinstance(w, AttentionWeights):
            out = attention(ops, self._attention_shape, w, layer=layer, x=x, batch=batch)
        else:
            out = delta_net(ops, self._delta_shape, w, layer=layer, x=x, batch=batch)
        h, x, inject = hc.mix(ops, self._hc_ffn[layer], h, eps=eps, added=(inject, out))
        return h, moe_input(ops, self._moe[layer], x, top_k=self._head.top_k, inject=inject)

    def router(self, layer: int) -> Weight:
        return self._moe[layer].router

    def combine(self, layer: int, h: Tensor, moe: RoutedInput) -> Tensor:
        assert moe.inject is not None
        return hc.combine(self._ops, h, moe.inject, moe.acc)

    def head(self, h: Tensor) -> Tensor:
        return self._ops.linear(hc.mix(self._ops, self._output_mixer, h, eps=self._head.eps)[1], self._output)

    def trunk_state(self, h: Tensor) -> Tensor:
        return h

    def draft_input(self, batch: Batch, state: Tensor) -> Tensor:
        n, ops, eps = state.shape[0], self._ops, self._head.eps
        e = embedding(ops, self._draft.embed, batch, key=self.facts.n_layers)
        e = ops.rms_norm(e, self._draft.enorm, eps)
        e = e[:, None].expand(n, self._n_streams, -1)
        both = torch.cat((e, hc.stream_norm(ops, state, self._draft.hnorm, eps)), dim=-1)
        return ops.linear(both.reshape(n * self._n_streams, -1), self._draft.eh_proj).view_as(state)

    def draft_remember(self, batch: Batch, state: Tensor) -> None:
        layer = self.facts.n_layers
        w = self._mixers[layer]
        assert isinstance(w, AttentionWeights)
        _, x, _ = hc.mix(self._ops, self._hc_attn[layer], self.draft_input(batch, state), eps=self._head.eps)
        remember(self._ops, self._attention_shape, w, layer=layer, x=x, batch=batch)

    def draft_state(self, h: Tensor) -> Tensor:
        return h

    def draft_head(self, h: Tensor) -> Tensor:
        mixed = hc.mix(self._ops, self._draft_mixer, h, eps=self._head.eps)[1]
        return self._ops.linear(mixed, self._draft.output)


def _added(moe: RoutedInput | None) -> tuple[Tensor, Tensor] | None:
    """What `combine` adds to the streams, and how much of it to each."""
    if moe is None:
        return None
    assert moe.inject is not None
    return moe.inject, moe.acc
