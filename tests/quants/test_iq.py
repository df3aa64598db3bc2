"""Blocks written by hand from the format; the codebooks are checked in test_grids."""

import struct

import numpy as np
import pytest
import torch

from makeway.quants.grids import grid_words
from makeway.quants.iq import IQ1_M, IQ1_S, IQ2_S, IQ2_XS, IQ2_XXS, IQ3_S, IQ3_XXS

CPU = torch.device("cpu")


def entry(name: str, index: int) -> np.ndarray:
    return grid_words(name, CPU)[index : index + 1].view(torch.int8).numpy().astype(np.float32)


def decode(quant, form: str, *parts) -> np.ndarray:
    block = struct.pack("<" + form, *parts)
    return quant.decode(torch.frombuffer(bytearray(block), dtype=torch.uint8).view(1, -1))[0].numpy()


def signs(bits: int) -> np.ndarray:
    return np.array([-1.0 if bits >> i & 1 else 1.0 for i in range(8)], dtype=np.float32)


def test_iq2_xxs_eighth_sign_is_parity():
    # the second group of 32: index 200 for its third eight, signs 0b1 there (so bit 7 too), scale 5
    groups = [0] * 16
    groups[2], groups[3] = 200 << 16, 1 << 14 | 5 << 28
    w = decode(IQ2_XXS(), "e16I", 2.0, *groups)
    assert w[48:56].tolist() == (2.0 * 5.5 * 0.25 * entry("iq2_xxs", 200) * signs(0x81)).tolist()
    assert w[:8].tolist() == (2.0 * 0.5 * 0.25 * entry("iq2_xxs", 0)).tolist()


def test_iq2_xs():
    qs = [0] * 32
    qs[7] = 511 | 0b0000011 << 9
    w = decode(IQ2_XS(), "e32H8B", 1.0, *qs, 0, 0xA3, *[0] * 6)
    assert w[56:64].tolist() == (10.5 * 0.25 * entry("iq2_xs", 511) * signs(0b11)).tolist()
    assert w[32:40].tolist() == (3.5 * 0.25 * entry("iq2_xs", 0)).tolist()


def test_iq2_s():
    qs, sign = [0] * 32, [0] * 32
    qs[6], sign[6] = 0x21, 0b10010110
    w = decode(IQ2_S(), "e32B32B8B8B", 1.0, *qs, *sign, 0, 3 << 4, *[0] * 6, 0, 0xF0, *[0] * 6)
    assert w[48:56].tolist() == (15.5 * 0.25 * entry("iq2_s", 0x321) * signs(0b10010110)).tolist()


def test_iq3_xxs():
    qs = [0] * 64
    qs[10], qs[11] = 7, 255
    w = decode(IQ3_XXS(), "e64B8I", -1.0, *qs, 0, 0b1000000 << 7 | 9 << 28, *[0] * 6)
    grid = np.concatenate((entry("iq3_xxs", 7), entry("iq3_xxs", 255)))
    assert w[40:48].tolist() == (-9.5 * 0.5 * grid * signs(0b11000000)).tolist()


def test_iq3_s():
    qs, sign = [0] * 64, [0] * 32
    qs[62], qs[63], sign[31] = 1, 2, 0b1
    w = decode(IQ3_S(), "e64B8B32B4B", 0.5, *qs, *[0] * 7, 0x80, *sign, 0, 0, 0, 0x60)
    grid = np.concatenate((entry("iq3_s", 1), entry("iq3_s", 0x102)))
    assert w[248:256].tolist() == (0.5 * 13 * grid * signs(1)).tolist()


@pytest.mark.parametrize("negative", [0, 1])
def test_iq1_s(negative):
    qs, qh = [0] * 32, [0] * 8
    qs[5], qh[1] = 0x34, 6 << 3 | 5 << 12 | negative << 15
    w = decode(IQ1_S(), "e32B8H", 2.0, *qs, *qh)
    shift = -0.125 if negative else 0.125
    assert w[40:48].tolist() == (2.0 * 11 * (entry("iq1", 0x634) + shift)).tolist()


def test_iq1_m_scale_lies_in_four_quarters():
    qs, qh = [0] * 32, [0] * 16
    qs[31], qh[15] = 0x12, (3 | 8) << 4  # index 0x312, shift -1/8
    d = 0x3C12  # 1.017578125
    scales = [(d >> 4 * i & 15) << 12 for i in range(4)]
    scales[3] |= 6 << 9
    w = decode(IQ1_M(), "32B16B4H", *qs, *qh, *scales)
    assert w[248:256].tolist() == (1.017578125 * 13 * (entry("iq1", 0x312) - 0.125)).tolist()
    assert w[240:248].tolist() == (1.017578125 * 13 * (entry("iq1", 0) + 0.125)).tolist()
