"""Types of three values, -1, 0 and 1, with one scale per 256 weights: TQ1_0, TQ2_0.

Owns their layout and decode; never chooses when to decode.
Hazard: TQ1_0 packs five base-3 digits into a byte as a fraction of 256; a digit is the upper byte of three
times the (wrapped) product, so the multiplication must wrap at 8 bits.
Source: ggml's block structs.
"""

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType
from makeway.quants.base import Field, QuantType, f16_scales


def _digits(packed: Tensor, count: int) -> Tensor:
    """The first `count` base-3 digits of each byte, minus 1: u8 [n, k] -> int8 [n, count k]."""
    powers = torch.tensor([3**i for i in range(count)], dtype=torch.uint8, device=packed.device)
    fraction = packed.unsqueeze(1) * powers[:, None]  # wraps
    # 3 * fraction // 256 is 1 from 86 on and 2 from 171 on
    return (fraction > 85).to(torch.int8).add_(fraction > 170).sub_(1).flatten(1)


class TQ1_0(QuantType):
    """w = d * t, t of base-3 digits."""

    ggml = GGMLType.TQ1_0
    block_elements = 256
    block_bytes = 54
    FIELDS = (
        Field("qs", 0, 48, "five digits a byte: digit i of byte j < 32 is weight 32i+j, of byte 32+j 160+16i+j"),
        Field("qh", 48, 4, "four digits a byte: digit i of byte j is weight 240+4i+j"),
        Field("d", 52, 2, "f16 scale"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        parts = (_digits(blocks[:, :32], 5), _digits(blocks[:, 32:48], 5), _digits(blocks[:, 48:52], 4))
        return torch.cat(parts, dim=1).float().mul_(f16_scales(blocks, 52))


class TQ2_0(QuantType):
    """w = d * (q - 1), q of 2 bits."""

    ggml = GGMLType.TQ2_0
    block_elements = 256
    block_bytes = 66
    FIELDS = (
        Field("qs", 0, 64, "2-bit values: half h of 128 weights in 32 bytes, bits 2k of byte j: weight 32k+j"),
        Field("d", 64, 2, "f16 scale"),
    )

    def decode(self, blocks: Tensor) -> Tensor:
        shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
        q = (blocks[:, :64].view(-1, 2, 1, 32) >> shifts[:, None]).bitwise_and_(3)
        return q.view(torch.int8).sub_(1).flatten(1).float().mul_(f16_scales(blocks, 64))
