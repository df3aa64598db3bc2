"""Random blocks: the spread they promise, in every type."""

import pytest
import torch

from makeway.bench.blocks import RANDOM_TYPES, random_blocks
from makeway.gguf import GGMLType
from makeway.quants import QUANT_TYPES, decode_rows


@pytest.mark.parametrize("std", [0.2 / 6144**0.5, 2560**-0.5, 1.0])
@pytest.mark.parametrize("kind", RANDOM_TYPES, ids=lambda t: t.name)
def test_weights_have_mean_0_and_the_spread_asked_for(kind, std):
    n = 1 << 17
    blocks = random_blocks(kind, n // QUANT_TYPES[kind].block_elements, std=std, seed=3)
    weights = decode_rows(torch.from_numpy(blocks), kind).double()
    assert weights.std().item() == pytest.approx(std, rel=0.02)
    assert abs(weights.mean().item()) < 5 * std / n**0.5
    # Sums of 32 neighbours grow as those of independent values do: no block leans to one side.
    sums = weights.reshape(-1, 32).sum(1)
    assert sums.std().item() < 1.3 * std * 32**0.5
    assert weights.abs().max().item() < 4 * std


def test_equal_seeds_give_equal_bytes_and_others_do_not():
    first, again, other = (random_blocks(GGMLType.Q4_K, 10, std=0.02, seed=s) for s in (1, 1, 2))
    assert (first == again).all()
    assert (first != other).mean() > 0.5


def test_what_cannot_be_made_is_refused():
    with pytest.raises(ValueError, match="no random blocks of IQ4_XS"):
        random_blocks(GGMLType.IQ4_XS, 4, std=0.02, seed=0)
    for std in (1e-7, 1e9):
        with pytest.raises(ValueError, match="f16"):
            random_blocks(GGMLType.Q8_0, 4, std=std, seed=0)
