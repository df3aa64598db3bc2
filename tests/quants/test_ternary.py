"""Blocks packed here from random trits by the published layout."""

import random
import struct

import pytest
import torch

from makeway.quants.ternary import TQ1_0, TQ2_0


def decode(quant, block):
    return quant.decode(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, -1))[0].tolist()


def as_fraction(digits: list[int]) -> int:
    """Base-3 digits, most significant first (four are filled up with a 0), as a fraction of 256, rounded up."""
    number = 0
    for digit in (digits + [0])[:5]:
        number = 3 * number + digit
    return (number * 256 + 242) // 243


@pytest.mark.parametrize("seed", range(4))
def test_tq1_0(seed):
    t = [random.Random(seed * 256 + i).randrange(3) for i in range(256)]
    first = bytes(as_fraction([t[32 * i + j] for i in range(5)]) for j in range(32))
    second = bytes(as_fraction([t[160 + 16 * i + j] for i in range(5)]) for j in range(16))
    last = bytes(as_fraction([t[240 + 4 * i + j] for i in range(4)]) for j in range(4))
    assert decode(TQ1_0(), first + second + last + struct.pack("<e", 0.75)) == [0.75 * (q - 1) for q in t]


@pytest.mark.parametrize("seed", range(4))
def test_tq2_0(seed):
    q = [random.Random(seed * 256 + i).randrange(4) for i in range(256)]
    packed = bytes(sum(q[128 * h + 32 * k + j] << 2 * k for k in range(4)) for h in range(2) for j in range(32))
    assert decode(TQ2_0(), packed + struct.pack("<e", -1.5)) == [-1.5 * (v - 1) for v in q]
