"""How a bad GGUF file is reported: one line with what, where (file, byte, key or tensor) and what to do.

Owns the wording helpers; never raises by itself and never reads a file.
Hazard: names come from an untrusted file; `show` is what keeps line breaks, control characters and
kilobytes of noise out of a message.
"""

from pathlib import Path

from makeway.errors import UserError

DAMAGED = "the file is damaged: download or convert it again"
TRUNCATED = "the file is cut short: download or copy it again"


def show(text: str | Path, limit: int = 120) -> str:
    """`text` on one printable line of at most about `limit` characters (paths: pass a larger limit)."""
    text = str(text)
    if len(text) > limit:
        text = text[:limit] + "..."
    return text if text.isprintable() else ascii(text)[1:-1]


def fault(path: str | Path, what: str, *, at: int | None = None, do: str = DAMAGED) -> UserError:
    """The error for `path`: `what` happened `at` that byte offset, and what to `do` about it."""
    where = "" if at is None else f" (at byte {at})"
    return UserError(f"{show(path, 4096)}: {what}{where}; {do}")
