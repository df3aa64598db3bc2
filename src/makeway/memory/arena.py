"""The arena: all planned device memory as one tensor of bytes, and views of its regions.

Owns the allocation and the epoch of the published layout. Never frees, grows or moves anything before `close()`,
and never clears bytes: who gets a region writes it before reading it.
Hazard: a tensor taken from a view does not know its epoch, so it must not outlive the phase; keep the view.
"""

from collections.abc import Sequence

from torch import Tensor

from makeway.device import Device
from makeway.errors import EngineFailed
from makeway.memory.plan import Region


class View:
    """One region of the arena, usable while its layout is the published one."""

    def __init__(self, arena: "Arena", region: Region, *, epoch: int | None) -> None:
        self.region = region
        self._arena = arena
        self._epoch = epoch

    @property
    def tensor(self) -> Tensor:
        """The bytes, u8 [n_bytes]. Raises EngineFailed when another layout was published since, or after `close()`."""
        return self._arena.bytes_of(self.region, self._epoch)


class Arena:
    """`n_bytes` of a device's memory, allocated once."""

    def __init__(self, n_bytes: int, device: Device) -> None:
        """Raises EngineFailed when the device has less."""
        self.epoch = 0
        self.nbytes = n_bytes
        self._bytes: Tensor | None = device.alloc(n_bytes)
        self._fixed: list[Region] = []

    def fixed(self, region: Region) -> View:
        """A region that keeps its place in every phase; its view never goes stale."""
        self._check([*self._fixed, region])
        self._fixed.append(region)
        return View(self, region, epoch=None)

    def layout(self, regions: Sequence[Region]) -> tuple[View, ...]:
        """Publish another layout of the swing region: one view per region, in order; all earlier ones go stale.

        Raises EngineFailed, publishing nothing, when a region leaves the arena or overlaps another or a fixed one.
        """
        self._check([*self._fixed, *regions])
        self.epoch += 1
        return tuple(View(self, region, epoch=self.epoch) for region in regions)

    @property
    def whole(self) -> Tensor:
        """All bytes, for kernels that address experts by their offset. Raises EngineFailed after `close()`."""
        return self.bytes_of(Region("arena", 0, self.nbytes), None)

    def bytes_of(self, region: Region, epoch: int | None) -> Tensor:
        """The region's bytes, for views; None is an epoch that never ends. Raises EngineFailed."""
        if self._bytes is None:
            raise EngineFailed(f"arena: {region.name!r} was used after close()")
        if epoch is not None and epoch != self.epoch:
            raise EngineFailed(f"arena: view of {region.name!r} is of layout {epoch}, published is {self.epoch}")
        return self._bytes[region.offset : region.end]

    def close(self) -> None:
        """Give the memory back; every view raises from now on."""
        self._bytes = None
        self.nbytes = 0

    def _check(self, regions: Sequence[Region]) -> None:
        at = 0
        for region in sorted(regions, key=lambda r: (r.offset, r.end)):
            if region.n_bytes < 0 or region.offset < at or region.end > self.nbytes:
                raise EngineFailed(
                    f"arena: {region.name!r} at {region.offset}, {region.n_bytes} bytes, overlaps another region "
                    f"or leaves the arena of {self.nbytes} bytes"
                )
            at = region.end
