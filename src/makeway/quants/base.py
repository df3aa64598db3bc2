"""What a quantised block is: its fields as data, its reference decode, and how its bytes are read as words.

Owns the `Field` and `QuantType` vocabulary and the helpers that view block bytes as wider integers or as
f16 scales; never knows a particular type.
Hazard: block bytes come from a file, so they may be unaligned, strided or read-only; every wider view goes
through `words`, which copies when a view would be misaligned. Little-endian byte order is assumed.
"""

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType


@dataclass(frozen=True)
class Field:
    """A run of bytes of a block: `n_bytes` from `offset` on, with its meaning in words."""

    name: str
    offset: int
    n_bytes: int
    meaning: str


class QuantType(Protocol):
    """A GGML tensor type: how `block_elements` weights lie in `block_bytes` bytes, and the float32 they mean.

    `FIELDS` covers the block without gap or overlap, in order of offset; kernels and docs read it.
    """

    ggml: ClassVar[GGMLType]
    block_elements: ClassVar[int]
    block_bytes: ClassVar[int]
    FIELDS: ClassVar[tuple[Field, ...]]

    def decode(self, blocks: Tensor) -> Tensor:
        """Weights of blocks: u8 [n, block_bytes] -> f32 [n, block_elements], on the device of `blocks`.

        Bit-exact with ggml's `dequantize_row_*` (same order of float32 operations). Any strides, any storage
        offset; the input is never written to. The result may share memory with the input for F32 only.
        """
        ...


def words(blocks: Tensor, offset: int, n_bytes: int, dtype: torch.dtype) -> Tensor:
    """Bytes [offset, offset + n_bytes) of every block as words: `dtype` [n, n_bytes // itemsize].

    A view where alignment allows it, else a copy. `n_bytes` must be a multiple of the item size.
    """
    part = blocks[:, offset : offset + n_bytes]
    size = dtype.itemsize
    aligned = (
        part.stride(1) == 1
        and part.stride(0) % size == 0
        and part.storage_offset() % size == 0
        and part.data_ptr() % size == 0
    )
    if not aligned:
        part = part.clone(memory_format=torch.contiguous_format)
    return part.view(dtype)


def f16_scales(blocks: Tensor, offset: int, count: int = 1) -> Tensor:
    """`count` (1 or 2) f16 values that start at byte `offset` of every block, as f32 [n, count].

    They are gathered as one integer a block first: converting strided f16 is many times slower.
    """
    packed = words(blocks, offset, 2 * count, torch.int16 if count == 1 else torch.int32)
    return packed.contiguous().view(torch.float16).float()
