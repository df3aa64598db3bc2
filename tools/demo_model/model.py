"""The training model: qwen4exp with its MTP block, in GGUF's names and conventions.

Owns the parameters. Hazard: `ssm_a` is trained as log(-ssm_a); `tensors()` and `load()` convert.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tools.demo_model import layers as L
from tools.demo_model.shape import Shape, tensor_shapes


@dataclass
class Side:
    """What a forward pass yields beside logits."""

    indexer: list[Tensor] = field(default_factory=list)
    balance: list[Tensor] = field(default_factory=list)
    used: list[Tensor] = field(default_factory=list)


def _key(name: str) -> str:
    return name.replace(".", "/")


class Model(nn.Module):
    """`dtype` is that of activations and products; parameters stay float32."""

    def __init__(self, s: Shape, tensors: Mapping[str, Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.s, self.dtype, self.sparse = s, dtype, True
        self.p = nn.ParameterDict({_key(name): torch.zeros(shape) for name, shape in tensor_shapes(s).items()})
        self.load(tensors)
        self.delta_rule: Callable[..., Tensor] = L.delta_rule
        self.f: dict[str, Callable[..., Any]] = {
            f.__name__: f
            for f in (L.delta_before, L.delta_after, L.attention_before, L.attend, L.attention_after, L.moe, L.ple)
        }
        self.f |= {"mix": L.mix, "mtp_input": self._mtp_input, "head_loss": self._head_loss}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for name, shape in tensor_shapes(self.s).items():
                value = tensors[name].float().reshape(shape)
                self.p[_key(name)].copy_(torch.log(-value) if name.endswith("ssm_a") else value)

    def tensors(self) -> dict[str, Tensor]:
        """Float32 values by GGUF name, in GGUF's conventions."""
        out = {}
        for name in tensor_shapes(self.s):
            value = self.p[_key(name)].detach().float().cpu()
            out[name] = -torch.exp(value) if name.endswith("ssm_a") else value
        return out

    def compile(self) -> None:  # type: ignore[override]
        """Compiles the parts; the delta rule stays outside."""
        self.f = {name: torch.compile(f, dynamic=False) for name, f in self.f.items()}

    def group(self, prefix: str, *, ple: bool = False) -> L.Weights:
        """A layer's tensors without the prefix; PLE's only when asked for."""
        p, out = _key(prefix), {}
        for key, value in self.p.items():
            name = key[len(p) :].replace("/", ".")
            if key.startswith(p) and name.startswith("ple_") == ple and not name.startswith("nextn"):
                out[name] = value
        return out

    def layer(self, i: int, h: Tensor, side: Side, positions: Tensor) -> Tensor:
        w, s = self.group(f"blk.{i}."), self.s
        if s.is_delta(i):
            q, k, v, decay, beta, gate, inject = self.f["delta_before"](w, h, s)
            h = self.f["delta_after"](w, h, self.delta_rule(q, k, v, decay, beta), gate, inject, s)
        else:
            x, q, k, v, gate, inject = self.f["attention_before"](w, h, s)
            out, loss = self.f["attend"](w, x, q, k, v, positions, s, sparse=self.sparse)
            side.indexer.append(loss)
            h = self.f["attention_after"](w, h, out, gate, inject)
        h, balance, used = self.f["moe"](w, h, s)
        side.balance.append(balance)
        side.used.append(used)
        return h

    def trunk(self, tokens: Tensor, side: Side, positions: Tensor) -> Tensor:
        """The wide residual [b, t, streams, hidden] after the last layer, before the output mixer."""
        s = self.s
        h = F.embedding(tokens, self.p["token_embd/weight"]).to(self.dtype)
        h = h[:, :, None].expand(-1, -1, s.n_streams, -1).contiguous()
        for i in range(s.n_layers):
            if i == s.ple_layer:
                rows = L.ngram_rows(tokens, s)
                embedded = F.embedding(rows, self.p["per_layer_token_embd/weight"]).flatten(-2).to(self.dtype)
                h = self.f["ple"](self.group(f"blk.{i}.", ple=True), h, embedded, s)
            h = self.layer(i, h, side, positions)
        return h

    def _mtp_input(self, w: L.Weights, tokens: Tensor, state: Tensor) -> Tensor:
        s = self.s
        e = L.norm(F.embedding(tokens, w["embed"]).to(state.dtype), w["enorm.weight"], s.eps)
        e = e[:, :, None].expand(-1, -1, s.n_streams, -1)
        hn = L.norm(state, w["hnorm.weight"].view(s.n_streams, s.hidden), s.eps)
        return L.linear(torch.cat((e, hn), dim=-1), w["eh_proj.weight"])

    def mtp(self, tokens: Tensor, state: Tensor, side: Side, positions: Tensor) -> Tensor:
        """The MTP block: token t with the state of t - 1 (zero before the first); its wide residual."""
        w = {"embed": self.p["token_embd/weight"]}
        for name in ("enorm.weight", "hnorm.weight", "eh_proj.weight"):
            w[name] = self.p[_key(f"blk.{self.s.n_layers}.nextn.{name}")]
        before = F.pad(state[:, :-1], (0, 0, 0, 0, 1, 0))
        return self.layer(self.s.n_layers, self.f["mtp_input"](w, tokens, before), side, positions)

    def head_weights(self, *, mtp: bool = False) -> L.Weights:
        prefix = f"blk.{self.s.n_layers}.nextn.hc_head_" if mtp else "output_hc_"
        w = {f"hc_{n}.weight": self.p[_key(f"{prefix}{n}.weight")] for n in ("norm", "down", "up")}
        return w | {"output": self.p["output/weight"]}

    def logits(self, h: Tensor, *, mtp: bool = False) -> Tensor:
        w = self.head_weights(mtp=mtp)
        return L.linear(self.f["mix"](w, "hc_", h, self.s)[0], w["output"])

    def _head_loss(self, w: L.Weights, h: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Mean cross-entropy and the argmax."""
        z = L.linear(L.mix(w, "hc_", h, self.s)[0], w["output"]).float().flatten(0, 1)
        return F.cross_entropy(z, labels.flatten()), z.detach().argmax(-1).view_as(labels)
