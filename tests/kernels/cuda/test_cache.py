"""Compiled kernels on disk: what was written is read; a folder that cannot be used is no cache."""

from pathlib import Path

from makeway.kernels.cuda import cache


def test_what_was_written_is_read(tmp_path):
    folder = tmp_path / "not" / "yet"
    assert cache.read(folder, "key") is None
    cache.write(folder, "key", b"first")
    cache.write(folder, "key", b"second")
    assert cache.read(folder, "key") == b"second"
    assert [path.name for path in folder.iterdir()] == ["key"]


def test_a_folder_that_cannot_be_used_is_no_cache(tmp_path):
    (tmp_path / "file").write_text("in the way")
    cache.write(tmp_path / "file", "key", b"bytes")
    assert cache.read(tmp_path / "file", "key") is None
    (tmp_path / "folder" / "key").mkdir(parents=True)
    cache.write(tmp_path / "folder", "key", b"bytes")
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["key"]


def test_the_users_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.default_folder() == tmp_path / "makeway" / "kernels"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative, so not valid")
    assert cache.default_folder() == Path.home() / ".cache" / "makeway" / "kernels"
