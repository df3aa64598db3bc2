"""Compiled kernels on disk, in the user's cache folder, so that a second start does not compile.

Owns the files there; never decides what a key holds, and never fails: a folder that cannot be written is no cache.
Hazard: two processes may write one entry at once, so an entry appears by a rename and is never changed.
"""

import os
import tempfile
from pathlib import Path


def default_folder() -> Path:
    """`makeway/kernels` in XDG_CACHE_HOME, or in ~/.cache (XDG Base Directory Specification)."""
    named = os.environ.get("XDG_CACHE_HOME", "")
    base = Path(named) if Path(named).is_absolute() else Path("~/.cache").expanduser()
    return base / "makeway" / "kernels"


def read(folder: Path, key: str) -> bytes | None:
    """The entry's bytes, or None."""
    try:
        return (folder / key).read_bytes()
    except OSError:
        return None


def write(folder: Path, key: str, entry: bytes) -> None:
    """Adds an entry where the folder can be written."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=folder)
    except OSError:
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(entry)
        Path(name).replace(folder / key)
    except OSError:
        Path(name).unlink(missing_ok=True)
