"""The files of a model: opening and mapping one, and finding and checking the shards of a split set.

Owns the mappings until they are closed and every rule between files; never reads tensor bytes.
Hazard: a mapped file must not be shortened while it is open: the system ends a process that reads a mapped
byte the file no longer has (SIGBUS), and no Python code can catch that.
"""

import contextlib
import mmap
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from makeway.gguf.faults import DAMAGED, fault, show
from makeway.gguf.header import Header, parse_header
from makeway.gguf.metadata import Metadata

SPLIT_NO = "split.no"
SPLIT_COUNT = "split.count"
SPLIT_TENSORS = "split.tensors.count"
_SHARD_NAME = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)
_ONE_SET = "put the shards of one and the same download side by side"


@dataclass(frozen=True)
class Shard:
    """One mapped file and its header. `close` may leave the mapping to arrays that still look into it."""

    path: Path
    buffer: mmap.mmap
    header: Header
    metadata: Metadata

    @property
    def n_bytes(self) -> int:
        """Size of the file in bytes."""
        return len(self.buffer)

    def close(self) -> None:
        """Unmaps the file, now or when the last array that looks into it goes."""
        _unmap(self.buffer)


@dataclass(frozen=True)
class _Split:
    """What a file's split keys say; `number` counts from 0."""

    number: int
    count: int


def open_set(path: Path) -> list[Shard]:
    """Opens `path`, and when it is a shard all shards of its set, in order; raises UserError."""
    given = _open_shard(path)
    opened = [given]
    try:
        paths = _set_paths(given)
        if not paths:
            return opened
        missing = [p for p in paths if not p.exists()]
        if missing:
            number = paths.index(missing[0]) + 1
            more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
            raise fault(
                given.path,
                f"shard {number} of {len(paths)} is missing: {show(missing[0], 4096)}{more}",
                do="put all shards of the model into one folder",
            )
        shards = []
        for p in paths:
            shard = given if p == path else _open_shard(p)
            if shard is not given:
                opened.append(shard)
            shards.append(shard)
        _check_set(shards)
    except BaseException:
        for shard in opened:
            shard.close()
        raise
    return shards


def _open_shard(path: Path) -> Shard:
    buffer = _map(path)
    try:
        header = parse_header(buffer, path)
    except BaseException:
        _unmap(buffer)
        raise
    return Shard(path, buffer, header, Metadata(header.metadata, str(path)))


def _map(path: Path) -> mmap.mmap:
    try:
        mode = os.stat(path).st_mode  # before opening: opening a pipe would wait for a writer
        if stat.S_ISDIR(mode):
            raise fault(path, "this is a directory", do="give the .gguf file in it (any shard of a split model)")
        if not stat.S_ISREG(mode):
            raise fault(path, "this is not a regular file, so it cannot be mapped", do="give a .gguf file")
        with open(path, "rb", buffering=0) as file:
            if os.fstat(file.fileno()).st_size == 0:
                raise fault(path, "the file is empty", do="download or copy it again")
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise fault(path, "no such file", do="check the path") from None
    except PermissionError:
        raise fault(path, "no permission to read it", do="change its mode or run as its owner") from None
    except (OSError, ValueError, OverflowError) as error:
        reason = show(getattr(error, "strerror", None) or str(error))
        raise fault(path, f"cannot be opened: {reason}", do="check the path and the file system") from None


def _unmap(buffer: mmap.mmap) -> None:
    with contextlib.suppress(BufferError):  # an array still looks into it; the mapping ends with the last one
        buffer.close()


def _set_paths(given: Shard) -> list[Path]:
    """The paths of all shards of the set that `given` belongs to; empty when it is a file of its own."""
    name = _SHARD_NAME.fullmatch(given.path.name)
    named_count = int(name["count"]) if name else 1
    split = _split_of(given)
    if split is None:
        if named_count > 1:
            raise fault(
                given.path,
                f"its name says that it is one of {named_count} shards, but it has no key '{SPLIT_COUNT}'",
                do="rename it if it is a whole model, or else split the model again",
            )
        return []
    right_name = f"-{split.number + 1:05d}-of-{split.count:05d}.gguf"
    if name is None and split.count == 1:
        return []
    if name is None or (int(name["number"]) - 1, named_count) != (split.number, split.count):
        raise fault(
            given.path,
            f"it is shard {split.number + 1} of {split.count}, so its name must end in {right_name}",
            do="give all shards their original names back",
        )
    prefix = name["prefix"]
    return [given.path.with_name(f"{prefix}-{i:05d}-of-{split.count:05d}.gguf") for i in range(1, split.count + 1)]


def _split_of(shard: Shard) -> _Split | None:
    """The split keys of a file, or None when it is not part of a set."""
    count = shard.metadata.get_int(SPLIT_COUNT, 0)
    if count == 0:
        return None
    number = shard.metadata.get_int(SPLIT_NO)
    if not 0 <= number < count <= 99999:
        raise fault(shard.path, f"'{SPLIT_NO}' {number} and '{SPLIT_COUNT}' {count} contradict each other")
    return _Split(number, count)


def _check_set(shards: list[Shard]) -> None:
    """The shards belong together and hold all tensors of the model, each once."""
    first = shards[0]
    n_listed = first.metadata.get_int(SPLIT_TENSORS)
    architecture = first.metadata.get("general.architecture")
    seen: dict[str, Path] = {}
    for i, shard in enumerate(shards):
        split = _split_of(shard)
        if split != _Split(i, len(shards)):
            found = f"shard {split.number + 1} of {split.count}" if split else "no shard at all"
            raise fault(
                shard.path,
                f"it should be shard {i + 1} of {len(shards)}, but its keys say {found}",
                do=_ONE_SET,
            )
        if shard.metadata.get_int(SPLIT_TENSORS, n_listed) != n_listed:
            raise fault(shard.path, f"its '{SPLIT_TENSORS}' differs from the first shard's {n_listed}", do=_ONE_SET)
        own = shard.metadata.get("general.architecture", architecture)
        if isinstance(own, str) and isinstance(architecture, str) and own != architecture:
            raise fault(shard.path, f"its architecture '{show(own)}' differs from the first shard's", do=_ONE_SET)
        for name in shard.header.tensors:
            if name in seen:
                raise fault(shard.path, f"tensor '{show(name)}' is also in {show(seen[name].name, 4096)}", do=_ONE_SET)
            seen[name] = shard.path
    if len(seen) != n_listed:
        raise fault(
            first.path,
            f"key '{SPLIT_TENSORS}' says {n_listed} tensors, but the {len(shards)} shards hold {len(seen)}",
            do=f"{_ONE_SET}; if they are, {DAMAGED}",
        )
