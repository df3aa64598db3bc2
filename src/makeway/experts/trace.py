"""Routing traces: a file that says which experts each token was routed to, layer by layer.

Owns the file format (reader and writer); never runs a policy or a model.
Hazard: a trace is written while a model runs and may end in the middle of a record; the reader gives all
whole records and says so, but damage anywhere else is an error, never a guess.

Format (little endian): magic `MWTRACE1`, u32 length, JSON header; then records: u32 mark, u8 phase, u8 zero,
u16 zero, u32 sequence, u32 n_tokens, u32 CRC-32 of the ids, ids [n_tokens, n_layers, top_k]. An id is one byte
below 256 experts, else two; the largest value of the type means "none" (padding, a layer that did not run).
"""

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BufferedRandom, BufferedReader
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np
from numpy.typing import NDArray

from makeway.errors import UserError

MAGIC = b"MWTRACE1"
MARK = 0x5243_5254
RECORD = struct.Struct("<IBBHIII")
PHASES: tuple[Literal["prefill", "decode"], ...] = ("prefill", "decode")
MAX_HEADER_BYTES = 1 << 20
MAX_RECORD_BYTES = 1 << 31


@dataclass(frozen=True)
class TraceHeader:
    """Shape of a trace. `expert_bytes` per layer, or empty when unknown (then all experts count alike)."""

    n_layers: int
    n_experts: int
    top_k: int
    model: str
    expert_bytes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse impossible shapes. Raises UserError."""
        sizes = (self.n_layers, self.n_experts, self.top_k)
        if not all(type(size) is int for size in sizes) or not isinstance(self.model, str):
            raise UserError("trace header: n_layers, n_experts and top_k must be whole numbers, model a text")
        if self.n_layers < 1 or not 1 <= self.top_k <= self.n_experts < 65535 or self.n_layers > 4096:
            raise UserError(
                f"trace header: {self.n_layers} layers, {self.n_experts} experts, top-{self.top_k} is no model"
            )
        if self.expert_bytes and (
            len(self.expert_bytes) != self.n_layers
            or not all(type(size) is int and size > 0 for size in self.expert_bytes)
        ):
            raise UserError("trace header: expert_bytes needs one positive size per layer")

    @property
    def dtype(self) -> np.dtype[np.unsignedinteger]:
        """Type of a stored id."""
        return np.dtype("u1") if self.n_experts < 256 else np.dtype("<u2")

    def to_bytes(self) -> bytes:
        """Magic, length and JSON, as at the start of a file."""
        text = json.dumps(asdict(self)).encode()
        return MAGIC + struct.pack("<I", len(text)) + text


@dataclass(frozen=True)
class TraceRecord:
    """Tokens that ran together. ids int32 [n_tokens, n_layers, top_k], -1 for none."""

    phase: Literal["prefill", "decode"]
    sequence: int
    ids: NDArray[np.int32]


def _read_header(file: BufferedReader | BufferedRandom, path: Path) -> TraceHeader:
    start = file.read(len(MAGIC) + 4)
    if start[: len(MAGIC)] != MAGIC or len(start) < len(MAGIC) + 4:
        raise UserError(f"{path} is not a makeway routing trace; record one with --trace FILE")
    (n_bytes,) = struct.unpack("<I", start[len(MAGIC) :])
    if n_bytes > MAX_HEADER_BYTES:
        raise UserError(f"{path}: the trace's header is damaged (length {n_bytes})")
    text = file.read(n_bytes)
    try:
        fields = json.loads(text)
        fields["expert_bytes"] = tuple(fields.get("expert_bytes", ()))
        return TraceHeader(**fields)
    except (ValueError, TypeError, KeyError, AttributeError) as fault:
        raise UserError(f"{path}: the trace's header is damaged: {fault}") from fault


class TraceReader:
    """Reads a trace from the start; iterate for records. `truncated` is known after the last record.

    Raises UserError for files that are no trace or are damaged before their end.
    """

    def __init__(self, path: Path) -> None:
        """Open and read the header."""
        self.path = path
        self.truncated = False
        self.end = 0  # offset behind the last whole record, once iterated
        try:
            self._file: BufferedReader = path.open("rb")
        except OSError as fault:
            raise UserError(f"cannot read the trace {path}: {fault.strerror}") from fault
        try:
            self.header = _read_header(self._file, path)
        except UserError:
            self._file.close()
            raise
        self._first = self._file.tell()

    def __iter__(self) -> Iterator[TraceRecord]:
        """All whole records, in order of writing."""
        header = self.header
        self._file.seek(0, 2)
        size = self._file.tell()
        self._file.seek(self._first)
        self.end, self.truncated = self._first, False
        token_bytes = header.n_layers * header.top_k * header.dtype.itemsize
        none = np.iinfo(header.dtype).max
        while self.end < size:
            head = self._file.read(RECORD.size)
            if len(head) < RECORD.size:
                self.truncated = True
                return
            mark, phase, zero, zeros, sequence, n_tokens, crc = RECORD.unpack(head)
            if mark == 0 and not any(head) and not any(self._file.read()):
                self.truncated = True  # a file system may leave zeros behind a crash
                return
            n_bytes = n_tokens * token_bytes
            if mark != MARK or phase >= len(PHASES) or zero or zeros or n_bytes > MAX_RECORD_BYTES:
                raise UserError(f"{self.path}: damaged at byte {self.end}: no record starts there")
            body = self._file.read(n_bytes)
            after = self.end + RECORD.size + n_bytes
            if len(body) < n_bytes or (zlib.crc32(body) != crc and after == size):
                self.truncated = True
                return
            if zlib.crc32(body) != crc:
                raise UserError(f"{self.path}: damaged at byte {self.end}: the checksum of a record is wrong")
            raw = np.frombuffer(body, dtype=header.dtype).astype(np.int32)
            raw[raw == none] = -1
            if raw.size and int(raw.max()) >= header.n_experts:
                raise UserError(f"{self.path}: damaged at byte {self.end}: expert {int(raw.max())} does not exist")
            self.end = after
            yield TraceRecord(PHASES[phase], sequence, raw.reshape(n_tokens, header.n_layers, header.top_k))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()


class TraceWriter:
    """Appends records to a trace. An existing trace of the same shape is continued, its torn tail cut off."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        """Create or continue `path`. Raises UserError when it cannot be written or holds something else."""
        self.path = path
        self.header = header
        try:
            is_new = not path.exists() or path.stat().st_size == 0
            end = len(header.to_bytes()) if is_new else self._end_of(path, header)
            self._file: BufferedRandom = path.open("w+b" if is_new else "r+b")
            if is_new:
                self._file.write(header.to_bytes())
            self._file.seek(end)
            self._file.truncate()
        except OSError as fault:
            raise UserError(f"cannot write the trace {path}: {fault.strerror}") from fault

    @staticmethod
    def _end_of(path: Path, header: TraceHeader) -> int:
        with TraceReader(path) as reader:
            if reader.header != header:
                raise UserError(
                    f"{path} holds a trace of {reader.header.model} ({reader.header.n_layers} layers, "
                    f"{reader.header.n_experts} experts); choose another file for {header.model}"
                )
            for _ in reader:
                pass
            return reader.end

    def write(self, phase: Literal["prefill", "decode"], ids: NDArray[np.integer], *, sequence: int = 0) -> None:
        """Append a record: ids [n_tokens, n_layers, top_k], -1 for none. Raises ValueError on other ids."""
        header = self.header
        if ids.ndim != 3 or ids.shape[1:] != (header.n_layers, header.top_k):
            raise ValueError(f"ids have shape {ids.shape}, not [n_tokens, {header.n_layers}, {header.top_k}]")
        if ids.size and (ids.min() < -1 or ids.max() >= header.n_experts):
            raise ValueError(f"ids must lie in -1..{header.n_experts - 1}")
        none = np.iinfo(header.dtype).max
        body = np.where(ids < 0, none, ids).astype(header.dtype).tobytes()
        head = RECORD.pack(MARK, PHASES.index(phase), 0, 0, sequence, len(ids), zlib.crc32(body))
        self._file.write(head + body)

    def flush(self) -> None:
        """Hand what was written to the operating system."""
        self._file.flush()

    def close(self) -> None:
        """Flush and close; again is harmless."""
        self._file.close()

    def __enter__(self) -> Self:
        """For `with`."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()
