"""A position in the mapped header of one file, and the checked reads that move it.

Owns bounds: every read is checked against the file's end and the header limits before anything is
allocated; never interprets what it reads.
Hazard: counts and lengths come from an untrusted file. A count is only believed after `claim` has shown that
the bytes it stands for are there and that the header stays within its limits (a sparse file has room for
billions of empty strings).
"""

import mmap
import struct

from makeway.errors import UserError
from makeway.gguf.faults import DAMAGED, TRUNCATED, fault

MAX_HEADER_BYTES = 128 << 20
"""Most bytes of a header that are read; vocabularies of 250k tokens take about 10 MiB."""
MAX_STRING_BYTES = 16 << 20
"""Longest single string; chat templates take some 10 KiB."""
MAX_ITEMS = 1 << 22
"""Most strings in one header; a vocabulary of 250k has about 500k. Bigger things count for more: ENTRY, ARRAY."""
ENTRY = 16
"""What a metadata key or a tensor counts for."""
ARRAY = 64
"""What an array in an array counts for."""

U32 = struct.Struct("<I")
U64 = struct.Struct("<Q")


class Cursor:
    """Reads little-endian values at `pos`; `what` in each call says what is read, for the error message."""

    def __init__(self, buffer: mmap.mmap, path: str) -> None:
        self.path = path
        self.pos = 0
        self.size = len(buffer)
        self._buffer = buffer
        self._end = min(self.size, MAX_HEADER_BYTES)
        self._n_items = 0

    def _past_end(self, what: str) -> UserError:
        """The error for a read that would pass the end of the file or of what a header may take."""
        if self._end < self.size:
            return fault(
                self.path,
                f"{what} would make the header larger than {MAX_HEADER_BYTES >> 20} MiB",
                at=self.pos,
            )
        return fault(self.path, f"the file ends at byte {self.size}, inside {what}", at=self.pos, do=TRUNCATED)

    def claim(self, count: int, item_bytes: int, what: str, *, weight: int = 1) -> None:
        """Checks that `count` things of at least `item_bytes` bytes can follow; raises UserError otherwise.

        `weight`: what each becomes in memory, in strings (0: numbers, no object each); the sum of all claims
        of a header is at most MAX_ITEMS.
        """
        left = self.size - self.pos
        if count * item_bytes > left:
            raise fault(
                self.path,
                f"{what} claims {count} entries of at least {item_bytes} bytes, but only {left} bytes follow",
                at=self.pos,
                do="the file is damaged or cut short: download it again",
            )
        if self.pos + count * item_bytes > self._end:
            raise self._past_end(what)
        self._n_items += count * weight
        if weight and self._n_items > MAX_ITEMS:
            raise fault(
                self.path,
                f"{what} claims {count} entries, too many for one header (at most {MAX_ITEMS // weight})",
                at=self.pos,
            )

    def take(self, n_bytes: int, what: str) -> bytes:
        """The next `n_bytes` bytes."""
        stop = self.pos + n_bytes
        if stop > self._end:
            raise self._past_end(what)
        data = self._buffer[self.pos : stop]
        self.pos = stop
        return data

    def u32(self, what: str) -> int:
        """The next unsigned 32-bit integer."""
        value: int = U32.unpack(self.take(4, what))[0]
        return value

    def u64(self, what: str) -> int:
        """The next unsigned 64-bit integer."""
        value: int = U64.unpack(self.take(8, what))[0]
        return value

    def string(self, what: str, *, max_bytes: int = MAX_STRING_BYTES) -> str:
        """The next string (u64 length, UTF-8 bytes); refuses text that is not UTF-8."""
        start = self.pos
        n_bytes = self.u64(f"the length of {what}")
        if n_bytes > max_bytes:
            raise fault(self.path, f"{what} is {n_bytes} bytes long, at most {max_bytes} are allowed", at=start)
        try:
            return self.take(n_bytes, what).decode()
        except UnicodeDecodeError:
            raise fault(self.path, f"{what} is not UTF-8 text", at=start + 8, do=_NOT_TEXT) from None

    def strings(self, count: int, what: str) -> list[str]:
        """The next `count` strings, in one tight loop: a vocabulary has hundreds of thousands."""
        self.claim(count, 8, what)
        buffer, pos, end = self._buffer, self.pos, self._end
        length_at = U64.unpack_from
        texts: list[str] = []
        append = texts.append
        try:
            for _ in range(count):
                start = pos + 8
                stop = start + length_at(buffer, pos)[0]
                if stop > end:
                    raise self._past_end(f"entry {len(texts)} of {what}")
                append(buffer[start:stop].decode())
                pos = stop
        except struct.error:
            self.pos = pos
            raise self._past_end(f"the length of entry {len(texts)} of {what}") from None
        except UnicodeDecodeError:
            raise fault(
                self.path, f"entry {len(texts)} of {what} is not UTF-8 text", at=pos + 8, do=_NOT_TEXT
            ) from None
        self.pos = pos
        return texts


_NOT_TEXT = f"GGUF strings are UTF-8, so {DAMAGED}"
