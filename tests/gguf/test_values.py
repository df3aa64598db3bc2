import numpy as np
import pytest

from makeway.bench.gguf_writer import Encoder, Typed, write_gguf
from makeway.gguf import ValueType, open_gguf
from makeway.gguf.values import MAX_DEPTH
from tests.gguf.checks import refused

SCALARS = {
    ValueType.U8: (0, 255),
    ValueType.I8: (-128, 127),
    ValueType.U16: (0, 65535),
    ValueType.I16: (-(1 << 15), (1 << 15) - 1),
    ValueType.U32: (0, (1 << 32) - 1),
    ValueType.I32: (-(1 << 31), (1 << 31) - 1),
    ValueType.F32: (-1.5, float(np.float32(1e-6)), float("inf")),
    ValueType.BOOL: (False, True),
    ValueType.STRING: ("", "Ġ中文 \n\0 end", "x" * 70_000),
    ValueType.U64: (0, (1 << 64) - 1),
    ValueType.I64: (-(1 << 63), (1 << 63) - 1),
    ValueType.F64: (0.1, 1e300),
}
DTYPES = ["u1", "i1", "u2", "i2", "u4", "i4", "f4", "?", "u8", "i8", "f8"]
E = Encoder()


def write_value(path, kind, body):
    path.write_bytes(E.header([E.raw_key("the.key", kind, body)]))
    return path


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("kind", list(SCALARS), ids=lambda k: k.name)
def test_scalars_are_exact(tmp_path, kind, version):
    wanted = {f"k{i}": value for i, value in enumerate(SCALARS[kind])}
    typed = {key: Typed(kind, value) for key, value in wanted.items()}
    write_gguf(tmp_path / "m.gguf", typed, {}, version=version)
    with open_gguf(tmp_path / "m.gguf") as file:
        assert dict(file.metadata) == wanted
        assert [type(v) for v in file.metadata.values()] == [type(v) for v in wanted.values()]


@pytest.mark.parametrize("code", DTYPES)
def test_arrays_keep_their_dtype(tmp_path, code):
    dtype = np.dtype(code)
    if dtype.kind in "iu":
        wanted = np.array([np.iinfo(dtype).min, 1, np.iinfo(dtype).max], dtype)
    else:
        wanted = np.array([0, 1, 1], dtype)
    write_gguf(tmp_path / "m.gguf", {"pad": "x", "k": wanted, "none": wanted[:0]}, {})
    with open_gguf(tmp_path / "m.gguf") as file:
        found, empty = file.metadata["k"], file.metadata["none"]
    assert found.dtype == dtype
    assert found.shape == (3,)
    np.testing.assert_array_equal(found, wanted)
    assert not found.flags.writeable
    assert found.flags.aligned
    assert empty.shape == (0,)
    assert empty.dtype == dtype


def test_hash_constants_beyond_a_float_stay_exact(tmp_path):
    constants = [(1 << 64) - 59, (1 << 63) + 1, 25912437101140037]
    write_gguf(tmp_path / "m.gguf", {"k": np.array(constants, np.uint64)}, {})
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.get_ints("k") == tuple(constants)


def test_string_and_nested_arrays_are_lists(tmp_path):
    nested = [np.arange(3, dtype=np.int32), ["a", "ü"], [np.zeros(2, np.float32), []]]
    write_gguf(tmp_path / "m.gguf", {"s": ["Ġt", "", "he"], "n": nested, "last": 1}, {})
    with open_gguf(tmp_path / "m.gguf") as file:
        assert file.metadata["s"] == ["Ġt", "", "he"]
        found = file.metadata["n"]
        assert file.metadata["last"] == 1
    np.testing.assert_array_equal(found[0], nested[0])
    assert found[1] == ["a", "ü"]
    np.testing.assert_array_equal(found[2][0], nested[2][0])
    assert found[2][1] == []


