"""GGML tensor types as data: name, number in the file, elements and bytes of a block.

Owns the one table that says how many bytes a row takes; decodes nothing (that is `quants/`).
Hazard: the numbers are a file format; they are never renumbered. (Some forks of llama.cpp use 42 and up
for types of their own; nothing in a file tells them apart.)
Source: ggml's published type list (block sizes checked against the `gguf` package in the tests; two entries
differ from it on purpose: its Q8_1 has 40 bytes, ggml's C struct 36, and it does not know Q2_0).
"""

from dataclasses import dataclass
from enum import IntEnum


class GGMLType(IntEnum):
    """Number of a tensor type as stored in a GGUF file."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q8_1 = 9
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    Q8_K = 15
    IQ2_XXS = 16
    IQ2_XS = 17
    IQ3_XXS = 18
    IQ1_S = 19
    IQ4_NL = 20
    IQ3_S = 21
    IQ2_S = 22
    IQ4_XS = 23
    I8 = 24
    I16 = 25
    I32 = 26
    I64 = 27
    F64 = 28
    IQ1_M = 29
    BF16 = 30
    TQ1_0 = 34
    TQ2_0 = 35
    MXFP4 = 39
    NVFP4 = 40
    Q1_0 = 41
    Q2_0 = 42


@dataclass(frozen=True)
class BlockSize:
    """A block of `elements` weights takes `n_bytes` bytes; a row is a whole number of blocks."""

    elements: int
    n_bytes: int


BLOCK_SIZES: dict[GGMLType, BlockSize] = {
    GGMLType.F32: BlockSize(1, 4),
    GGMLType.F16: BlockSize(1, 2),
    GGMLType.BF16: BlockSize(1, 2),
    GGMLType.F64: BlockSize(1, 8),
    GGMLType.I8: BlockSize(1, 1),
    GGMLType.I16: BlockSize(1, 2),
    GGMLType.I32: BlockSize(1, 4),
    GGMLType.I64: BlockSize(1, 8),
    GGMLType.Q4_0: BlockSize(32, 18),
    GGMLType.Q4_1: BlockSize(32, 20),
    GGMLType.Q5_0: BlockSize(32, 22),
    GGMLType.Q5_1: BlockSize(32, 24),
    GGMLType.Q8_0: BlockSize(32, 34),
    GGMLType.Q8_1: BlockSize(32, 36),
    GGMLType.Q2_K: BlockSize(256, 84),
    GGMLType.Q3_K: BlockSize(256, 110),
    GGMLType.Q4_K: BlockSize(256, 144),
    GGMLType.Q5_K: BlockSize(256, 176),
    GGMLType.Q6_K: BlockSize(256, 210),
    GGMLType.Q8_K: BlockSize(256, 292),
    GGMLType.IQ1_S: BlockSize(256, 50),
    GGMLType.IQ1_M: BlockSize(256, 56),
    GGMLType.IQ2_XXS: BlockSize(256, 66),
    GGMLType.IQ2_XS: BlockSize(256, 74),
    GGMLType.IQ2_S: BlockSize(256, 82),
    GGMLType.IQ3_XXS: BlockSize(256, 98),
    GGMLType.IQ3_S: BlockSize(256, 110),
    GGMLType.IQ4_NL: BlockSize(32, 18),
    GGMLType.IQ4_XS: BlockSize(256, 136),
    GGMLType.TQ1_0: BlockSize(256, 54),
    GGMLType.TQ2_0: BlockSize(256, 66),
    GGMLType.MXFP4: BlockSize(32, 17),
    GGMLType.NVFP4: BlockSize(64, 36),
    GGMLType.Q1_0: BlockSize(128, 18),
    GGMLType.Q2_0: BlockSize(64, 18),
}


def row_bytes(ggml_type: GGMLType, n_elements: int) -> int:
    """Bytes of a row of `n_elements` weights; raises ValueError when it is not a whole number of blocks."""
    block = BLOCK_SIZES[ggml_type]
    if n_elements % block.elements:
        raise ValueError(f"a row of {n_elements} is no multiple of the {ggml_type.name} block {block.elements}")
    return n_elements // block.elements * block.n_bytes
