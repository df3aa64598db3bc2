"""Many parts of device memory moved inside it by one launch: experts that change their slots before slots are lent.

Owns nothing. Never waits, and never looks at what it moves. Hazard: parts move all at once, so what one reads no other
may write.
"""

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from makeway.kernels.triton.quick import quick

Ints = NDArray[np.int64]
UNIT = 16  # bytes: what a thread moves at a time; parts begin at multiples, and lengths are rounded up to them
BLOCK_BYTES = 32 << 10


@quick
@triton.jit(do_not_specialize=["n_parts"])
def move_kernel(memory, parts, n_parts, BLOCK: tl.constexpr):
    """memory int64, two of them a unit; parts int64 [3, n_parts]: where to, where from and how many, in units. A
    program moves `BLOCK` int64 of a part."""
    part = tl.program_id(0)
    to, of = tl.load(parts + part) * 2, tl.load(parts + n_parts + part) * 2
    size = tl.load(parts + 2 * n_parts + part) * 2
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(memory + of + at, mask=at < size)
    tl.store(memory + to + at, values, mask=at < size)


def move_parts(memory: Tensor, *, to: Ints, of: Ints, n_bytes: Ints) -> None:
    """Copies inside `memory`, u8 on a GPU: parts from the bytes `of` to the bytes `to`, both multiples of 16. A length
    is rounded up to 16: what follows a part belongs to it so far."""
    if not to.size:
        return
    assert memory.dtype == torch.uint8
    assert memory.is_contiguous()
    assert not ((to | of) % UNIT).any()
    sizes = -(-n_bytes // UNIT) * UNIT
    assert min(int(to.min()), int(of.min())) >= 0
    assert int((np.maximum(to, of) + sizes).max()) <= memory.numel()
    parts = torch.from_numpy(np.stack([to, of, sizes]) // UNIT)
    if memory.is_cuda:
        parts = parts.pin_memory()  # else the copy would wait for everything before it
    grid = (to.size, -(-int(sizes.max()) // BLOCK_BYTES))
    words = memory.view(torch.int64)
    move_kernel[grid](words, parts.to(memory.device, non_blocking=True), to.size, BLOCK=BLOCK_BYTES // 8, num_warps=8)
