"""The trace file: what is written is read, a torn tail is cut, damage is told."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.experts.trace import MAGIC, RECORD, TraceHeader, TraceReader, TraceWriter

HEADER = TraceHeader(3, 300, 2, "model", expert_bytes=(10, 20, 30))


def ids_of(header: TraceHeader, n_tokens: int, seed: int = 0) -> np.ndarray:
    random = np.random.default_rng(seed)
    return random.integers(-1, header.n_experts, (n_tokens, header.n_layers, header.top_k))


def write(path, header=HEADER, lengths=(4, 1, 2)):
    with TraceWriter(path, header) as writer:
        for i, n_tokens in enumerate(lengths):
            writer.write("prefill" if i == 0 else "decode", ids_of(header, n_tokens, i), sequence=i)


def read(path):
    with TraceReader(path) as reader:
        return list(reader), reader


@pytest.mark.parametrize("n_experts", [1, 255, 256, 300, 65534])
def test_what_is_written_is_read(tmp_path, n_experts):
    header = TraceHeader(3, n_experts, 1, "a model, größer")
    write(tmp_path / "t", header)
    records, reader = read(tmp_path / "t")
    assert reader.header == header
    assert not reader.truncated
    assert [(r.phase, r.sequence) for r in records] == [("prefill", 0), ("decode", 1), ("decode", 2)]
    for i, (record, n_tokens) in enumerate(zip(records, (4, 1, 2), strict=True)):
        assert np.array_equal(record.ids, ids_of(header, n_tokens, i))
    width = 1 if n_experts < 256 else 2
    assert (tmp_path / "t").stat().st_size == len(header.to_bytes()) + 3 * RECORD.size + 7 * 3 * width


@given(cut=st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_a_torn_tail_leaves_the_whole_records(tmp_path_factory, cut):
    folder = tmp_path_factory.mktemp("cut")
    write(folder / "t")
    whole = (folder / "t").read_bytes()
    cut = min(cut, len(whole) - len(HEADER.to_bytes()))
    (folder / "t").write_bytes(whole[: len(whole) - cut])
    ends = np.cumsum([len(HEADER.to_bytes()), *(RECORD.size + n * 12 for n in (4, 1, 2))])
    records, reader = read(folder / "t")
    assert len(records) == int((ends[1:] <= len(whole) - cut).sum())
    assert reader.truncated == (len(whole) - cut not in ends)
    assert reader.end == ends[len(records)]
    with TraceWriter(folder / "t", HEADER) as writer:
        writer.write("decode", ids_of(HEADER, 1, 9))
    again, reader = read(folder / "t")
    assert not reader.truncated
    assert len(again) == len(records) + 1
    assert np.array_equal(again[-1].ids, ids_of(HEADER, 1, 9))


def test_flush_shows_records_while_the_writer_is_open(tmp_path):
    writer = TraceWriter(tmp_path / "t", HEADER)
    writer.write("decode", ids_of(HEADER, 2))
    writer.flush()
    assert len(read(tmp_path / "t")[0]) == 1
    writer.close()
    writer.close()


def test_zeros_behind_a_crash_are_a_torn_tail(tmp_path):
    write(tmp_path / "t")
    whole = (tmp_path / "t").read_bytes()
    (tmp_path / "t").write_bytes(whole + bytes(100))
    records, reader = read(tmp_path / "t")
    assert len(records) == 3
    assert reader.truncated


def test_damage_before_the_end_is_an_error(tmp_path):
    path = tmp_path / "t"
    write(path)
    whole = bytearray(path.read_bytes())
    first = len(HEADER.to_bytes())
    for at, message in ((first, "no record"), (first + 4, "no record"), (first + RECORD.size, "checksum")):
        damaged = whole.copy()
        damaged[at] ^= 0x40
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=message):
            read(path)
    last = whole.copy()
    last[-1] ^= 0x40
    path.write_bytes(last)
    assert len(read(path)[0]) == 2, "the last record alone may be half written"


def test_an_expert_that_does_not_exist(tmp_path):
    path = tmp_path / "t"
    write(path, TraceHeader(3, 300, 2, "model"))
    whole = path.read_bytes()
    fewer = TraceHeader(3, 299, 2, "model").to_bytes()
    body = whole[len(TraceHeader(3, 300, 2, "model").to_bytes()) :]
    ids = np.full((1, 3, 2), 299, dtype="<u2").tobytes()
    import zlib

    head = RECORD.pack(0x5243_5254, 1, 0, 0, 0, 1, zlib.crc32(ids))
    path.write_bytes(fewer + head + ids + body)
    with pytest.raises(UserError, match="expert 299"):
        read(path)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GGUF",
        MAGIC,
        MAGIC + struct.pack("<I", 2**31),
        MAGIC + struct.pack("<I", 4) + b"nope",
        MAGIC + struct.pack("<I", 2) + b"[]",
        MAGIC + struct.pack("<I", 2) + b"{}",
        MAGIC + struct.pack("<I", 50) + b"{}",
        MAGIC + struct.pack("<I", 62) + b'{"n_layers": 1, "n_experts": "8", "top_k": 2, "model": "m" }  ',
        MAGIC + struct.pack("<I", 3) + b"\xff\xfe\xfd",
    ],
)
def test_files_that_are_no_trace(tmp_path, content):
    (tmp_path / "t").write_bytes(content)
    with pytest.raises(UserError, match="trace"):
        TraceReader(tmp_path / "t")


def test_missing_and_foreign_files(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        TraceReader(tmp_path / "absent")
    with pytest.raises(UserError, match="cannot write"):
        TraceWriter(tmp_path / "absent" / "t", HEADER)
    write(tmp_path / "t")
    with pytest.raises(UserError, match="choose another file"):
        TraceWriter(tmp_path / "t", TraceHeader(3, 300, 2, "other"))
    (tmp_path / "text").write_text("precious")
    with pytest.raises(UserError, match="not a makeway routing trace"):
        TraceWriter(tmp_path / "text", HEADER)
    assert (tmp_path / "text").read_text() == "precious"


def test_ids_of_another_shape_are_refused(tmp_path):
    with TraceWriter(tmp_path / "t", HEADER) as writer:
        for bad in (np.zeros((1, 3, 3), int), np.zeros((3, 2), int), np.full((1, 3, 2), 300), np.full((1, 3, 2), -2)):
            with pytest.raises(ValueError, match="ids"):
                writer.write("decode", bad)
        writer.write("decode", np.zeros((0, 3, 2), int))
    assert read(tmp_path / "t")[0][0].ids.shape == (0, 3, 2)


@pytest.mark.parametrize(
    "fields",
    [(0, 8, 2, "m"), (1, 8, 9, "m"), (1, 65535, 1, "m"), (1, 8, 0, "m"), (1, 8, 2, 5), (2, 8, 2, "m", (1,))],
)
def test_headers_that_are_no_model(fields):
    with pytest.raises(UserError, match="trace header"):
        TraceHeader(*fields)
