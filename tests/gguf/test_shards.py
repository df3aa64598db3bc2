import os
import shutil

import pytest

from makeway.bench.gguf_writer import Typed, shard_path, write_gguf
from makeway.errors import UserError
from makeway.gguf import GGMLType, ValueType, open_gguf
from makeway.gguf import shards as shards_module
from tests.gguf.checks import check_tensors, refused

F32 = GGMLType.F32
TENSORS = {f"blk.{i}.w": (F32, (2, i + 1), bytes([i + 1]) * (8 * (i + 1))) for i in range(5)}
METADATA = {"general.architecture": "qwen4exp", "k": 1}


@pytest.fixture
def shards(tmp_path):
    return write_gguf(tmp_path / "model.gguf", METADATA, TENSORS, split=(0, 2, 3))


def split_keys(number, count, n_tensors):
    keys = {"split.no": number, "split.count": count, "split.tensors.count": n_tensors}
    return {k: Typed(ValueType.U32, v) for k, v in keys.items() if v is not None}


@pytest.mark.parametrize("given", [0, 1, 2])
@pytest.mark.parametrize("split", [(0, 2, 3), (5, 0, 0), (2, 3, 0), (1, 1, 3)])
def test_any_shard_opens_the_set(tmp_path, given, split):
    paths = write_gguf(tmp_path / "model.gguf", METADATA, TENSORS, split=split)
    with open_gguf(paths[given]) as file:
        assert file.paths == tuple(paths)
        assert list(file.tensors) == list(TENSORS)
        assert file.metadata["k"] == 1
        assert file.get_int("split.no") == 0
        assert file.n_bytes == sum(p.stat().st_size for p in paths)
        for name, (_, shape, data) in TENSORS.items():
            info = file.tensors[name]
            assert info.shape == shape
            assert file.bytes_of(name).tobytes() == data
            assert info.path.read_bytes()[info.offset : info.offset + info.n_bytes] == data
        check_tensors(file)


