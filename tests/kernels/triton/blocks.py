"""Quantised weights with ordinary values, for kernels: random codes under scales near one."""

import torch

from makeway.gguf.types import BLOCK_SIZES, GGMLType
from makeway.kernels import Weight
from makeway.quants import decode_rows
from tests.quants.blocks import random_blocks


def random_weight(kind: GGMLType, n_rows: int, n_cols: int, *, seed: int = 0) -> Weight:
    """Weights whose decoded values are finite and of ordinary size: unusual blocks are replaced by usual ones."""
    block = BLOCK_SIZES[kind]
    n = n_rows * n_cols // block.elements
    blocks = random_blocks(kind, max(4 * n, 4096), seed)
    largest = decode_rows(blocks, kind).abs().amax(1).nan_to_num(torch.inf)
    usual = blocks[(largest < 1.0) & (largest > 1e-2)]
    assert usual.shape[0] >= 8
    chosen = usual[torch.arange(n) % usual.shape[0]]
    return Weight(chosen.reshape(n_rows, -1).contiguous(), kind, n_cols)