def nest(depth: int) -> bytes:
    return E.pack("IQ", ValueType.ARRAY, 1) * (depth - 1) + E.pack("IQB", ValueType.U8, 1, 7)


def test_depth_is_limited(tmp_path):
    with open_gguf(write_value(tmp_path / "m.gguf", ValueType.ARRAY, nest(MAX_DEPTH))) as file:
        value = file.metadata["the.key"]
    for _ in range(MAX_DEPTH - 1):
        (value,) = value
    assert value.tolist() == [7]
    for depth in (MAX_DEPTH + 1, 100_000):
        path = write_value(tmp_path / "m.gguf", ValueType.ARRAY, nest(depth))
        refused(path, "key 'the.key' nests arrays more than 8 deep", "at byte")


@pytest.mark.parametrize(
    ("kind", "body", "parts"),
    [
        (13, b"", ["key 'the.key' has the unknown value type 13 (at byte 39)"]),
        (0xFFFFFFFF, b"", ["unknown value type 4294967295"]),
        (ValueType.ARRAY, E.pack("IQ", 99, 1), ["the entries of key 'the.key'", "unknown value type 99"]),
        (ValueType.BOOL, b"\x02", ["key 'the.key' is a bool but holds 2 (at byte 43)"]),
        (ValueType.ARRAY, E.pack("IQ", ValueType.BOOL, 3) + b"\0\1\7", ["bools that are not 0 or 1"]),
        (ValueType.STRING, E.string(b"\xc3("), ["key 'the.key' is not UTF-8 text (at byte 51)"]),
        (ValueType.STRING, E.string(b"\xed\xa0\x80"), ["key 'the.key' is not UTF-8 text"]),
        (
            ValueType.ARRAY,
            E.pack("IQ", ValueType.STRING, 2) + E.string("a") + E.string(b"\xff"),
            ["entry 1 of key 'the.key' is not UTF-8 text (at byte 72)"],
        ),
        (ValueType.U64, b"\0" * 7, ["the file ends at byte 50, inside key 'the.key'", "cut short"]),
        (ValueType.STRING, E.pack("Q", 1 << 62), ["key 'the.key' is 4611686018427387904 bytes long"]),
        (ValueType.STRING, E.pack("Q", 1 << 24), ["inside key 'the.key'"]),
    ],
)
def test_bad_values(tmp_path, kind, body, parts):
    refused(write_value(tmp_path / "m.gguf", kind, body), *parts)


@pytest.mark.parametrize("kind", list(ValueType), ids=lambda k: k.name)
@pytest.mark.parametrize("count", [1000, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
def test_absurd_lengths_allocate_nothing(tmp_path, kind, count):
    path = write_value(tmp_path / "m.gguf", ValueType.ARRAY, E.pack("IQ", kind, count) + bytes(100))
    refused(path, "key 'the.key' claims", f"{count} entries", "only 100 bytes follow (at byte 55)")


@pytest.mark.parametrize("kind", list(ValueType), ids=lambda k: k.name)
def test_absurd_lengths_in_a_file_with_room_for_them(tmp_path, kind):
    """A sparse file of 100 GB: zeros are valid empty strings, empty arrays and numbers."""
    path = write_value(tmp_path / "m.gguf", ValueType.ARRAY, E.pack("IQ", kind, 1 << 32))
    with open(path, "r+b") as file:
        file.truncate(100 << 30)
    refused(path, "key 'the.key'", "would make the header larger than 128 MiB")


@pytest.mark.parametrize(("kind", "most"), [(ValueType.STRING, 1 << 22), (ValueType.ARRAY, 1 << 16)])
def test_many_entries_in_a_file_with_room_for_them(tmp_path, kind, most):
    path = write_value(tmp_path / "m.gguf", ValueType.ARRAY, E.pack("IQ", kind, most + 1))
    with open(path, "r+b") as file:
        file.truncate(100 << 30)
    refused(path, f"key 'the.key' claims {most + 1} entries, too many for one header (at most {most})")