def test_paths_of_other_kinds(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_gguf("a-00001-of-00007-b.gguf", {}, TENSORS, split=(3, 2))
    with open_gguf("a-00001-of-00007-b-00002-of-00002.gguf") as file:
        assert len(file.tensors) == 5
    write_gguf("one.gguf", {"split.count": 0}, TENSORS)
    with open_gguf("one.gguf") as file:
        assert len(file.paths) == 1
    write_gguf("two.gguf", split_keys(0, 1, 5), TENSORS)
    with open_gguf("two.gguf") as file:
        assert len(file.paths) == 1
    os.rename("two.gguf", "two-00001-of-00001.gguf")
    with open_gguf("two-00001-of-00001.gguf") as file:
        assert len(file.paths) == 1
    write_gguf("three-00001-of-00001.gguf", {}, TENSORS)
    with open_gguf("three-00001-of-00001.gguf") as file:
        assert len(file.paths) == 1


def test_shards_behind_links(tmp_path, shards):
    """Download caches keep the data under other names and link to it."""
    folder = tmp_path / "links"
    folder.mkdir()
    for i, path in enumerate(shards):
        blob = path.rename(tmp_path / f"blob{i}")
        (folder / path.name).symlink_to(blob)
    with open_gguf(folder / shards[1].name) as file:
        assert len(file.tensors) == 5


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_shard_is_named(shards, lost):
    shards[lost].unlink()
    given = shards[(lost + 1) % 3]
    refused(given, f"shard {lost + 1} of 3 is missing: {shards[lost]}")
    shards[lost].symlink_to("nowhere")
    refused(given, f"shard {lost + 1} of 3 is missing")


def test_several_missing_shards_are_counted(shards):
    shards[0].unlink()
    shards[1].unlink()
    refused(shards[2], f"shard 1 of 3 is missing: {shards[0]} (and 1 more)")


def test_a_renamed_shard(tmp_path, shards):
    shards[1].rename(tmp_path / "other.gguf")
    refused(tmp_path / "other.gguf", "it is shard 2 of 3, so its name must end in -00002-of-00003.gguf")
    shutil.copy(shards[2], shards[1])
    refused(shards[1], "it is shard 3 of 3, so its name must end in -00003-of-00003.gguf")
    with pytest.raises(
        UserError, match=r"model-00002-of-00003\.gguf: it should be shard 2 of 3, but its keys say shard 3"
    ):
        open_gguf(shards[0])


def test_a_shard_name_without_split_keys(tmp_path):
    path = tmp_path / "m-00002-of-00003.gguf"
    write_gguf(path, METADATA, TENSORS)
    refused(path, "its name says that it is one of 3 shards, but it has no key 'split.count'")


def test_a_damaged_shard_is_named(shards):
    data = shards[2].read_bytes()
    shards[2].write_bytes(data[:-40])
    with pytest.raises(UserError) as error:
        open_gguf(shards[0])
    assert str(error.value).startswith(f"{shards[2]}: tensor 'blk.4.w' ends at byte")


@pytest.mark.parametrize(
    ("first", "second", "part"),
    [
        ((0, 2, 2), (1, 3, 2), "should be shard 2 of 2, but its keys say shard 2 of 3"),
        ((0, 2, 2), (0, 2, 2), "should be shard 2 of 2, but its keys say shard 1 of 2"),
        ((0, 2, 2), (1, 2, 3), "its 'split.tensors.count' differs from the first shard's 2"),
        ((0, 2, 3), (1, 2, 3), "says 3 tensors, but the 2 shards hold 2"),
        ((0, 2, 2), (None, None, None), "its keys say no shard at all"),
        ((0, 2, None), (1, 2, 2), "key 'split.tensors.count' is missing"),
        ((None, 2, 2), (1, 2, 2), "key 'split.no' is missing"),
        ((2, 2, 2), (1, 2, 2), "'split.no' 2 and 'split.count' 2 contradict each other"),
        ((0, 4294967295, 2), (1, 2, 2), "contradict"),
        ((0, 3, 2), (1, 2, 2), "it is shard 1 of 3, so its name must end in"),
    ],
)
def test_inconsistent_split_values(tmp_path, first, second, part):
    paths = [shard_path(tmp_path / "m.gguf", i + 1, 2) for i in range(2)]
    for path, keys, name in zip(paths, (first, second), "ab", strict=True):
        write_gguf(path, split_keys(*keys), {name: (F32, (1,), bytes(4))})
    with pytest.raises(UserError) as error:
        open_gguf(paths[0])
    assert part in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_shards_of_different_models(tmp_path):
    for i, (name, architecture) in enumerate([("a", "qwen3moe"), ("b", "qwen4exp")]):
        metadata = {"general.architecture": architecture, **split_keys(i, 2, 2)}
        write_gguf(shard_path(tmp_path / "m.gguf", i + 1, 2), metadata, {name: (F32, (1,), bytes(4))})
    with pytest.raises(UserError, match="its architecture 'qwen4exp' differs from the first shard's"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")


def test_a_tensor_in_two_shards(tmp_path):
    for i in range(2):
        write_gguf(shard_path(tmp_path / "m.gguf", i + 1, 2), split_keys(i, 2, 2), {"t": (F32, (1,), bytes(4))})
    with pytest.raises(UserError, match=r"00002\.gguf: tensor 't' is also in m-00001-of-00002\.gguf"):
        open_gguf(tmp_path / "m-00002-of-00002.gguf")


def test_split_keys_of_a_wrong_kind(tmp_path):
    write_gguf(tmp_path / "m.gguf", {"split.count": "two"}, {})
    refused(tmp_path / "m.gguf", "key 'split.count' should hold an integer, but is the string 'two'")


def test_paths_that_are_no_file(tmp_path, monkeypatch):
    refused(tmp_path, "this is a directory", "give the .gguf file")
    refused(tmp_path / "none.gguf", "no such file", "check the path")
    (tmp_path / "empty.gguf").touch()
    refused(tmp_path / "empty.gguf", "the file is empty")
    os.mkfifo(tmp_path / "pipe.gguf")
    refused(tmp_path / "pipe.gguf", "not a regular file")
    (tmp_path / "loop.gguf").symlink_to(tmp_path / "loop.gguf")
    refused(tmp_path / "loop.gguf", "cannot be opened: ")
    refused(tmp_path / ("n" * 300 + ".gguf"), "cannot be opened: ")
    (tmp_path / "file").touch()
    refused(tmp_path / "file" / "m.gguf", "cannot be opened: ")
    with pytest.raises(UserError, match="not a regular file"):
        open_gguf("/dev/null")
    with pytest.raises(UserError, match=r"a\\x00b: cannot be opened: "):
        open_gguf("a\0b")
    for path in ("", "two\nlines.gguf", "\udcff.gguf"):
        with pytest.raises(UserError) as error:
            open_gguf(path)
        assert str(error.value).isprintable()


def test_no_permission(tmp_path, monkeypatch):
    """Also when the tests run as root, whom no mode keeps out."""
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, {})

    def denied(*_args, **_kwargs):
        raise PermissionError(13, "Permission denied", str(path))

    if os.geteuid() != 0:
        path.chmod(0)
        refused(path, "no permission to read it")
        path.chmod(0o600)
    monkeypatch.setattr(shards_module, "open", denied, raising=False)
    refused(path, "no permission to read it")


def test_a_read_error_of_the_system(tmp_path, monkeypatch):
    path = tmp_path / "m.gguf"
    write_gguf(path, {}, {})

    def broken(*_args, **_kwargs):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(shards_module, "open", broken, raising=False)
    refused(path, "cannot be opened: Too many open files")


def test_nothing_stays_open_after_a_refusal(shards):
    def n_open() -> int:
        return len(os.listdir("/proc/self/fd"))

    if not os.path.isdir("/proc/self/fd"):
        pytest.skip("the system does not list open files")
    shards[2].write_bytes(b"GGUF")
    before = n_open()
    for _ in range(5):
        with pytest.raises(UserError):
            open_gguf(shards[0])
    assert n_open() == before
