"""Stage 2: packages -> `work/corpus.jsonl`: clean documents, deduplicated, each marked train or held-out.

Owns the split (1 document in 80, by a hash of its name). Hazard: a held-out document must not be repeated in training,
so paragraphs are deduplicated over everything before the split.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import unicodedata
from collections import Counter

from tools.demo_model.fetch import WORK, folder_of
from tools.demo_model.readers import documents, unpack
from tools.demo_model.sources import SOURCES, Source

HELD_OUT = 80


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def take(source: Source, seen: set[bytes]) -> list[dict[str, str | bool]]:
    """The documents of one source, in the order of their names' hashes, up to its cap."""
    archives = sorted(folder_of(source).glob("*"))
    if not archives:
        return []
    scratch = WORK / "unpacked"
    unpack(archives[0], scratch)
    found = sorted(documents(source, scratch), key=lambda d: _digest(source.name + d[0]))
    shutil.rmtree(scratch)
    out: list[dict[str, str | bool]] = []
    room = int(source.cap_mb * 1e6)
    for name, text in found:
        parts = []
        for part in unicodedata.normalize("NFC", text).split("\n\n"):
            mark = _digest(" ".join(part.split()))
            if len(part) < 60 or mark not in seen:
                parts.append(part)
            if len(part) >= 60:
                seen.add(mark)
        text = "\n\n".join(parts).strip("\n")
        if len(text) < 400:
            continue
        if len(text) > room:
            break
        room -= len(text)
        held = int.from_bytes(_digest("split" + source.name + name)[:4], "big") % HELD_OUT == 0
        out.append({"source": source.name, "kind": source.kind, "name": name, "held": held, "text": text})
    return out


def main() -> None:
    seen: set[bytes] = set()
    sizes: Counter[str] = Counter()
    with (WORK / "corpus.jsonl").open("w") as f:
        for source in SOURCES:
            docs = take(source, seen)
            for doc in docs:
                f.write(json.dumps(doc) + "\n")
                sizes["held" if doc["held"] else "train"] += len(str(doc["text"]))
            total = sum(len(str(d["text"])) for d in docs)
            sizes[source.kind] += total
            print(f"{source.name:28} {len(docs):6} documents {total / 1e6:7.2f} MB", flush=True)
    print(dict(sizes))


if __name__ == "__main__":
    main()
