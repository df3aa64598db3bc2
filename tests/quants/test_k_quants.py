"""Blocks packed here from random fields by the published layout, weight by weight, in plain Python."""

import random
import struct

import numpy as np
import pytest
import torch

from makeway.quants.k_quants import Q2_K, Q3_K, Q4_K, Q5_K, Q6_K
from tests.quants.blocks import assert_same_bits

F = np.float32
D, DMIN = 0.0123, 0.077


def f16(x: float) -> np.float32:
    return F(np.float16(x))


def check(quant, block: bytes, expected: list) -> None:
    raw = torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, -1)
    assert_same_bits(quant.decode(raw)[0], torch.from_numpy(np.array(expected, dtype=np.float32)))


def crumbs(q: list[int], width: int, shift: int) -> bytes:
    """Two bits of each value from bit `shift` on: half h, byte j, bits 2k hold weight 128h + 32k + j."""
    return bytes(
        sum((q[128 * h + 32 * k + j] >> shift & 3) << width * k for k in range(4)) for h in range(2) for j in range(32)
    )


def nibbles(q: list[int]) -> bytes:
    """Low four bits: group g of 64, byte j holds weights 64g + j and 64g + 32 + j."""
    return bytes(q[64 * g + j] & 15 | (q[64 * g + 32 + j] & 15) << 4 for g in range(4) for j in range(32))


def bit_planes(q: list[int], bit: int) -> bytes:
    """One bit of each value: bit k of byte j belongs to weight 32k + j."""
    return bytes(sum((q[32 * k + j] >> bit & 1) << k for k in range(8)) for j in range(32))


def six_bit_pairs(sc: list[int], m: list[int]) -> bytes:
    first = [sc[i] | sc[i + 4] >> 4 << 6 for i in range(4)] + [m[i] | m[i + 4] >> 4 << 6 for i in range(4)]
    return bytes(first + [sc[i + 4] & 15 | (m[i + 4] & 15) << 4 for i in range(4)])


def values(rng: random.Random, bits: int, n: int) -> list[int]:
    return [rng.randrange(1 << bits) for _ in range(n)]


@pytest.mark.parametrize("seed", range(3))
def test_q2_k(seed):
    rng = random.Random(seed)
    q, sc, m = values(rng, 2, 256), values(rng, 4, 16), values(rng, 4, 16)
    scales = bytes(s | n << 4 for s, n in zip(sc, m, strict=True))
    block = scales + crumbs(q, 2, 0) + struct.pack("<ee", D, DMIN)
    expected = [f16(D) * F(sc[i // 16]) * F(q[i]) - f16(DMIN) * F(m[i // 16]) for i in range(256)]
    check(Q2_K(), block, expected)


@pytest.mark.parametrize("seed", range(3))
def test_q3_k(seed):
    rng = random.Random(seed)
    q, sc = values(rng, 3, 256), values(rng, 6, 16)
    low = bytes(sc[i] & 15 | (sc[i + 8] & 15) << 4 for i in range(8))
    top = bytes(sum((sc[4 * k + i] >> 4) << 2 * k for k in range(4)) for i in range(4))
    block = bit_planes(q, 2) + crumbs(q, 2, 0) + low + top + struct.pack("<e", D)
    check(Q3_K(), block, [f16(D) * F(sc[i // 16] - 32) * F(q[i] - 4) for i in range(256)])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("quant", "bits"), [(Q4_K(), 4), (Q5_K(), 5)])
def test_q4_k_and_q5_k(quant, bits, seed):
    rng = random.Random(seed)
    q, sc, m = values(rng, bits, 256), values(rng, 6, 8), values(rng, 6, 8)
    high = bit_planes(q, 4) if bits == 5 else b""
    block = struct.pack("<ee", D, DMIN) + six_bit_pairs(sc, m) + high + nibbles(q)
    expected = [f16(D) * F(sc[i // 32]) * F(q[i]) - f16(DMIN) * F(m[i // 32]) for i in range(256)]
    check(quant, block, expected)


@pytest.mark.parametrize("seed", range(3))
def test_q6_k(seed):
    rng = random.Random(seed)
    q, sc = values(rng, 6, 256), [rng.randrange(-128, 128) for _ in range(16)]
    low = bytes(q[128 * h + j] & 15 | (q[128 * h + 64 + j] & 15) << 4 for h in range(2) for j in range(64))
    block = low + crumbs(q, 2, 4) + struct.pack("<16be", *sc, D)
    check(Q6_K(), block, [f16(D) * F(sc[i // 16]) * F(q[i] - 32) for i in range(256)])
