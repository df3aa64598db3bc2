"""Blocks written by hand from the format, so that decode does not rest on other programs alone."""

import struct

import torch

from makeway.quants.legacy import Q4_0, Q4_1, Q5_0, Q5_1, Q8_0

NIBBLES = bytes((15 - j) << 4 | j for j in range(16))  # weight j is j, weight 16+j is 15-j
Q = [*range(16), *reversed(range(16))]
HIGH = 0x80018001  # weights 0, 15, 16, 31
Q5 = [q + 16 * (HIGH >> j & 1) for j, q in enumerate(Q)]


def decode(quant, form, *parts):
    block = torch.frombuffer(bytearray(struct.pack("<" + form, *parts)), dtype=torch.uint8)
    return quant.decode(block.view(1, -1))[0].tolist()


def test_q4_0():
    assert decode(Q4_0(), "e16s", 0.5, NIBBLES) == [0.5 * (q - 8) for q in Q]


def test_q4_1():
    assert decode(Q4_1(), "ee16s", 0.5, -3.25, NIBBLES) == [0.5 * q - 3.25 for q in Q]


def test_q5_0():
    assert decode(Q5_0(), "eI16s", -2.0, HIGH, NIBBLES) == [-2.0 * (q - 16) for q in Q5]


def test_q5_1():
    assert decode(Q5_1(), "eeI16s", 0.25, 7.0, HIGH, NIBBLES) == [0.25 * q + 7.0 for q in Q5]


def test_every_fifth_bit_by_itself():
    for j in range(32):
        assert decode(Q5_1(), "eeI16s", 1.0, 0.0, 1 << j, bytes(16)) == [16.0 * (i == j) for i in range(32)]


def test_q8_0():
    values = [-128, 127, *range(-15, 15)]
    assert decode(Q8_0(), "e32b", 0.125, *values) == [0.125 * q for q in values]


def test_zero_keeps_the_sign_of_the_product():
    zeros = Q8_0().decode(torch.tensor([[0x00, 0xBC] + [0] * 32], dtype=torch.uint8))  # d = -1
    assert bool(zeros.signbit().all())
