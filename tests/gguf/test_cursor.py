import mmap
import struct

import pytest

from makeway.errors import UserError
from makeway.gguf import cursor as cursor_module
from makeway.gguf.cursor import Cursor


@pytest.fixture
def cursor_of():
    maps = []

    def make(data: bytes) -> Cursor:
        buffer = mmap.mmap(-1, len(data))
        buffer[:] = data
        maps.append(buffer)
        return Cursor(buffer, "m.gguf")

    yield make
    for buffer in maps:
        buffer.close()


def text(raw: bytes) -> bytes:
    return struct.pack("<Q", len(raw)) + raw


def test_reads_move_the_position(cursor_of):
    cursor = cursor_of(struct.pack("<IQ", 7, 1 << 63) + text("häß".encode()) + text(b"") + text(b"a\0b"))
    assert cursor.u32("x") == 7
    assert cursor.u64("x") == 1 << 63
    assert cursor.string("x") == "häß"
    assert cursor.strings(2, "x") == ["", "a\0b"]
    assert cursor.pos == cursor.size


@pytest.mark.parametrize("length", [2, 1 << 20, (1 << 63) - 1, (1 << 64) - 1])
def test_a_string_beyond_the_end(cursor_of, length):
    data = struct.pack("<Q", length) + b"x"
    with pytest.raises(UserError, match=r"key 'k' is|the file ends at byte 9, inside key 'k' \(at byte 8\)"):
        cursor_of(data).string("key 'k'")
    with pytest.raises(UserError, match=r"entry 0 of key 'k'"):
        cursor_of(data).strings(1, "key 'k'")


def test_strings_cut_short_name_the_entry(cursor_of):
    data = text(b"one") + text(b"two") + text(b"")
    with pytest.raises(UserError, match="the length of entry 2 of key 'k'"):
        cursor_of(data[:-4]).strings(3, "key 'k'")
    with pytest.raises(UserError, match="entry 1 of key 'k' is not UTF-8 text"):
        cursor_of(text(b"one") + text(b"\xff\xfe")).strings(2, "key 'k'")


def test_claims_are_checked_against_what_follows(cursor_of):
    cursor = cursor_of(bytes(80))
    cursor.claim(10, 8, "x")
    with pytest.raises(UserError, match="x claims 11 entries of at least 8 bytes, but only 80 bytes follow"):
        cursor.claim(11, 8, "x")
    with pytest.raises(UserError, match="x claims 18446744073709551615 entries"):
        cursor.claim((1 << 64) - 1, 1, "x")


def test_items_of_a_header_add_up(cursor_of, monkeypatch):
    monkeypatch.setattr(cursor_module, "MAX_ITEMS", 15)
    cursor = cursor_of(bytes(80))
    cursor.claim(10, 8, "x")
    cursor.claim(10, 8, "x", weight=0)
    with pytest.raises(UserError, match=r"x claims 2 entries, too many for one header \(at most 5\)"):
        cursor.claim(2, 8, "x", weight=3)


def test_a_header_has_a_largest_size(cursor_of, monkeypatch):
    monkeypatch.setattr(cursor_module, "MAX_HEADER_BYTES", 1 << 20)
    cursor = cursor_of(bytes(3 << 20))
    for read in (
        lambda: cursor.take((1 << 20) + 1, "x"),
        lambda: cursor.claim(1 << 18, 8, "x"),
        lambda: cursor.strings((1 << 17) + 1, "x"),
    ):
        with pytest.raises(UserError, match="x would make the header larger than 1 MiB"):
            read()
