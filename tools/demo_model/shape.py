"""The model's shape: every size, every tensor's name and shape (GGUF names and conventions), and the first values.

Owns no weights. Hazard: gammas are the factor itself (not w - 1), V heads are tiled, and the decay is kept as its log.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor

MTP_ONLY = ("nextn.eh_proj", "nextn.enorm", "nextn.hnorm", "nextn.hc_head_norm")


def primes_from(start: int, count: int) -> tuple[int, ...]:
    """The first `count` primes that are at least `start`."""
    found: list[int] = []
    n = start
    while len(found) < count:
        if n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1)):
            found.append(n)
        n += 1
    return tuple(found)


@dataclass(frozen=True)
class Shape:
    """Sizes of a qwen4exp model; the defaults are the shipped model's."""

    n_vocab: int = 8192
    n_layers: int = 8
    hidden: int = 256
    n_streams: int = 4
    low_rank: int = 32
    n_heads: int = 4
    n_kv: int = 2
    head_dim: int = 64
    n_rot: int = 16
    theta: float = 1e6
    n_experts: int = 32
    top_k: int = 4
    expert_ff: int = 64
    shared_ff: int = 64
    k_heads: int = 2
    v_heads: int = 8
    delta_dim: int = 64
    taps: int = 4
    interval: int = 4
    index_heads: int = 4
    index_dim: int = 32
    budget: int = 512
    ratio: int = 4
    ple_layer: int = 1
    ngram: int = 3
    heads_per_ngram: int = 4
    row: int = 32
    ple_taps: int = 4
    eos: int = 8184
    context: int = 4096
    eps: float = 1e-6
    multipliers: tuple[int, ...] = ()
    head_offsets: tuple[int, ...] = ()
    head_sizes: tuple[int, ...] = ()
    table_rows: int = 0

    @property
    def n_ple_heads(self) -> int:
        return (self.ngram - 1) * self.heads_per_ngram

    @property
    def n_select(self) -> int:
        return self.budget // self.ratio

    def is_delta(self, layer: int) -> bool:
        """Linear attention? The MTP block (layer n_layers) never is."""
        return layer < self.n_layers and (layer + 1) % self.interval != 0


