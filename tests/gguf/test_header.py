import pytest

from makeway.bench.gguf_writer import Encoder, write_gguf
from makeway.gguf import GGMLType, open_gguf
from tests.gguf.checks import refused, try_open

E = Encoder()
F32, Q4_K = GGMLType.F32, GGMLType.Q4_K


def write(path, *tensors, data=bytes(4096), keys=(), **counts):
    header = E.header(list(keys), list(tensors), **counts)
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.gguf"


@pytest.mark.parametrize("version", [2, 3])
def test_tensors_in_torch_order(path, version):
    data = {"a": bytes(range(48)), "b": bytes(2 * 144), "c": b"\1\2\3\4", "d": bytes(16)}
    tensors = {
        "a": (F32, (2, 3, 2), data["a"]),
        "b": (Q4_K, (1, 512), data["b"]),
        "c": (F32, (), data["c"]),
        "d": (GGMLType.I64, (1, 1, 2, 1), data["d"]),
    }
    write_gguf(path, {}, tensors, version=version)
    with open_gguf(path) as file:
        assert file.version == version
        assert {n: (t.type, t.shape) for n, t in file.tensors.items()} == {n: (t[0], t[1]) for n, t in tensors.items()}
        assert {n: file.bytes_of(n).tobytes() for n in file.tensors} == data
        assert [t.n_elements for t in file.tensors.values()] == [12, 512, 1, 2]
        assert all(t.name == n and t.path == path for n, t in file.tensors.items())


@pytest.mark.parametrize("alignment", [1, 4, 8, 32, 64, 4096, 1 << 20])
def test_alignment(path, alignment):
    tensors = {n: (F32, (3,), n.encode() * 12) for n in "abc"}
    write_gguf(path, {"k": "x" * 7}, tensors, alignment=alignment)
    with open_gguf(path) as file:
        assert file.alignment == alignment
        assert all(t.offset % alignment == 0 for t in file.tensors.values())
        assert all(file.bytes_of(n).tobytes() == n.encode() * 12 for n in "abc")


@pytest.mark.parametrize("value", [0, 3, 33, -32, 1.5, "32", True, [32]])
def test_alignment_is_a_power_of_two(path, value):
    path.write_bytes(E.header([E.key("general.alignment", value)]))
    refused(path, "key 'general.alignment' must be a power of two, but is")


def test_a_huge_alignment_puts_tensors_out_of_the_file(path):
    write(path, E.tensor("t", [1], F32, 0), keys=[E.key("general.alignment", 1 << 62)])
    refused(path, f"tensor 't' ends at byte {(1 << 62) + 4}, but the file has only")


def test_no_tensors_and_no_metadata(path):
    path.write_bytes(E.header())
    with open_gguf(path) as file:
        assert dict(file.tensors) == {}
        assert dict(file.metadata) == {}


@pytest.mark.parametrize(
    ("head", "hint"),
    [
        (b"GGUE", "give a .gguf file"),
        (b"version https://git-lfs", "Git LFS pointer"),
        (b"PK\x03\x04", "convert the model to GGUF"),
        (b"<!DOCTYPE html>", "web page"),
        (b"\n\n\n\n", "give a .gguf file"),
    ],
)
def test_other_formats(path, head, hint):
    path.write_bytes(head + bytes(100))
    refused(path, "not a GGUF file: it begins with", hint)


def test_big_endian_files_are_named(path):
    write_gguf(path, {"k": 1}, {"t": (F32, (2,), bytes(8))}, byte_order="big")
    refused(path, "this is a big-endian GGUF file", "little-endian")
    path.write_bytes(b"FUGG" + path.read_bytes()[4:])
    refused(path, "this is a big-endian GGUF file")


@pytest.mark.parametrize("version", [0, 1, 4, 0x10003, 0xFFFFFFFF])
def test_unsupported_versions(path, version):
    path.write_bytes(E.header(version=version))
    refused(path, f"GGUF version {version} is not supported, only 2 and 3 (at byte 4)")


@pytest.mark.parametrize("count", [1, 2, 1 << 20, 1 << 32, 1 << 62, (1 << 64) - 1])
def test_absurd_counts(path, count):
    path.write_bytes(E.header(n_keys=count) + b"\0" * 5)
    refused(path, f"the metadata claims {count} entries of at least 14 bytes, but only 5 bytes follow (at byte 24)")
    path.write_bytes(E.header(n_tensors=count))
    refused(path, f"the tensor list claims {count} entries", "only 0 bytes follow")


@pytest.mark.parametrize("which", ["n_keys", "n_tensors"])
@pytest.mark.parametrize("count", [1000, 1 << 20, 1 << 35])
def test_absurd_counts_in_a_file_with_room_for_them(path, which, count):
    path.write_bytes(E.header(**{which: count}))
    with open(path, "r+b") as file:
        file.truncate(1 << 40)
    part = "has an empty name" if count == 1000 else "too many for one header (at most 262144)"
    refused(path, part if count <= 1 << 20 else "larger than 128 MiB")


