"""Parts moved inside memory: each lands where it belongs, whatever its size, and nothing else changes."""

import numpy as np
import pytest
import torch

from makeway.device import CpuDevice
from makeway.kernels.triton.move import BLOCK_BYTES, move_parts

PLACES = 2 * BLOCK_BYTES + 4096  # bytes from one place of a part to the next


def memory():
    return torch.from_numpy(np.random.default_rng(7).integers(0, 256, 8 * PLACES, dtype=np.uint8))


def parts(*sizes):
    """Parts of so many bytes, each from a place of its own to another one."""
    n = np.arange(len(sizes))
    return {"to": (7 - n) * PLACES + 16, "of": n * PLACES + 48, "n_bytes": np.array(sizes)}


def test_parts_of_several_sizes_move_as_the_device_moves_them():
    got, some = memory(), parts(16, BLOCK_BYTES, BLOCK_BYTES + 16, 2 * BLOCK_BYTES - 16)
    want = got.clone()
    CpuDevice().move_parts(want, **some)
    assert not torch.equal(got, want)
    move_parts(got, **some)
    assert torch.equal(got, want)


def test_a_length_is_rounded_up_to_a_unit():
    got, want = memory(), memory()
    CpuDevice().move_parts(want, **parts(48))
    move_parts(got, **parts(33))
    assert torch.equal(got, want)


def test_nothing_to_move_and_what_cannot_be_moved():
    got = memory()
    move_parts(got, **parts())
    assert torch.equal(got, memory())
    with pytest.raises(AssertionError):
        move_parts(got, **(parts(16) | {"to": np.array([8])}))
    with pytest.raises(AssertionError):
        move_parts(got, **(parts(16) | {"to": np.array([8 * PLACES])}))
