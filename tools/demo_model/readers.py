"""Archives to documents: unpacks a package in memory-sized steps and yields clean text by file.

Owns the cleaning rules; no state. Hazard: everything here decides what the model sees, so it is deterministic.
"""

from __future__ import annotations

import gzip
import html
import re
import shutil
import subprocess
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.demo_model.sources import Source

_DROP = re.compile(r"<(script|style|nav|head|footer|header|svg|form)\b.*?</\1>", re.S | re.I)
_NAV = re.compile(
    r'<div[^>]*(?:class|role|id)="[^"]*(?:navheader|navfooter|related|sphinxsidebar|navigation)[^"]*".*?</div>', re.S
)
_BLOCK = re.compile(r"</?(?:p|div|h[1-6]|li|ul|ol|dl|dt|dd|tr|table|br|section|blockquote|pre|article)\b[^>]*>", re.I)
_TAG = re.compile(r"<[^>]*>")
_PRE = re.compile(r"<pre\b[^>]*>(.*?)</pre>", re.S | re.I)
_SKIP_PYTHON = ("/tests/", "/test/", "/locale/", "/migrations/", "_pb2", "/_vendor/", "/vendored/", "/testing/data")


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks one .deb, wheel, sdist or npm tarball."""
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    if archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(folder)], check=True)
    elif archive.suffix in (".whl", ".zip"):
        with zipfile.ZipFile(archive) as z:
            z.extractall(folder)
    else:
        with tarfile.open(archive) as t:
            t.extractall(folder, filter="data")


def _decode(path: Path) -> str:
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")


def clean_html(text: str) -> str:
    """Readable text; preformatted blocks keep their line breaks."""
    text = _NAV.sub(" ", _DROP.sub(" ", text))
    kept: list[str] = []

    def keep(match: re.Match[str]) -> str:
        kept.append(html.unescape(_TAG.sub("", match.group(1))).strip("\n"))
        return f"\n\n\x00{len(kept) - 1}\x00\n\n"

    text = _PRE.sub(keep, text)
    text = re.sub(r"\s+", " ", text)
    text = _BLOCK.sub("\n\n", text)
    text = re.sub("(\x00[0-9]+\x00)", lambda m: f"\n\n{m.group(1)}\n\n", text)
    text = html.unescape(_TAG.sub("", text)).replace("¶", "").replace("\xa0", " ")
    lines = (line.strip() for line in text.split("\n"))
    text = "\n\n".join(line for line in lines if line)
    return re.sub(r"\x00(\d+)\x00", lambda m: kept[int(m.group(1))], text)


def _entries(text: str) -> Iterator[str]:
    """A dictionary in pieces of some 6,000 characters, cut where an entry starts."""
    piece: list[str] = []
    size = 0
    for line in text.split("\n"):
        if size > 6000 and line and not line[0].isspace():
            yield "\n".join(piece)
            piece, size = [], 0
        piece.append(line.rstrip())
        size += len(line)
    yield "\n".join(piece)


def good(text: str, kind: str) -> bool:
    """Long enough, mostly ASCII, not a table of numbers."""
    if len(text) < 400 or len(text) > 400_000:
        return False
    sample = text[:20_000]
    if sum(c > "~" for c in sample) > 0.03 * len(sample):
        return False
    letters = sum(c.isalpha() for c in sample) / len(sample)
    longest = max(map(len, text.split("\n")))
    return letters > (0.4 if kind == "python" else 0.5) and (kind != "python" or longest < 400)


def documents(source: Source, folder: Path) -> Iterator[tuple[str, str]]:
    """(path inside the package, text) of every usable file, in path order."""
    suffixes = {
        "html": (".html", ".htm", ".en", ".page"),
        "text": (".txt", ".gz"),
        "python": (".py",),
        "dict": (".dz",),
        "factbook": (".json",),
    }[source.kind]
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or not path.is_file() or path.suffix not in suffixes or source.under not in f"/{name}":
            continue
        if source.kind == "python" and any(part in f"/{name}" for part in _SKIP_PYTHON):
            continue
        if any(part in name for part in ("genindex", "search.html", "changelog", "copyright", "dist-info")):
            continue
        if source.kind == "factbook":
            continue
        text = _decode(path).replace("\r\n", "\n").replace("\x0c", "")
        if source.kind == "html":
            text = clean_html(text)
        pieces = _entries(text) if source.kind == "dict" else iter([text])
        for i, piece in enumerate(pieces):
            piece = re.sub(r"\n{3,}", "\n\n", re.sub(r"[ \t]+\n", "\n", piece)).strip()
            if good(piece, source.kind):
                yield f"{name}#{i}", piece
