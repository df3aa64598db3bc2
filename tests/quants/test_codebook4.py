"""Blocks written by hand from the format."""

import struct

import pytest
import torch

from makeway.quants.codebook4 import E2M1_DOUBLED, IQ4_NL, IQ4_VALUES, IQ4_XS, MXFP4, NVFP4

NIBBLES = bytes((15 - j) << 4 | j for j in range(16))
Q = [*range(16), *reversed(range(16))]


def decode(quant, form, *parts):
    block = torch.frombuffer(bytearray(struct.pack("<" + form, *parts)), dtype=torch.uint8)
    return quant.decode(block.view(1, -1))[0].tolist()


def test_iq4_nl():
    assert decode(IQ4_NL(), "e16s", 0.5, NIBBLES) == [0.5 * IQ4_VALUES[q] for q in Q]


def test_iq4_xs():
    scales = [0, 63, 32, 33, 17, 48, 5, 40]
    high = sum((s >> 4) << 2 * i for i, s in enumerate(scales))
    low = [scales[i] & 15 | (scales[i + 1] & 15) << 4 for i in range(0, 8, 2)]
    w = decode(IQ4_XS(), "eH4B128s", 0.25, high, *low, NIBBLES * 8)
    assert w == [0.25 * (s - 32) * IQ4_VALUES[q] for s in scales for q in Q]


def test_values_are_the_e2m1_numbers_doubled():
    for code, value in enumerate(E2M1_DOUBLED):
        sign, exponent, fraction = code >> 3, code >> 1 & 3, code & 1
        number = fraction / 2 if exponent == 0 else (1 + fraction / 2) * 2.0 ** (exponent - 1)
        assert value == 2 * (-number if sign else number)


@pytest.mark.parametrize("e", [0, 1, 2, 3, 126, 127, 128, 250])
def test_mxfp4(e):
    assert decode(MXFP4(), "B16s", e, NIBBLES) == [2.0 ** (e - 128) * E2M1_DOUBLED[q] for q in Q]


@pytest.mark.parametrize(
    ("scale", "value"),
    [(0x00, 0.0), (0x01, 2.0**-9), (0x07, 7 * 2.0**-9), (0x08, 2.0**-6), (0x38, 1.0), (0x3C, 1.5)]
    + [(0x7E, 448.0), (0x7F, 0.0), (0x80, 0.0), (0xBC, 1.5)],
)
def test_nvfp4(scale, value):
    part = bytes((8 + j) << 4 | j for j in range(8))  # weight j is j, weight 8 + j is 8 + j
    w = decode(NVFP4(), "4B32s", 0x38, scale, 0x38, 0x38, part * 4)
    assert w[16:32] == [value / 2 * v for v in E2M1_DOUBLED]
    assert w[:16] == w[32:48] == [v / 2 for v in E2M1_DOUBLED]
