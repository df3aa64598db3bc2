"""Simple encoders, for synthetic models and tests: round to nearest, no search, no importance.

Owns f32 -> block bytes for the types in `ENCODERS`; never meant for shipping models (use llama.cpp's quantiser).
Hazard: the bytes differ from llama.cpp's (its K types search for better scales); only the format is the same.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from makeway.gguf.types import BLOCK_SIZES, GGMLType, row_bytes


def _as_bytes(x: Tensor) -> Tensor:
    """The bytes of the last dimension."""
    return x.contiguous().view(torch.uint8)


def _f16(x: Tensor) -> tuple[Tensor, Tensor]:
    """f32 [n, k] -> its f16 bytes, u8 [n, 2k], and the rounded values, f32 [n, k]."""
    half = x.half()
    return _as_bytes(half), half.float()


def _quotient(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale, and 0 where the scale is 0."""
    return torch.where(scale == 0, 0.0, x / torch.where(scale == 0, 1.0, scale))


def _levels(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """round(x / scale) clamped to low..high and counted from low: u8."""
    return (_quotient(x, scale).round_().clamp_(low, high) - low).to(torch.uint8)


def _halves(q: Tensor) -> Tensor:
    """u8 [n, 32] -> u8 [n, 16]: value j in the low, value j + 16 in the high four bits."""
    return (q[:, :16] & 15) | (q[:, 16:] << 4)


def _fifth_bits(q: Tensor) -> Tensor:
    """u8 [n, 32] -> u8 [n, 4]: bit 4 of value j as bit j."""
    weights = torch.tensor([1 << i for i in range(8)], dtype=torch.uint8, device=q.device)
    return ((q >> 4).view(-1, 4, 8) * weights).sum(dim=2, dtype=torch.uint8)


def _extreme(x: Tensor) -> Tensor:
    """The value of largest magnitude of each block, with its sign: f32 [n, 1]."""
    return x.gather(1, x.abs().argmax(dim=1, keepdim=True))


def _q4_0(x: Tensor) -> Tensor:
    stored, d = _f16(_extreme(x) / -8)
    return torch.cat((stored, _halves(_levels(x, d, -8, 7))), dim=1)


def _q4_1(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=1, keepdim=True)
    stored, scales = _f16(torch.cat(((high - low) / 15, low), dim=1))
    return torch.cat((stored, _halves(_levels(x - scales[:, 1:], scales[:, :1], 0, 15))), dim=1)


def _q5_0(x: Tensor) -> Tensor:
    stored, d = _f16(_extreme(x) / -16)
    q = _levels(x, d, -16, 15)
    return torch.cat((stored, _fifth_bits(q), _halves(q)), dim=1)


def _q5_1(x: Tensor) -> Tensor:
    low, high = x.aminmax(dim=1, keepdim=True)
    stored, scales = _f16(torch.cat(((high - low) / 31, low), dim=1))
    q = _levels(x - scales[:, 1:], scales[:, :1], 0, 31)
    return torch.cat((stored, _fifth_bits(q), _halves(q)), dim=1)


def _q8_0(x: Tensor) -> Tensor:
    stored, d = _f16(x.abs().amax(dim=1, keepdim=True) / 127)
    q = _quotient(x, d).round_().clamp_(-127, 127).to(torch.int8)
    return torch.cat((stored, q.view(torch.uint8)), dim=1)


def _q4_k(x: Tensor) -> Tensor:
    """Mins first, rounded away from zero, then scales, rounded up: so that no weight is clipped."""
    x = x.view(-1, 8, 32)
    low, high = x.amin(dim=2).clamp_(max=0), x.amax(dim=2).clamp_(min=0)  # [n, 8]
    min_bytes, dmin = _f16(-low.amin(dim=1, keepdim=True) / 63)
    m = _quotient(-low, dmin).ceil_().clamp_(max=63)
    offsets = dmin * m
    spans = (high + offsets) / 15
    scale_bytes, d = _f16(spans.amax(dim=1, keepdim=True) / 63)
    sc = _quotient(spans, d).ceil_().clamp_(max=63)
    q = _levels(x + offsets.unsqueeze(-1), (d * sc).unsqueeze(-1), 0, 15).view(-1, 4, 2, 32)
    sc, m = sc.to(torch.uint8), m.to(torch.uint8)
    packed = (
        sc[:, :4] | (sc[:, 4:] >> 4 << 6),
        m[:, :4] | (m[:, 4:] >> 4 << 6),
        (sc[:, 4:] & 15) | (m[:, 4:] << 4),
    )
    nibbles = q[:, :, 0] | (q[:, :, 1] << 4)
    return torch.cat((scale_bytes, min_bytes, *packed, nibbles.flatten(1)), dim=1)


def _q6_k(x: Tensor) -> Tensor:
    """Scales rounded up, so that no weight is clipped."""
    x = x.view(-1, 16, 16)
    spans = x.abs().amax(dim=2) / 31
    stored, d = _f16(spans.amax(dim=1, keepdim=True) / 127)
    sc = _quotient(spans, d).ceil_().clamp_(max=127)
    q = _levels(x, (d * sc).unsqueeze(-1), -32, 31).view(-1, 2, 4, 32)
    ql = (q[:, :, :2] & 15) | (q[:, :, 2:] << 4)
    top = q >> 4
    qh = top[:, :, 0] | (top[:, :, 1] << 2) | (top[:, :, 2] << 4) | (top[:, :, 3] << 6)
    return torch.cat((ql.flatten(1), qh.flatten(1), sc.to(torch.uint8), stored), dim=1)


ENCODERS: Mapping[GGMLType, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        GGMLType.F32: _as_bytes,
        GGMLType.F16: lambda x: _as_bytes(x.half()),
        GGMLType.BF16: lambda x: _as_bytes(x.bfloat16()),
        GGMLType.Q4_0: _q4_0,
        GGMLType.Q4_1: _q4_1,
        GGMLType.Q5_0: _q5_0,
        GGMLType.Q5_1: _q5_1,
        GGMLType.Q8_0: _q8_0,
        GGMLType.Q4_K: _q4_k,
        GGMLType.Q6_K: _q6_k,
    }
)
"""f32 [blocks, block_elements] -> u8 [blocks, block_bytes] of each type that can be encoded."""


def encode_rows(x: Tensor, ggml_type: GGMLType) -> Tensor:
    """Blocks of finite f32 weights: f32 [..., n] -> u8 [..., row_bytes], on the device of `x`.

    Raises ValueError: no encoder for the type, `x` not f32 or not finite, n no whole number of blocks.
    """
    if ggml_type not in ENCODERS:
        known = ", ".join(t.name for t in ENCODERS)
        raise ValueError(f"no encoder for {ggml_type.name}; there are: {known}")
    if x.dtype != torch.float32:
        raise ValueError(f"weights to encode must be float32, not {x.dtype}")
    if not bool(x.isfinite().all()):
        raise ValueError("weights to encode must be finite")
    n_bytes = row_bytes(ggml_type, x.shape[-1])
    if x.numel() == 0:
        return torch.empty((*x.shape[:-1], n_bytes), dtype=torch.uint8, device=x.device)
    blocks = x.reshape(-1, BLOCK_SIZES[ggml_type].elements)
    return ENCODERS[ggml_type](blocks).view(*x.shape[:-1], n_bytes)
