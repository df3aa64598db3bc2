"""Random quantised blocks whose weights have mean 0 and a chosen standard deviation, made at memory speed.

Owns how the scale fields of each type are set; never encodes given weights (`quants/encode.py` does).
Hazard: quants are uniform, so each type's scale follows from the number of its levels; types with a minimum get
one that is an exact multiple of their scale, or the mean would not be 0.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from makeway.gguf import GGMLType
from makeway.quants import QUANT_TYPES

Bytes = NDArray[np.uint8]
Rng = np.random.Generator
_Setter = Callable[[Bytes, float, Rng], None]


def random_blocks(ggml_type: GGMLType, n: int, *, std: float, seed: int) -> Bytes:
    """`n` blocks u8 [n, block_bytes] of weights with mean 0 and that standard deviation (within about 1 %).

    Scales differ from block to block by a quarter. Raises ValueError for a type without a rule here, or when `std` is
    too small or large for f16 scales.
    """
    if ggml_type not in _SETTERS:
        known = ", ".join(t.name for t in _SETTERS)
        raise ValueError(f"no random blocks of {ggml_type.name}; there are: {known}")
    n_bytes = n * QUANT_TYPES[ggml_type].block_bytes
    rng = np.random.Generator(np.random.SFC64(seed))
    raw = rng.integers(0, 1 << 64, -(-n_bytes // 8), dtype=np.uint64).view(np.uint8)[:n_bytes]
    blocks = raw.reshape(n, -1)
    _SETTERS[ggml_type](blocks, std, rng)
    return blocks


def _spread(levels: int) -> float:
    """Standard deviation of an integer drawn uniformly from that many in a row."""
    return float(((levels**2 - 1) / 12) ** 0.5)


def _scales(std: float, n: int, rng: Rng, *, signed: bool) -> NDArray[np.float32]:
    """Block scales [n] around `std`, whose root mean square is `std`, in few enough bits for exact multiples."""
    relative = rng.uniform(0.75, 1.25, n) / (1 + 0.25**2 / 3) ** 0.5
    mantissa, exponent = np.frexp(relative * std)
    scales: NDArray[np.float32] = np.ldexp(np.round(mantissa * 64), exponent - 6).astype(np.float32)
    if signed:
        scales *= rng.choice(np.array([-1, 1], np.float32), n)
    return scales


def _put(blocks: Bytes, ggml_type: GGMLType, field: str, values: NDArray[np.float32]) -> None:
    """Writes an f16 field of all blocks."""
    at = next(f.offset for f in QUANT_TYPES[ggml_type].FIELDS if f.name == field)
    low, high = float(np.abs(values).min()), float(np.abs(values).max())
    if low < 2.0**-20 or high > 60_000:
        raise ValueError(
            f"{ggml_type.name}: block scales of {low:.1e} to {high:.1e} do not fit f16; choose another std"
        )
    blocks[:, at : at + 2] = values.astype(np.float16).view(np.uint8).reshape(-1, 2)


def _symmetric(ggml_type: GGMLType, levels: int) -> _Setter:
    """w = d * (q - levels / 2): quants lean to minus by half a level, so the sign of d is drawn."""
    size = (_spread(levels) ** 2 + 0.25) ** 0.5

    def put(blocks: Bytes, std: float, rng: Rng) -> None:
        _put(blocks, ggml_type, "d", _scales(std / size, len(blocks), rng, signed=True))

    return put


def _with_minimum(ggml_type: GGMLType, levels: int) -> _Setter:
    """w = d * q + m: the minimum takes the middle of the levels away."""

    def put(blocks: Bytes, std: float, rng: Rng) -> None:
        d = _scales(std / _spread(levels), len(blocks), rng, signed=False)
        _put(blocks, ggml_type, "d", d)
        _put(blocks, ggml_type, "m", d * np.float32(-(levels - 1) / 2))

    return put


def _with_scales_and_mins(ggml_type: GGMLType, levels: int) -> _Setter:
    """w = d * sc * q - dmin * m: sc = m of 32..63 per sub-block, dmin = the middle of the levels times d."""
    sub_scale = float(np.sqrt(np.mean(np.arange(32, 64) ** 2)))

    def put(blocks: Bytes, std: float, rng: Rng) -> None:
        n = len(blocks)
        d = _scales(std / (_spread(levels) * sub_scale), n, rng, signed=False)
        _put(blocks, ggml_type, "d", d)
        _put(blocks, ggml_type, "dmin", d * np.float32((levels - 1) / 2))
        sc = rng.integers(32, 64, (n, 8), dtype=np.uint8)
        first = sc[:, :4] | (sc[:, 4:] >> 4 << 6)
        blocks[:, 4:8] = blocks[:, 8:12] = first
        blocks[:, 12:16] = (sc[:, 4:] & 15) | ((sc[:, 4:] & 15) << 4)

    return put


def _q6_k(blocks: Bytes, std: float, rng: Rng) -> None:
    """w = d * sc * (q - 32): sc of 16..31 with a drawn sign."""
    sub_scale = float(np.sqrt(np.mean(np.arange(16, 32) ** 2)))
    size = (_spread(64) ** 2 + 0.25) ** 0.5 * sub_scale
    _put(blocks, GGMLType.Q6_K, "d", _scales(std / size, len(blocks), rng, signed=False))
    sc = rng.integers(16, 32, (len(blocks), 16), dtype=np.int8)
    sc *= rng.choice(np.array([-1, 1], np.int8), sc.shape)
    blocks[:, 192:208] = sc.view(np.uint8)


def _bf16(blocks: Bytes, std: float, rng: Rng) -> None:
    """Uniform values; the upper halves of float32."""
    values = rng.uniform(-(3**0.5) * std, 3**0.5 * std, len(blocks)).astype(np.float32)
    blocks[:] = (values.view(np.uint32) >> 16).astype("<u2").view(np.uint8).reshape(-1, 2)


_SETTERS: dict[GGMLType, _Setter] = {
    GGMLType.BF16: _bf16,
    GGMLType.Q4_0: _symmetric(GGMLType.Q4_0, 16),
    GGMLType.Q5_0: _symmetric(GGMLType.Q5_0, 32),
    GGMLType.Q8_0: _symmetric(GGMLType.Q8_0, 256),
    GGMLType.Q4_1: _with_minimum(GGMLType.Q4_1, 16),
    GGMLType.Q5_1: _with_minimum(GGMLType.Q5_1, 32),
    GGMLType.Q4_K: _with_scales_and_mins(GGMLType.Q4_K, 16),
    GGMLType.Q5_K: _with_scales_and_mins(GGMLType.Q5_K, 32),
    GGMLType.Q6_K: _q6_k,
}

RANDOM_TYPES = tuple(_SETTERS)
"""The types that `random_blocks` makes."""
