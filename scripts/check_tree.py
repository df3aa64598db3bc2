"""Checks of the tree that no linter makes: file sizes, and generated documents that are out of date."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MAX_LINES = 500  # about 300 is the aim; over this a file has outgrown its room
GENERATED = {"docs/cli.md": "docs_cli.py", "docs/phases.md": "docs_phases.py"}


def too_long() -> list[str]:
    sources = (p for d in ("src", "tests", "bench", "tools", "scripts") for p in (ROOT / d).rglob("*.py"))
    counts = ((p, len(p.read_text(encoding="utf-8").splitlines())) for p in sources)
    return [f"{p.relative_to(ROOT)}: {n} lines, at most {MAX_LINES}" for p, n in counts if n > MAX_LINES]


def out_of_date() -> list[str]:
    faults = []
    for document, script in GENERATED.items():
        made_by = ROOT / "scripts" / script
        if not made_by.exists():
            continue
        text = subprocess.run([sys.executable, made_by], check=True, capture_output=True, text=True, cwd=ROOT).stdout
        path = ROOT / document
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            faults.append(f"{document}: out of date; run: python scripts/{script} > {document}")
    return faults


if __name__ == "__main__":
    faults = too_long() + out_of_date()
    print("\n".join(faults) if faults else "tree: ok")
    sys.exit(1 if faults else 0)
