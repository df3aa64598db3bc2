"""Writes GGUF files for benches and tests: good small ones with `write_gguf`, and headers piece by piece, bad ones too.

Owns the encoding of headers; never reads a file and shares no code with the reader but the type table.
Hazard: `write_gguf` writes what it is told, also tensor bytes of a wrong length; the reader's tests rely on it.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from makeway.gguf import GGMLType, ValueType, row_bytes

ByteOrder = Literal["little", "big"]
Tensor = tuple[GGMLType, Sequence[int], bytes | None]

_CODES = {
    ValueType.U8: "B",
    ValueType.I8: "b",
    ValueType.U16: "H",
    ValueType.I16: "h",
    ValueType.U32: "I",
    ValueType.I32: "i",
    ValueType.F32: "f",
    ValueType.BOOL: "?",
    ValueType.U64: "Q",
    ValueType.I64: "q",
    ValueType.F64: "d",
}
_OF_DTYPE = {np.dtype(code): kind for kind, code in _CODES.items()}


@dataclass(frozen=True)
class Typed:
    """A scalar with its value type chosen: `Typed(ValueType.U16, 3)`. Without it an int is u32 (i32, u64, i64
    where it does not fit) and a float f32."""

    kind: ValueType
    value: Any


class Encoder:
    """Bytes of the parts of a header, in one byte order."""

    def __init__(self, byte_order: ByteOrder = "little") -> None:
        self.mark = "<" if byte_order == "little" else ">"

    def pack(self, code: str, *values: Any) -> bytes:
        """`struct.pack` in this byte order."""
        return struct.pack(self.mark + code, *values)

    def string(self, text: str | bytes) -> bytes:
        """Length and bytes; `bytes` are taken as they are, UTF-8 or not."""
        raw = text.encode() if isinstance(text, str) else text
        return self.pack("Q", len(raw)) + raw

    def value(self, value: Any) -> tuple[ValueType, bytes]:
        """Type and bytes of a value: scalar, `Typed`, str, bytes, numpy array or scalar, list (also nested)."""
        if isinstance(value, Typed):
            if value.kind is ValueType.STRING:
                return value.kind, self.string(value.value)
            return value.kind, self.pack(_CODES[value.kind], value.value)
        if isinstance(value, str | bytes):
            return ValueType.STRING, self.string(value)
        if isinstance(value, np.ndarray):
            kind = _OF_DTYPE[value.dtype.newbyteorder("=")]
            body = value.astype(value.dtype.newbyteorder(self.mark)).tobytes()
            return ValueType.ARRAY, self.pack("IQ", kind, value.size) + body
        if isinstance(value, np.generic):
            return _OF_DTYPE[value.dtype], self.pack(_CODES[_OF_DTYPE[value.dtype]], value.item())
        if isinstance(value, list | tuple):
            return ValueType.ARRAY, self._array(list(value))
        kind = _kind_of([value])
        return kind, self.pack(_CODES[kind], value)

    def _array(self, values: list[Any]) -> bytes:
        if not values or isinstance(values[0], str | bytes):
            kind, bodies = ValueType.STRING, [self.string(v) for v in values]
        elif isinstance(values[0], list | tuple | np.ndarray):
            kind, bodies = ValueType.ARRAY, [self.value(v)[1] for v in values]
        elif isinstance(values[0], Typed):
            kind, bodies = values[0].kind, [self.value(v)[1] for v in values]
        else:
            kind = _kind_of(values)
            bodies = [self.pack(f"{len(values)}{_CODES[kind]}", *values)]
        return self.pack("IQ", kind, len(values)) + b"".join(bodies)

    def key(self, name: str | bytes, value: Any) -> bytes:
        """One metadata key with its value."""
        kind, body = self.value(value)
        return self.raw_key(name, kind, body)

    def raw_key(self, name: str | bytes, kind: int, body: bytes) -> bytes:
        """One metadata key with any type number and any bytes after it."""
        return self.string(name) + self.pack("I", kind) + body

    def tensor(self, name: str | bytes, dims: Sequence[int], ggml_type: int, offset: int) -> bytes:
        """One entry of the tensor list; `dims` in file order (innermost first)."""
        return self.string(name) + self.pack(f"I{len(dims)}QIQ", len(dims), *dims, ggml_type, offset)

    def header(
        self,
        keys: Sequence[bytes] = (),
        tensors: Sequence[bytes] = (),
        *,
        version: int = 3,
        n_keys: int | None = None,
        n_tensors: int | None = None,
        magic: bytes = b"GGUF",
    ) -> bytes:
        """A header of encoded keys and tensor entries; the counts may be made to lie."""
        counts = (
            len(tensors) if n_tensors is None else n_tensors,
            len(keys) if n_keys is None else n_keys,
        )
        return magic + self.pack("IQQ", version, *counts) + b"".join(keys) + b"".join(tensors)


def _kind_of(values: list[Any]) -> ValueType:
    if all(isinstance(v, bool) for v in values):
        return ValueType.BOOL
    if any(isinstance(v, float) for v in values):
        return ValueType.F32
    low, high = min(values), max(values)
    if low < 0:
        return ValueType.I32 if low >= -(1 << 31) and high < 1 << 31 else ValueType.I64
    return ValueType.U32 if high < 1 << 32 else ValueType.U64


def tensor_bytes(ggml_type: GGMLType, shape: Sequence[int]) -> int:
    """Bytes of a tensor of that type and shape (torch order)."""
    rows = int(np.prod(shape[:-1], dtype=object)) if len(shape) > 1 else 1
    return rows * row_bytes(ggml_type, shape[-1] if shape else 1)


def shard_path(path: Path, number: int, count: int) -> Path:
    """`dir/name.gguf` -> `dir/name-00002-of-00004.gguf`; `number` counts from 1."""
    return path.with_name(f"{path.stem}-{number:05d}-of-{count:05d}.gguf")


def write_gguf(
    path: str | Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    *,
    version: int = 3,
    alignment: int = 32,
    byte_order: ByteOrder = "little",
    split: Sequence[int] | None = None,
    sparse: bool = False,
) -> list[Path]:
    """Writes a GGUF file or a split set and gives the paths written.

    `tensors`: name -> (type, shape in torch order, bytes; None in a sparse file). `split`: number of tensors of
    each shard, for example `(0, 3, 2)`: three files `name-00001-of-00003.gguf`..., the first with metadata only.
    `sparse`: tensor data are a hole of the right size (any size, no disk space), the bytes are not used.
    The keys `general.alignment` (unless 32 or given) and `split.*` are added.
    """
    path = Path(path)
    names = list(tensors)
    counts = [len(names)] if split is None else list(split)
    if sum(counts) != len(names):
        raise ValueError(f"split {counts} does not add up to {len(names)} tensors")
    written = []
    for i, count in enumerate(counts):
        own, names = names[:count], names[count:]
        keys = dict(metadata) if i == 0 else {}
        if alignment != 32:
            keys.setdefault("general.alignment", alignment)
        if split is not None:
            keys["split.no"] = Typed(ValueType.U16, i)
            keys["split.count"] = Typed(ValueType.U16, len(counts))
            keys["split.tensors.count"] = Typed(ValueType.I32, len(tensors))
        file = path if split is None else shard_path(path, i + 1, len(counts))
        _write_one(
            file,
            Encoder(byte_order),
            keys,
            tensors={name: tensors[name] for name in own},
            version=version,
            alignment=alignment,
            sparse=sparse,
        )
        written.append(file)
    return written


def _write_one(
    path: Path,
    encoder: Encoder,
    keys: Mapping[str, Any],
    *,
    tensors: Mapping[str, Tensor],
    version: int,
    alignment: int,
    sparse: bool,
) -> None:
    entries = []
    offset = 0
    for name, (ggml_type, shape, data) in tensors.items():
        entries.append(encoder.tensor(name, list(reversed(shape)), ggml_type, offset))
        n_bytes = tensor_bytes(ggml_type, shape) if sparse or data is None else len(data)
        offset += -(-n_bytes // alignment) * alignment
    header = encoder.header([encoder.key(k, v) for k, v in keys.items()], entries, version=version)
    with open(path, "wb") as file:
        file.write(header + bytes(-len(header) % alignment))
        if sparse:
            file.truncate(file.tell() + offset)
            return
        for _, _, data in tensors.values():
            if data is None:
                raise ValueError("a tensor without bytes needs sparse=True")
            file.write(data + bytes(-len(data) % alignment))
