"""Shapes of models to be synthesised: every tensor's name and size, and the metadata that goes with them.

Owns the names; never makes a byte (`synth.py`). Types are those of real packs as far as known.
Hazard: a key that llama.cpp needs and makeway does not is missed by no test but the one that loads both.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from makeway.bench.specs import (
    Normal,
    Shape,
    TensorSpec,
    TokenRows,
    Uniform,
    experts,
    gamma,
    prefixed,
    prefixed_flat,
    reads,
    writes,
)
from makeway.gguf import GGMLType as T

EPS = float(np.float32(1e-6))  # as a file gives it back


@dataclass(frozen=True)
class Qwen3MoeShape:
    """qwen3moe; the defaults are Qwen3-30B-A3B with experts of one type, 16.3 GB of them in Q4_K."""

    n_layers: int = 48
    hidden: int = 2048
    n_vocab: int = 151_936
    n_heads: int = 32
    n_kv: int = 4
    head_dim: int = 128
    n_experts: int = 128
    top_k: int = 8
    expert_ff: int = 768
    context: int = 40_960
    gate_up: T = T.Q4_K
    down: T = T.Q4_K
    attention: T = T.Q4_K
    attention_out: T = T.Q6_K
    head: T = T.Q6_K
    pre: str = "qwen2"

    def metadata(self) -> dict[str, Any]:
        keys: dict[str, Any] = {
            "block_count": self.n_layers,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "feed_forward_length": self.expert_ff * self.top_k,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": EPS,
            "rope.freq_base": 1e6,
            "expert_count": self.n_experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.expert_ff,
        }
        name = f"synthetic qwen3moe {self.n_layers}x{self.n_experts}"
        return {"general.architecture": "qwen3moe", "general.name": name} | prefixed("qwen3moe", keys)

    def tensors(self) -> dict[str, TensorSpec]:
        h, d = self.hidden, self.head_dim
        out = {
            "token_embd.weight": TensorSpec(T.Q4_K, (self.n_vocab, h), TokenRows(is_head=False)),
            "output.weight": TensorSpec(self.head, (self.n_vocab, h), TokenRows(is_head=True)),
            "output_norm.weight": gamma(h),
        }
        for i in range(self.n_layers):
            layer = {
                "attn_norm.weight": gamma(h),
                "ffn_norm.weight": gamma(h),
                "attn_q.weight": reads(self.attention, self.n_heads * d, h),
                "attn_k.weight": reads(self.attention, self.n_kv * d, h),
                "attn_v.weight": reads(self.attention_out, self.n_kv * d, h),
                "attn_output.weight": writes(self.attention_out, h, self.n_heads * d),
                "attn_q_norm.weight": gamma(d),
                "attn_k_norm.weight": gamma(d),
            }
            layer |= experts(
                self.n_experts, self.top_k, hidden=h, ff=self.expert_ff, gate_up=self.gate_up, down=self.down
            )
            out |= prefixed(f"blk.{i}", layer)
        return out


@dataclass(frozen=True)
class Qwen4ExpShape:
    """qwen4exp; the defaults are Flash-Next in the manner of UD-Q4_K_XL (dense types as far as known).

    `ple_rows` 0 leaves the PLE out. `n_draft` 1 adds the MTP block. `n_draft` and `ple_rows` of the real one: 1 and
    320,001,536.
    """

    n_layers: int = 48
    n_draft: int = 0
    hidden: int = 2560
    n_vocab: int = 248_320
    n_streams: int = 4
    low_rank: int = 320
    n_heads: int = 24
    n_kv: int = 2
    head_dim: int = 256
    n_rot: int = 64
    n_experts: int = 512
    top_k: int = 10
    expert_ff: int = 640
    shared_ff: int = 640
    k_heads: int = 16
    v_heads: int = 48
    delta_dim: int = 128
    interval: int = 4
    index_heads: int = 4
    index_dim: int = 128
    budget: int = 2048
    ratio: int = 4
    ple_rows: int = 0
    ple_row: int = 160
    ple_layer: int = 1
    heads_per_ngram: int = 8
    context: int = 262_144
    gate_up: T = T.Q4_K
    down: T = T.Q5_1
    shared_down: T = T.Q8_0
    attention: T = T.Q5_K
    attention_out: T = T.Q6_K
    head: T = T.Q6_K
    table: T = T.Q4_0
    pre: str = "qwen35"

    @property
    def n_blocks(self) -> int:
        return self.n_layers + self.n_draft

    @property
    def wide(self) -> int:
        return self.n_streams * self.hidden

    def is_delta(self, block: int) -> bool:
        """Linear attention? The MTP block never is."""
        return block < self.n_layers and (block + 1) % self.interval != 0

    def metadata(self) -> dict[str, Any]:
        blocks = range(self.n_blocks)
        sections = np.array([self.n_rot // 6 + (i < self.n_rot // 2 % 3) for i in range(3)] + [0], np.int32)
        keys: dict[str, Any] = {
            "block_count": self.n_blocks,
            "context_length": self.context,
            "embedding_length": self.hidden,
            "attention.head_count": self.n_heads,
            "attention.head_count_kv": self.n_kv,
            "attention.key_length": self.head_dim,
            "attention.value_length": self.head_dim,
            "attention.layer_norm_rms_epsilon": EPS,
            "attention.recurrent_layers": [self.is_delta(i) for i in blocks],
            "attention.compress_ratios": np.array([0 if self.is_delta(i) else self.ratio for i in blocks], np.int32),
            "attention.indexer.head_count": self.index_heads,
            "attention.indexer.key_length": self.index_dim,
            "attention.indexer.top_k": self.budget,
            "rope.freq_base": 1e7,
            "rope.dimension_count": self.n_rot,
            "rope.dimension_sections": sections,
            "expert_count": self.n_experts,
            "expert_used_count": self.top_k,
            "expert_feed_forward_length": self.expert_ff,
            "expert_shared_feed_forward_length": self.shared_ff,
            "ssm.conv_kernel": 4,
            "ssm.state_size": self.delta_dim,
            "ssm.group_count": self.k_heads,
            "ssm.time_step_rank": self.v_heads,
            "ssm.inner_size": self.v_heads * self.delta_dim,
            "full_attention_interval": self.interval,
            "hyper_connection.count": self.n_streams,
            "hyper_connection.low_rank": self.low_rank,
        }
        if self.n_draft:
            keys["nextn_predict_layers"] = self.n_draft
        if self.ple_rows:
            keys |= self._hashes()
        name = f"synthetic qwen4exp {self.n_layers}x{self.n_experts}"
        return {"general.architecture": "qwen4exp", "general.name": name} | prefixed("qwen4exp", keys)

    def _hashes(self) -> dict[str, Any]:
        """Constants of the n-gram hash: one prime number of rows per head, all within the table."""
        sizes = _primes_below(self.ple_rows // (2 * self.heads_per_ngram), 2 * self.heads_per_ngram)
        # Products of token and multiplier stay below 2^63, as in the real files.
        top = ((1 << 63) - 1) // self.n_vocab
        multipliers = [top // 2 | 1, top // 3 | 1, top // 5 | 1]
        return {
            "embedding_length_per_layer_input": self.ple_row,
            "ple.layers": np.array([self.ple_layer], np.int32),
            "ple.ngram_size": 3,
            "ple.heads_per_ngram": self.heads_per_ngram,
            "ple.conv_kernel": 4,
            "ple.eos_token_id": self.n_vocab - 1,
            "ple.layer_multipliers": np.array(multipliers, np.uint64),
            "ple.head_offsets": np.array([sum(sizes[:i]) for i in range(len(sizes))], np.uint64),
            "ple.head_vocab_sizes": np.array(sizes, np.uint64),
        }

    def tensors(self) -> dict[str, TensorSpec]:
        out = {
            "token_embd.weight": TensorSpec(self.head, (self.n_vocab, self.hidden), TokenRows(is_head=False)),
            "output.weight": TensorSpec(self.head, (self.n_vocab, self.hidden), TokenRows(is_head=True)),
        }
        out |= self._mixer("output_hc_", inject=False)
        if self.ple_rows:
            out["per_layer_token_embd.weight"] = TensorSpec(self.table, (self.ple_rows, self.ple_row), Normal(1.0))
        for i in range(self.n_blocks):
            layer = self._delta() if self.is_delta(i) else self._attention()
            layer |= experts(
                self.n_experts, self.top_k, hidden=self.hidden, ff=self.expert_ff, gate_up=self.gate_up, down=self.down
            )
            layer |= self._shared() | self._mixer("hc_attn_", inject=True) | self._mixer("hc_ffn_", inject=True)
            if self.ple_rows and i == self.ple_layer:
                layer |= self._ple()
            out |= prefixed(f"blk.{i}", layer)
        if self.n_draft:
            draft = {
                "eh_proj.weight": reads(self.attention_out, self.hidden, 2 * self.hidden),
                "enorm.weight": gamma(self.hidden),
                "hnorm.weight": gamma(self.wide),
            } | self._mixer("hc_head_", inject=False)
            out |= prefixed(f"blk.{self.n_layers}.nextn", draft)
        return out

    def _mixer(self, prefix: str, *, inject: bool) -> dict[str, TensorSpec]:
        out = {
            prefix + "norm.weight": gamma(self.wide, 2.0),
            prefix + "down.weight": reads(T.Q8_0, self.low_rank, self.wide),
            prefix + "up.weight": reads(T.Q8_0, self.wide, self.low_rank),
        }
        return out | ({prefix + "inject.weight": reads(T.Q8_0, self.n_streams, self.wide)} if inject else {})

    def _shared(self) -> dict[str, TensorSpec]:
        h, ff = self.hidden, self.shared_ff
        return {
            "ffn_gate_inp_shexp.weight": reads(T.F32, 1, h),
            "ffn_gate_shexp.weight": reads(self.attention_out, ff, h),
            "ffn_up_shexp.weight": reads(self.attention_out, ff, h),
            "ffn_down_shexp.weight": writes(self.shared_down, h, ff),
        }

    def _attention(self) -> dict[str, TensorSpec]:
        h, d = self.hidden, self.head_dim
        return {
            "attn_q.weight": reads(self.attention, 2 * self.n_heads * d, h),
            "attn_k.weight": reads(self.attention, self.n_kv * d, h),
            "attn_v.weight": reads(self.attention_out, self.n_kv * d, h),
            "attn_output.weight": writes(self.attention_out, h, self.n_heads * d),
            "attn_q_norm.weight": gamma(d),
            "attn_k_norm.weight": gamma(d),
            "indexer.q_proj.weight": reads(T.BF16, self.index_heads * self.index_dim, h),
            "indexer.k_proj.weight": reads(T.BF16, self.index_dim, h),
            "indexer.q_norm.weight": gamma(self.index_dim),
            "indexer.k_norm.weight": gamma(self.index_dim),
        }

    def _delta(self) -> dict[str, TensorSpec]:
        h, inner = self.hidden, self.v_heads * self.delta_dim
        channels = 2 * self.k_heads * self.delta_dim + inner
        return {
            "attn_qkv.weight": reads(self.attention, channels, h),
            "attn_gate.weight": reads(self.attention, inner, h),
            "ssm_conv1d.weight": TensorSpec(T.F32, (channels, 4), Normal(0.5)),
            "ssm_dt.bias": TensorSpec(T.F32, (self.v_heads,), Uniform(-6.0, -2.5)),
            "ssm_a": TensorSpec(T.F32, (self.v_heads,), Uniform(-8.0, -1.0)),
            "ssm_alpha.weight": reads(T.Q8_0, self.v_heads, h),
            "ssm_beta.weight": reads(T.Q8_0, self.v_heads, h),
            "ssm_norm.weight": gamma(self.delta_dim, 2.0),
            "ssm_out.weight": writes(self.attention_out, h, inner),
        }

    def _ple(self) -> dict[str, TensorSpec]:
        embed = 2 * self.heads_per_ngram * self.ple_row
        return prefixed_flat(
            "ple_",
            {
                "key.weight": reads(self.attention_out, self.wide, embed),
                "value.weight": writes(self.attention_out, self.hidden, embed),
                "norm_key.weight": gamma(self.wide),
                "norm_query.weight": gamma(self.wide),
                "norm_conv.weight": gamma(self.wide),
                "conv1d.weight": TensorSpec(T.F16, (self.wide, 4), Normal(0.1)),
            },
        )


def _primes_below(limit: int, count: int) -> list[int]:
    """The `count` largest primes that are at most `limit`."""
    found: list[int] = []
    n = limit
    while len(found) < count:
        assert n > 1, f"no {count} primes up to {limit}"
        if all(n % d for d in range(2, int(n**0.5) + 1)):
            found.append(n)
        n -= 1
    return found


SHAPES: dict[str, Shape] = {
    "flash-next": Qwen4ExpShape(),
    "qwen3-30b-a3b": Qwen3MoeShape(),
    # 19.3 GB of experts in 16 layers, as another program's own dummy weights are.
    "qwen3-30b-a3b-bf16": Qwen3MoeShape(n_layers=16, gate_up=T.BF16, down=T.BF16),
    # A few layers of each kind at toy width: seconds on a CPU, K-quants and all.
    "tiny-flash-next": Qwen4ExpShape(
        n_layers=4,
        n_draft=1,
        hidden=256,
        n_vocab=1024,
        low_rank=32,
        n_heads=4,
        n_kv=2,
        head_dim=64,
        n_rot=16,
        n_experts=64,
        top_k=4,
        expert_ff=32,
        shared_ff=32,
        k_heads=2,
        v_heads=4,
        delta_dim=64,
        index_heads=4,
        index_dim=32,
        budget=64,
        ple_rows=4096,
        ple_row=32,
        heads_per_ngram=4,
        context=4096,
    ),
    "tiny-qwen3": Qwen3MoeShape(
        n_layers=3,
        hidden=256,
        n_vocab=512,
        n_heads=4,
        n_kv=2,
        head_dim=64,
        n_experts=32,
        top_k=4,
        expert_ff=256,
        context=4096,
    ),
}
"""By name, for the command line; `dataclasses.replace` changes depth, PLE or anything else."""
