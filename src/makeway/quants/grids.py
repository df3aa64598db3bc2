"""Codebooks and sign tables of the IQ types, as tensors with an entry packed into one integer.

Owns the package data file `grids.npz` (from `tools/make_iq_grids.py`) and the sign rule; decodes nothing.
Hazard: the tables are cached per device and shared; callers index them and never write to them.
"""

import io
from functools import cache
from importlib import resources

import numpy as np
import torch
from torch import Tensor


@cache
def _grids() -> dict[str, np.ndarray]:
    """All codebooks, int8 [entries, 8 or 4]."""
    data = resources.files("makeway.quants").joinpath("grids.npz").read_bytes()
    with np.load(io.BytesIO(data), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}


@cache
def grid_words(name: str, device: torch.device) -> Tensor:
    """Codebook `name`, the int8 values of an entry as one word: int64 [entries] of 8 or int32 of 4 values."""
    grid = _grids()[name]
    word = torch.int64 if grid.shape[1] == 8 else torch.int32
    return torch.from_numpy(grid.copy()).view(word)[:, 0].to(device)


@cache
def sign_words(device: torch.device) -> Tensor:
    """int64 [256]: byte i of entry b is int8 -1 where bit i of b is set, else 1."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).to(torch.int8).view(torch.int64)[:, 0].to(device)


@cache
def even_sign_words(device: torch.device) -> Tensor:
    """int64 [128]: `sign_words` of seven stored bits and an eighth that makes the minus signs even."""
    index = torch.arange(128)
    parity = (index[:, None] >> torch.arange(7) & 1).sum(dim=1) & 1
    return sign_words(device)[(index | parity << 7).to(device)]


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """table[index] for a one-dimensional table and an int32 index of any shape."""
    return table.index_select(0, index.reshape(-1)).view(index.shape)