def with_hashes(s: Shape, *, base: int = 4096, seed: int = 1234) -> Shape:
    """The shape with its n-gram hash constants drawn."""
    rng = random.Random(seed)
    sizes = primes_from(base, s.n_ple_heads)
    offsets = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    top = ((1 << 63) - 1) // s.n_vocab
    multipliers = tuple(rng.randrange(top // 4, top) | 1 for _ in range(s.ngram))
    rows = (sum(sizes) + 127) // 128 * 128
    fields = {**s.__dict__, "multipliers": multipliers, "head_offsets": offsets, "head_sizes": sizes}
    return Shape(**{**fields, "table_rows": rows})


def _mixer(s: Shape, prefix: str, *, inject: bool) -> dict[str, tuple[int, ...]]:
    wide = s.n_streams * s.hidden
    out: dict[str, tuple[int, ...]] = {
        prefix + "norm.weight": (wide,),
        prefix + "down.weight": (s.low_rank, wide),
        prefix + "up.weight": (wide, s.low_rank),
    }
    if inject:
        out[prefix + "inject.weight"] = (s.n_streams, wide)
    return out


def _layer(s: Shape, i: int) -> dict[str, tuple[int, ...]]:
    p, h, ff = f"blk.{i}.", s.hidden, s.expert_ff
    out = _mixer(s, p + "hc_attn_", inject=True) | _mixer(s, p + "hc_ffn_", inject=True)
    if s.is_delta(i):
        inner, keys = s.v_heads * s.delta_dim, s.k_heads * s.delta_dim
        out |= {
            p + "attn_qkv.weight": (2 * keys + inner, h),
            p + "attn_gate.weight": (inner, h),
            p + "ssm_conv1d.weight": (2 * keys + inner, s.taps),
            p + "ssm_dt.bias": (s.v_heads,),
            p + "ssm_a": (s.v_heads,),
            p + "ssm_alpha.weight": (s.v_heads, h),
            p + "ssm_beta.weight": (s.v_heads, h),
            p + "ssm_norm.weight": (s.delta_dim,),
            p + "ssm_out.weight": (h, inner),
        }
    else:
        d = s.head_dim
        out |= {
            p + "attn_q.weight": (2 * s.n_heads * d, h),
            p + "attn_k.weight": (s.n_kv * d, h),
            p + "attn_v.weight": (s.n_kv * d, h),
            p + "attn_output.weight": (h, s.n_heads * d),
            p + "attn_q_norm.weight": (d,),
            p + "attn_k_norm.weight": (d,),
            p + "indexer.q_proj.weight": (s.index_heads * s.index_dim, h),
            p + "indexer.k_proj.weight": (s.index_dim, h),
            p + "indexer.q_norm.weight": (s.index_dim,),
            p + "indexer.k_norm.weight": (s.index_dim,),
        }
    return out | {
        p + "ffn_gate_inp.weight": (s.n_experts, h),
        p + "ffn_gate_exps.weight": (s.n_experts, ff, h),
        p + "ffn_up_exps.weight": (s.n_experts, ff, h),
        p + "ffn_down_exps.weight": (s.n_experts, h, ff),
        p + "ffn_gate_inp_shexp.weight": (1, h),
        p + "ffn_gate_shexp.weight": (s.shared_ff, h),
        p + "ffn_up_shexp.weight": (s.shared_ff, h),
        p + "ffn_down_shexp.weight": (h, s.shared_ff),
    }


def tensor_shapes(s: Shape) -> dict[str, tuple[int, ...]]:
    """Every tensor of the file, by GGUF name, in torch order (rows first)."""
    h, wide = s.hidden, s.n_streams * s.hidden
    out: dict[str, tuple[int, ...]] = {"token_embd.weight": (s.n_vocab, h), "output.weight": (s.n_vocab, h)}
    out |= _mixer(s, "output_hc_", inject=False)
    for i in range(s.n_layers + 1):
        out |= _layer(s, i)
    p, embed = f"blk.{s.ple_layer}.ple_", s.n_ple_heads * s.row
    out |= {
        "per_layer_token_embd.weight": (s.table_rows, s.row),
        p + "key.weight": (wide, embed),
        p + "value.weight": (h, embed),
        p + "norm_key.weight": (wide,),
        p + "norm_query.weight": (wide,),
        p + "norm_conv.weight": (wide,),
        p + "conv1d.weight": (wide, s.ple_taps),
    }
    n = f"blk.{s.n_layers}.nextn."
    out |= {n + "eh_proj.weight": (h, 2 * h), n + "enorm.weight": (h,), n + "hnorm.weight": (wide,)}
    return out | _mixer(s, n + "hc_head_", inject=False)


def first_values(s: Shape, seed: int = 0) -> dict[str, Tensor]:
    """Seeded start of training; `ssm_a` is still -exp(log)."""
    g = torch.Generator().manual_seed(seed)
    depth = (2 * s.n_layers) ** -0.5
    out: dict[str, Tensor] = {}
    for name, shape in tensor_shapes(s).items():
        std = 0.5 * shape[-1] ** -0.5
        if "norm" in name:
            value = torch.ones(shape)
        elif name.endswith("ssm_a"):
            value = -torch.empty(shape).uniform_(1.0, 8.0, generator=g)
        elif name.endswith("ssm_dt.bias"):
            dt = torch.exp(torch.empty(shape).uniform_(math.log(1e-3), math.log(0.1), generator=g))
            value = dt + torch.log(-torch.expm1(-dt))
        elif name == "token_embd.weight":
            value = torch.randn(shape, generator=g) * 0.3
        elif name == "per_layer_token_embd.weight":
            value = torch.randn(shape, generator=g) * 0.1
        elif name.endswith("ple_conv1d.weight"):
            value = torch.randn(shape, generator=g) * 0.05
        elif name.endswith("ssm_conv1d.weight"):
            value = torch.randn(shape, generator=g) * 0.3
        elif any(part in name for part in ("attn_output", "ssm_out", "ffn_down")):
            value = torch.randn(shape, generator=g) * std * depth
        else:
            value = torch.randn(shape, generator=g) * std
        out[name] = value
    return out
