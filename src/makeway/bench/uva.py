"""A kernel that copies by reading host memory itself, for measuring how fast that can be.

Owns one Triton kernel; imported only where Triton and a GPU are. Never used by the engine.
Hazard: the source must be host memory registered with CUDA, where its address is valid on the GPU too.
"""

import triton
import triton.language as tl
from torch import Tensor

WORDS = 1024  # of 8 bytes: two 16-byte loads a thread


@triton.jit
def _copy_kernel(source, target, n_words, WORDS: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * WORDS + tl.arange(0, WORDS)
    mask = at < n_words
    tl.store(target + at, tl.load(source + at, mask=mask), mask=mask)


def kernel_copy(target: Tensor, source: Tensor) -> None:
    """`source` to `target`, both int64 [n]: one launch, every load crosses the link."""
    assert target.numel() == source.numel()
    _copy_kernel[(triton.cdiv(source.numel(), WORDS),)](source, target, source.numel(), WORDS=WORDS, num_warps=8)
