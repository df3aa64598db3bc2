"""The session script: which steps it runs, with what, how they are limited, and what it packs. `makeway` is a stub."""

import subprocess
import tarfile

import pytest

from tests.conftest import ROOT

# Writes a result where --results says.
STUB = """#!/usr/bin/env bash
if [ "$2" != "from makeway.cli import main; main()" ]; then exit {imports}; fi
shift 2
echo "ran: $*"
while [ $# -gt 0 ]; do if [ "$1" = --results ]; then folder=$2; fi; shift; done
echo '{{}}' > "$folder/link-1.json"
{then}
"""


@pytest.fixture
def session(tmp_path):
    def run(*arguments, then="exit 0", imports=0):
        python = tmp_path / "python"
        python.write_text(STUB.format(then=then, imports=imports))
        python.chmod(0o755)
        out = tmp_path / "out"
        out.mkdir(exist_ok=True)
        return subprocess.run(
            [ROOT / "bench" / "gpu_session.sh", "--python", python, *arguments],
            capture_output=True, text=True, timeout=60, check=False, env={"PATH": "/usr/bin:/bin", "OUT": str(out)},
        )  # fmt: skip

    return run


def test_steps_run_in_order_with_the_measured_rates(session, tmp_path):
    done = session("link", "decode-30b", "prefill-flash48")
    assert done.returncode == 0, done.stderr
    ran = [line.split() for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert [words[2] for words in ran] == ["link", "decode", "prefill"]
    assert "--rates" not in ran[0]
    for words in ran[1:]:
        assert words[words.index("--rates") + 1].endswith("link-1.json")
        assert "--allow-reference" in words
    assert ran[1][ran[1].index("--slots") + 1] == "81"
    with tarfile.open(tmp_path / "out" / "session.tar.gz") as packed:
        assert {"./session.log", "./link-1.json"} <= set(packed.getnames())


def test_every_step_has_arguments_that_makeway_knows(session):
    done = session(then="exit 0")
    ran = [line.split()[1:] for line in done.stdout.splitlines() if line.startswith("ran: ")]
    assert len(ran) == 12
    for words in ran:
        command = bench_command(words[1])
        known = {flag for parameter in command.params for flag in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= known


def bench_command(name):
    from typer.main import get_command

    from makeway.cli import bench_app

    return get_command(bench_app).commands[name]


def test_a_step_that_fails_does_not_stop_the_others(session):
    done = session("link", "decode-30b", then="exit 3")
    assert done.returncode == 2
    assert done.stdout.count("status 3") == 2


def test_a_step_for_which_no_time_is_left_is_not_run(session):
    # 20 seconds are the least that a step gets.
    done = session("--within", "20", "link", "decode-30b", then="sleep 1; exit 0")
    assert "status 0" in done.stdout
    assert "== decode-30b: not run" in done.stdout
    assert done.returncode == 1


def test_what_cannot_run_is_refused(session):
    assert "there is no step huge" in session("huge").stderr
    assert "unknown option --all" in session("--all").stderr
    missing = session("link", imports=1)
    assert missing.returncode == 2
    assert "packages are missing" in missing.stderr
