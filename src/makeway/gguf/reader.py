"""A model file as named, typed bytes: `open_gguf` and the object it gives.

Owns the mappings of all shards from opening to `close`; never copies or decodes tensor bytes and never
writes. No torch here.
Hazard: the arrays of `bytes_of` look into the mapped file. They stay valid after `close` (the mapping then
ends with the last of them), but a file that is shortened meanwhile ends the process; see `shards.py`.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from makeway.gguf.faults import fault, show
from makeway.gguf.header import TensorInfo
from makeway.gguf.metadata import Metadata
from makeway.gguf.shards import Shard, open_set


class GGUFFile:
    """An open model: metadata of the first shard, the tensors of all shards, and views of their bytes.

    `metadata`: key -> value, with typed getters that are also here (`file.get_int(key)`, ...).
    `tensors`: name -> TensorInfo in file order. `paths`: the shard files in order.
    `version`, `alignment`: of the first shard. `n_bytes`: size of all files together.
    """

    metadata: Metadata
    tensors: Mapping[str, TensorInfo]
    paths: tuple[Path, ...]
    version: int
    alignment: int
    n_bytes: int

    def __init__(self, shards: list[Shard]) -> None:
        """Takes over `shards`, which `open_set` has checked; use `open_gguf`."""
        first = shards[0]
        self.metadata = first.metadata
        self.tensors = MappingProxyType({n: t for s in shards for n, t in s.header.tensors.items()})
        self.paths = tuple(s.path for s in shards)
        self.version = first.header.version
        self.alignment = first.header.alignment
        self.n_bytes = sum(s.n_bytes for s in shards)
        self._shards = {s.path: s for s in shards}
        self._maps: dict[Path, NDArray[np.uint8]] | None = {s.path: np.frombuffer(s.buffer, np.uint8) for s in shards}
        self.get_int = self.metadata.get_int
        self.get_float = self.metadata.get_float
        self.get_bool = self.metadata.get_bool
        self.get_str = self.metadata.get_str
        self.get_ints = self.metadata.get_ints
        self.get_floats = self.metadata.get_floats
        self.get_bools = self.metadata.get_bools
        self.get_strs = self.metadata.get_strs

    def __repr__(self) -> str:
        return f"GGUFFile({show(self.paths[0], 4096)}, {len(self.tensors)} tensors, {len(self.paths)} files)"

    def get_tensor(self, name: str) -> TensorInfo:
        """The tensor `name`; UserError when the model has none of that name."""
        info = self.tensors.get(name)
        if info is None:
            raise fault(
                self.paths[0],
                f"tensor '{show(name)}' is missing",
                do="convert the model again with a current converter, or use another file of it",
            )
        return info

    def bytes_of(self, name: str) -> NDArray[np.uint8]:
        """The bytes of tensor `name` as they are in the file: read-only view [n_bytes], no copy.

        UserError when there is no such tensor; ValueError after `close`.
        """
        info = self.get_tensor(name)
        if self._maps is None:
            raise ValueError("bytes_of on a closed GGUFFile")
        return self._maps[info.path][info.offset : info.offset + info.n_bytes]

    def close(self) -> None:
        """Gives the mappings back; metadata and tensor list stay readable. May be called again."""
        self._maps = None
        for shard in self._shards.values():
            shard.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_gguf(path: str | Path) -> GGUFFile:
    """Opens the model at `path`: one file, or any shard of a split set, whose other shards are opened too.

    Raises UserError, one line with file, byte offset and key or tensor, for anything that cannot be used.
    """
    return GGUFFile(open_set(Path(os.fspath(path))))