def test_duplicates_and_empty_names(path):
    path.write_bytes(E.header([E.key("a", 1), E.key("b", 1), E.key("a", 2)]))
    refused(path, "key 'a' appears twice (at byte 58)")
    write(path, E.tensor("t", [1], F32, 0), E.tensor("t", [1], F32, 32))
    refused(path, "tensor 't' is listed twice (at byte 57)")
    path.write_bytes(E.header([E.key("", 1), E.key("b", 1)]))
    refused(path, "metadata key 0 of 2 has an empty name (at byte 24)")
    write(path, E.tensor("", [1], F32, 0))
    refused(path, "tensor 0 of 1 has an empty name (at byte 24)")


def test_names_are_short_text(path):
    path.write_bytes(E.header([E.key("k" * 65536, 1)]))
    refused(path, "the name of metadata key 0 of 1 is 65536 bytes long, at most 65535 are allowed")
    path.write_bytes(E.header([E.key(b"\xff\xfe", 1)]))
    refused(path, "the name of metadata key 0 of 1 is not UTF-8 text (at byte 32)")
    write(path, E.tensor(b"\xff\xfe", [1], F32, 0))
    refused(path, "the name of tensor 0 of 1 is not UTF-8 text (at byte 32)")
    path.write_bytes(E.header([E.raw_key("two\nlines" * 1000, 99, b"")]))
    refused(path, r"key 'two\nlines", "...' has the unknown value type 99")


@pytest.mark.parametrize(
    ("dims", "ggml_type", "part"),
    [
        ([1] * 5, F32, "tensor 't' has 5 dims, at most 4 are allowed (at byte 24)"),
        ([1] * 1000, F32, "tensor 't' has 1000 dims"),
        ([0], F32, "tensor 't' has a zero or negative dim: [0]"),
        ([4, 0], F32, "tensor 't' has a zero or negative dim: [4, 0]"),
        ([1 << 63], F32, "negative dim: [-9223372036854775808]"),
        ([(1 << 64) - 1, 2], F32, "negative dim: [-1, 2]"),
        ([1 << 32, 1 << 31], F32, "tensor 't' has too many elements"),
        ([1 << 62, 1 << 62, 1 << 62, 1 << 62], Q4_K, "too many elements"),
        ([1 << 62], F32, "tensor 't' ends at byte"),
        ([640], Q4_K, "tensor 't' has rows of 640 elements, no multiple of 256, the block of its type Q4_K"),
        ([1, 256], Q4_K, "rows of 1 elements"),
        ([], Q4_K, "rows of 1 elements"),
        ([31], GGMLType.Q8_0, "no multiple of 32"),
        ([32], 43, "tensor 't' has the unknown type number 43, so its size is unknown (at byte 24)"),
        ([32], 0xFFFFFFFF, "unknown type number 4294967295"),
        ([32], 4, "tensor 't' has type Q4_2 (4), which ggml has removed"),
        ([32], 33, "tensor 't' has type Q4_0_8_8 (33), which ggml has removed"),
    ],
)
def test_bad_dims_and_types(path, dims, ggml_type, part):
    refused(write(path, E.tensor("t", dims, ggml_type, 0)), part)


def test_n_dims_without_dims(path):
    path.write_bytes(E.header([], [E.string("t" * 99) + E.pack("I", 0xFFFFFFFF)]))
    refused(path, "has 4294967295 dims")


@pytest.mark.parametrize(
    ("offsets", "part"),
    [
        ((0, 33), "tensor 'b' has offset 33, no multiple of the alignment 32"),
        ((0, 0), "inside tensor"),
        ((0, 32), "tensor 'b' begins at byte 128, inside tensor 'a', which ends at byte 196"),
        ((64, 0), "tensor 'a' begins at byte 160, inside tensor 'b', which ends at byte 196"),
        ((0, 4096), "tensor 'b' ends at byte 4292, but the file has only 4192 bytes"),
        ((0, 4000), "tensor 'b' ends at byte 4196, but the file has only 4192 bytes"),
        ((1 << 63, 0), "tensor 'a' ends at byte"),
        (((1 << 64) - 32, 0), "tensor 'a' ends at byte 18446744073709551780"),
    ],
)
def test_bad_offsets(path, offsets, part):
    entries = [E.tensor(n, [25], F32, offset) for n, offset in zip("ab", offsets, strict=True)]
    refused(write(path, *entries), part)


def test_tensors_need_no_order_and_the_last_no_padding(path):
    write(path, E.tensor("a", [8], F32, 64), E.tensor("b", [1], F32, 0), data=bytes(64 + 32))
    with open_gguf(path) as file:
        assert file.tensors["a"].offset == file.tensors["b"].offset + 64
        assert file.tensors["a"].offset + 32 == file.n_bytes


def test_cut_short_anywhere(path):
    metadata = {"general.alignment": 8, "s": "text", "a": [1, 2], "t": ["one", "two"], "n": [[1], ["x"]], "f": 1.5}
    tensors = {"first": (F32, (2, 2), bytes(16)), "second": (GGMLType.Q8_0, (32,), bytes(34))}
    write_gguf(path, metadata, tensors, alignment=8)
    data = path.read_bytes()
    with open_gguf(path) as file:
        stop = file.tensors["second"].offset + 34
    assert stop <= len(data)
    for n in range(len(data)):
        path.write_bytes(data[:n])
        message = try_open(path)
        if n >= stop:
            assert message is None, "only padding is gone"
        else:
            assert message is not None
            assert "empty" in message or "cut short" in message
