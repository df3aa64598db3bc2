"""Tensors cut out of a stretch of bytes, one behind the other: a region of the arena, or memory of one's own.

Owns the place of the next tensor. Never clears bytes. Hazard: a tensor dies with the region it was cut from.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from makeway.memory.facts import align_up


def padded_bytes(shape: Sequence[int]) -> int:
    """Bytes of one float32 item of `shape` in a room, rounded up so that the next item is aligned too."""
    return align_up(4 * math.prod(shape))


class Room:
    """`n_bytes` on a device: the first of `room` (u8) when that is given, else freshly allocated."""

    def __init__(self, n_bytes: int, *, device: torch.device, room: Tensor | None = None) -> None:
        if room is None:
            room = torch.empty(n_bytes, dtype=torch.uint8, device=device)
        assert room.dtype == torch.uint8
        assert room.numel() >= n_bytes, f"{room.numel()} bytes of room for {n_bytes}"
        self._bytes = room[:n_bytes]
        self._at = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype, *, n_bytes: int) -> Tensor:
        """The next `n_bytes`, of which a dense tensor of `shape` takes the first."""
        used = math.prod(shape) * dtype.itemsize
        assert used <= n_bytes
        start, self._at = self._at, self._at + n_bytes
        assert self._at <= self._bytes.numel(), "the room is used up"
        return self._bytes[start : start + used].view(dtype).view(*shape)

    def take_items(self, n: Sequence[int], shape: Sequence[int]) -> Tensor:
        """float32 [*n, *shape] whose items of `shape` each start aligned (`padded_bytes` from one to the next)."""
        stride = padded_bytes(shape)
        flat = self.take((*n, stride // 4), torch.float32, n_bytes=math.prod(n) * stride)
        return flat[..., : math.prod(shape)].view(*n, *shape)

    @property
    def full(self) -> bool:
        """True when nothing is left."""
        return self._at == self._bytes.numel()
