"""Every prefill kernel compiles ahead of time, for an RTX 3090 (sm_86) within its shared memory, and for sm_90."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

SHARED_BYTES = {86: 99 * 1024, 90: 227 * 1024}


def compile_all(which):
    """What the program compiled, in a process of its own where kernels are not interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.kernels.triton.compile_prefill", which]
    run = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280)
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


def check(found, n_least):
    assert len(found) >= n_least
    for kernel in found:
        assert kernel["shared"] <= SHARED_BYTES[kernel["arch"]], kernel


def test_the_largest_kernels_fit_an_rtx_3090():
    check(compile_all("quick"), 5)


@pytest.mark.slow
def test_all_kernels_compile_for_both_architectures():
    found = compile_all("all")
    check(found, 50)
    assert {kernel["arch"] for kernel in found} == {86, 90}
