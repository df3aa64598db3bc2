# Sourced by the other scripts: makes .venv beside the checkout's root when it is missing or out of date,
# installs makeway with the extras given as arguments, and puts it on PATH.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
cd "$root"

makeway_setup() { # extras...
    local extras stamp python
    extras="$(IFS=,; echo "$*")"
    python="${PYTHON:-python3}"
    stamp=".venv/.makeway-$(cat pyproject.toml scripts/setup.sh | cksum | cut -d' ' -f1)-${extras//,/-}"
    if [ ! -e "$stamp" ]; then
        [ -x .venv/bin/python ] || "$python" -m venv .venv
        echo "setting up .venv (once; torch is the large part) ..." >&2
        # A machine without an NVIDIA driver needs no CUDA libraries: take the pinned release, whose CPU build is small.
        .venv/bin/python -c "import torch" 2>/dev/null || .venv/bin/python -m pip install -q --disable-pip-version-check torch==2.13.0
        .venv/bin/python -m pip install -q --disable-pip-version-check -e ".${extras:+[$extras]}"
        touch "$stamp"
    fi
    export PATH="$root/.venv/bin:$PATH"
}
