"""A matrix of a GGUF file that stays quantised until somebody needs its rows.

Owns nothing: `raw` is a view (of the mapped file, of pinned memory, of a slot). Never caches what it decodes.
Hazard: the view dies with its owner (file, arena); a `Weight` must not outlive it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from makeway.gguf.types import GGMLType, row_bytes
from makeway.quants import decode_rows


@dataclass(frozen=True)
class Weight:
    """`raw` u8 [n_rows, bytes per row] of type `type`, holding float values [n_rows, n_cols]."""

    raw: Tensor
    type: GGMLType
    n_cols: int

    def __post_init__(self) -> None:
        assert self.raw.dtype == torch.uint8
        assert self.raw.dim() == 2
        assert self.raw.shape[1] == row_bytes(self.type, self.n_cols)

    @property
    def n_rows(self) -> int:
        return self.raw.shape[0]

    @property
    def nbytes(self) -> int:
        return self.raw.numel()

    def decode(self, first: int = 0, last: int | None = None) -> Tensor:
        """Rows first..last-1 as float32 [rows, n_cols], freshly allocated."""
        return decode_rows(self.raw[first:last], self.type)

    def pick(self, indices: Tensor, device: torch.device) -> "Weight":
        """The rows with these indices (int64 [n], any device), still quantised, copied to `device`."""
        return Weight(self.raw[indices.to(self.raw.device)].to(device), self.type, self.n_cols)
