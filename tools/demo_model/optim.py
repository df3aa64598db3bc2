"""Two optimisers in one: momentum with orthogonalised updates for the hidden matrices, AdamW for the rest.

Owns the momentum buffers. Hazard: an expert tensor is many matrices; each is orthogonalised by itself.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ADAM_PARTS = (
    "token_embd",
    "output/weight",
    "per_layer_token_embd",
    "gate_inp",
    "conv1d",
    "ssm_alpha",
    "ssm_beta",
    "inject",
)


def is_matrix(name: str, p: Tensor) -> bool:
    return p.dim() > 1 and not any(part in name for part in ADAM_PARTS)


def orthogonalise(g: Tensor) -> Tensor:
    """Newton-Schulz towards the nearest (semi-)orthogonal matrix; g [n, rows, columns]."""
    x = g.bfloat16()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * (a @ a)) @ x
    return x.mT if tall else x


class Optimiser:
    def __init__(self, params: nn.ParameterDict, *, decay: float = 0.1) -> None:
        groups: dict[tuple[int, int], list[Tensor]] = {}
        slow, table = [], []
        for name, p in params.items():
            if is_matrix(name, p):
                groups.setdefault((p.shape[-2], p.shape[-1]), []).append(p)
            else:
                (table if "embd" in name else slow).append(p)
        self.groups, self.decay = groups, decay
        self.buffers = {key: [torch.zeros_like(p) for p in ps] for key, ps in groups.items()}
        self.adam = torch.optim.AdamW(
            [{"params": slow, "scale": 1.0}, {"params": table, "scale": 2.0}],
            betas=(0.9, 0.95), weight_decay=0.0, fused=True,
        )  # fmt: skip
        self.all = list(params.values())

    @torch.no_grad()
    def step(self, lr: float) -> Tensor:
        """Clips, updates, clears the gradients; returns the gradients' norm."""
        total = nn.utils.clip_grad_norm_(self.all, 1.0)
        for group in self.adam.param_groups:
            group["lr"] = lr * group["scale"]
        self.adam.step()
        for key, params in self.groups.items():
            buffers = self.buffers[key]
            grads = [p.grad for p in params]
            torch._foreach_mul_(buffers, 0.95)
            torch._foreach_add_(buffers, grads)
            mixed = torch._foreach_add(grads, buffers, alpha=0.95)
            stacked = torch.cat([m.view(-1, *key) for m in mixed])
            update = orthogonalise(stacked) * (0.2 * max(key) ** 0.5)
            sizes = [m.numel() // (key[0] * key[1]) for m in mixed]
            parts = [u.view_as(p).float() for u, p in zip(update.split(sizes), params, strict=True)]
            torch._foreach_mul_(params, 1 - lr * self.decay)
            torch._foreach_add_(params, parts, alpha=-lr)
        for p in self.all:
            p.grad = None
        return total
