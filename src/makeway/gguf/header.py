"""The header of one GGUF file: magic, version, metadata, tensor list, and the checks on their layout.

Owns every rule about a single file; never touches tensor bytes and never opens anything.
Hazard: tensor sizes are derived from dims in an untrusted file, so a tensor exists only after its bytes were
shown to lie inside the file, aligned, and apart from every other tensor.
"""

import itertools
import math
import mmap
from dataclasses import dataclass
from pathlib import Path

from makeway.errors import UserError
from makeway.gguf.cursor import ENTRY, Cursor
from makeway.gguf.faults import DAMAGED, TRUNCATED, fault, show
from makeway.gguf.types import BLOCK_SIZES, GGMLType, row_bytes
from makeway.gguf.values import Value, read_value, read_value_type

VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
ALIGNMENT_KEY = "general.alignment"
MAX_NAME_BYTES = 65535
MAX_DIMS = 4
_MIN_KEY_BYTES = 8 + 1 + 4 + 1  # length, one character, type, one-byte value
_MIN_TENSOR_BYTES = 8 + 1 + 4 + 4 + 8  # length, one character, n_dims, type, offset

_OTHER_FORMATS = {
    b"vers": "it looks like a Git LFS pointer: fetch the real file (git lfs pull)",
    b"PK\x03\x04": "it looks like a PyTorch or zip archive: convert the model to GGUF",
    b"lmgg": "it is in the older GGML format: convert the model to GGUF",
    b"tjgg": "it is in the older GGJT format: convert the model to GGUF",
    b"fmgg": "it is in the older GGMF format: convert the model to GGUF",
    b"<!DO": "it looks like a web page: download the model file itself",
    b"<htm": "it looks like a web page: download the model file itself",
}
_REMOVED_TYPES = {
    4: "Q4_2",
    5: "Q4_3",
    31: "Q4_0_4_4",
    32: "Q4_0_4_8",
    33: "Q4_0_8_8",
    36: "IQ4_NL_4_4",
    37: "IQ4_NL_4_8",
    38: "IQ4_NL_8_8",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where the bytes of one tensor are, and what they mean.

    `shape` is in torch order, outermost dim first (the reverse of the file's); `()` is a single element.
    `offset` is the absolute byte offset in `path`, the shard that holds the tensor.
    """

    name: str
    shape: tuple[int, ...]
    type: GGMLType
    path: Path
    offset: int
    n_bytes: int

    @property
    def n_elements(self) -> int:
        """Number of weights: the product of `shape`."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Header:
    """What the header of one file says; `tensors` in file order, already checked against the file."""

    version: int
    alignment: int
    metadata: dict[str, Value]
    tensors: dict[str, TensorInfo]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor as listed, before it is known where the data part begins. `at`: byte offset of the listing."""

    shape: tuple[int, ...]
    type: GGMLType
    offset: int  # relative to the data part
    n_bytes: int
    at: int


def parse_header(buffer: mmap.mmap, path: Path) -> Header:
    """Reads and checks the header of the mapped file `path`; raises UserError for anything that is wrong."""
    cursor = Cursor(buffer, str(path))
    version = _read_version(cursor)
    n_tensors = cursor.u64("the number of tensors")
    n_keys = cursor.u64("the number of metadata keys")
    cursor.claim(n_keys, _MIN_KEY_BYTES, "the metadata", weight=ENTRY)
    metadata = _read_metadata(cursor, n_keys)
    alignment = _alignment(cursor.path, metadata)
    cursor.claim(n_tensors, _MIN_TENSOR_BYTES, "the tensor list", weight=ENTRY)
    entries = _read_entries(cursor, n_tensors)
    data_start = -(-cursor.pos // alignment) * alignment
    _check_layout(cursor, entries, alignment=alignment, data_start=data_start)
    tensors = {
        name: TensorInfo(name, e.shape, e.type, path, data_start + e.offset, e.n_bytes) for name, e in entries.items()
    }
    return Header(version, alignment, metadata, tensors)


def _read_version(cursor: Cursor) -> int:
    magic = cursor.take(4, "the magic number")
    if magic == b"FUGG":
        raise _big_endian(cursor.path)
    if magic != b"GGUF":
        do = _OTHER_FORMATS.get(magic, "give a .gguf file")
        raise fault(cursor.path, f"not a GGUF file: it begins with {magic!r} instead of b'GGUF'", do=do)
    version = cursor.u32("the version")
    if version in VERSIONS:
        return version
    if version & 0xFFFF == 0 and version:
        raise _big_endian(cursor.path)
    raise fault(
        cursor.path,
        f"GGUF version {version} is not supported, only {' and '.join(map(str, VERSIONS))}",
        at=4,
        do="convert the model again with a current converter, or update makeway",
    )


def _big_endian(path: str) -> UserError:
    return fault(
        path,
        "this is a big-endian GGUF file; makeway reads little-endian ones",
        at=4,
        do="use the little-endian file of this model, or convert it with the byte order changed",
    )


def _read_metadata(cursor: Cursor, n_keys: int) -> dict[str, Value]:
    metadata: dict[str, Value] = {}
    for i in range(n_keys):
        at = cursor.pos
        key = cursor.string(f"the name of metadata key {i} of {n_keys}", max_bytes=MAX_NAME_BYTES)
        if not key:
            raise fault(cursor.path, f"metadata key {i} of {n_keys} has an empty name", at=at)
        what = f"key '{show(key)}'"
        if key in metadata:
            raise fault(cursor.path, f"{what} appears twice", at=at)
        metadata[key] = read_value(cursor, read_value_type(cursor, what), what)
    return metadata


def _alignment(path: str, metadata: dict[str, Value]) -> int:
    value = metadata.get(ALIGNMENT_KEY, DEFAULT_ALIGNMENT)
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0 or value & (value - 1):
        shown = value if isinstance(value, int | float) else f"a {type(value).__name__}"
        raise fault(path, f"key '{ALIGNMENT_KEY}' must be a power of two, but is {shown}")
    return value


def _read_entries(cursor: Cursor, n_tensors: int) -> dict[str, _Entry]:
    entries: dict[str, _Entry] = {}
    for i in range(n_tensors):
        at = cursor.pos
        name = cursor.string(f"the name of tensor {i} of {n_tensors}", max_bytes=MAX_NAME_BYTES)
        if not name:
            raise fault(cursor.path, f"tensor {i} of {n_tensors} has an empty name", at=at)
        if name in entries:
            raise fault(cursor.path, f"tensor '{show(name)}' is listed twice", at=at)
        entries[name] = _read_entry(cursor, f"tensor '{show(name)}'", at)
    return entries


def _read_entry(cursor: Cursor, what: str, at: int) -> _Entry:
    n_dims = cursor.u32(f"the number of dims of {what}")
    if n_dims > MAX_DIMS:
        raise fault(cursor.path, f"{what} has {n_dims} dims, at most {MAX_DIMS} are allowed", at=at)
    dims = [cursor.u64(f"the dims of {what}") for _ in range(n_dims)]
    if any(not 0 < d < 1 << 63 for d in dims):
        raise fault(cursor.path, f"{what} has a zero or negative dim: {_signed(dims)}", at=at)
    if math.prod(dims) >= 1 << 63:
        raise fault(cursor.path, f"{what} has too many elements: {dims}", at=at)
    ggml_type = _tensor_type(cursor, what, at)
    try:
        row = row_bytes(ggml_type, dims[0] if dims else 1)
    except ValueError:
        block = BLOCK_SIZES[ggml_type].elements
        raise fault(
            cursor.path,
            f"{what} has rows of {dims[0] if dims else 1} elements, no multiple of {block}, "
            f"the block of its type {ggml_type.name}",
            at=at,
        ) from None
    offset = cursor.u64(f"the offset of {what}")
    return _Entry(tuple(reversed(dims)), ggml_type, offset, row * math.prod(dims[1:]), at)


def _signed(dims: list[int]) -> list[int]:
    """The dims as ggml sees them, 64-bit signed."""
    return [d - (1 << 64) if d >> 63 else d for d in dims]


def _tensor_type(cursor: Cursor, what: str, at: int) -> GGMLType:
    number = cursor.u32(f"the type of {what}")
    try:
        return GGMLType(number)
    except ValueError:
        pass
    if number in _REMOVED_TYPES:
        name = _REMOVED_TYPES[number]
        raise fault(
            cursor.path,
            f"{what} has type {name} ({number}), which ggml has removed",
            at=at,
            do="use another quantisation of this model",
        )
    raise fault(
        cursor.path,
        f"{what} has the unknown type number {number}, so its size is unknown",
        at=at,
        do=f"use another quantisation of this model, or update makeway; if its type is common, {DAMAGED}",
    )


def _check_layout(cursor: Cursor, entries: dict[str, _Entry], *, alignment: int, data_start: int) -> None:
    """Every tensor lies inside the file, on the alignment, and apart from the others."""
    for name, e in entries.items():
        if e.offset % alignment:
            raise fault(
                cursor.path,
                f"tensor '{show(name)}' has offset {e.offset}, no multiple of the alignment {alignment}",
                at=e.at,
            )
    by_offset = sorted(entries.items(), key=lambda item: item[1].offset)
    for (name, e), (next_name, n) in itertools.pairwise(by_offset):
        if e.offset + e.n_bytes > n.offset:
            raise fault(
                cursor.path,
                f"tensor '{show(next_name)}' begins at byte {data_start + n.offset}, inside tensor "
                f"'{show(name)}', which ends at byte {data_start + e.offset + e.n_bytes}",
                at=n.at,
            )
    if by_offset:  # none overlaps, so the last to begin is the last to end
        name, e = by_offset[-1]
        stop = data_start + e.offset + e.n_bytes
        if stop > cursor.size:
            raise fault(
                cursor.path,
                f"tensor '{show(name)}' ends at byte {stop}, but the file has only {cursor.size} bytes",
                at=e.at,
                do=TRUNCATED,
            )
