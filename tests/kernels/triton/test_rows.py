"""Rows of tables against the reference's decoding, bit by bit."""

import pytest
import torch

from makeway.gguf.types import BLOCK_SIZES
from makeway.kernels import Weight
from makeway.kernels.triton.rows import decode
from makeway.kernels.triton.unpack import PLANES
from tests.kernels.triton.blocks import random_weight


@pytest.mark.parametrize("kind", sorted(PLANES), ids=lambda kind: kind.name)
def test_rows_have_the_bits_of_the_reference(kind, device):
    """Eleven rows: more than one program's, not a multiple of them; of one block and of several."""
    for n_blocks in (1, 2):
        n_cols = max(256 if BLOCK_SIZES[kind].elements == 256 else 32, 32) * n_blocks
        weight = random_weight(kind, 11, n_cols, seed=n_blocks)
        found = decode(Weight(weight.raw.to(device), kind, n_cols)).cpu()
        assert torch.equal(found, weight.decode())  # equal: zeros of both signs are
        none = Weight(weight.raw[:0].to(device), kind, n_cols)
        assert decode(none).shape == (0, n_cols)
