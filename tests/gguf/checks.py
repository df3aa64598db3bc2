"""What every test of the reader asks of a file: it opens with sound tensors, or it ends in one good UserError.

Owns the bounds on time, memory and message of a refusal. Hazard: tracemalloc sees Python's and numpy's
allocations; a mapping is not one, and is not meant to be.
"""

import time
import tracemalloc
from pathlib import Path

from makeway.errors import UserError
from makeway.gguf import GGUFFile, open_gguf

PEAK_BYTES = 4 << 20
LIMIT_S = 2.0


def refused(path: Path, *parts: str) -> str:
    """Opens `path`, which must be refused in one line that names the file and holds all `parts`."""
    message = try_open(path)
    assert message is not None, "it opened"
    for part in parts:
        assert part in message, f"{part!r} is not in {message!r}"
    return message


def try_open(path: Path, *, peak_bytes: int = PEAK_BYTES) -> str | None:
    """Opens `path`: None when it opens (its tensors are checked), else the message of the UserError."""
    own_trace = not tracemalloc.is_tracing()
    if own_trace:
        tracemalloc.start()
    tracemalloc.reset_peak()
    before = tracemalloc.get_traced_memory()[0]
    start = time.perf_counter()
    message = None
    try:
        with open_gguf(path) as file:
            check_tensors(file)
    except UserError as error:
        message = str(error)
    finally:
        took = time.perf_counter() - start
        peak = tracemalloc.get_traced_memory()[1] - before
        if own_trace:
            tracemalloc.stop()
    assert took < LIMIT_S, f"it took {took:.1f} s"
    assert peak < peak_bytes, f"it allocated {peak} bytes"
    if message is not None:
        assert message.isprintable(), "a message is one printable line"
        assert str(path) in message
        assert len(message) < 1500
        assert "; " in message, "a message says what to do"
    return message


def check_tensors(file: GGUFFile) -> None:
    """Every tensor lies in its file, aligned, apart from the others, and its view has the right size."""
    for path in file.paths:
        stop = 0
        own = [t for t in file.tensors.values() if t.path == path]
        for info in sorted(own, key=lambda t: t.offset):
            assert info.offset >= stop
            assert info.n_bytes > 0
            stop = info.offset + info.n_bytes
            view = file.bytes_of(info.name)
            assert view.nbytes == info.n_bytes
            assert not view.flags.writeable
            assert not view.flags.owndata
        assert stop <= path.stat().st_size
