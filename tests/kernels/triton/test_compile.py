"""Every decode kernel builds for an RTX 3090 and a Hopper GPU, within the shared memory that a block may have."""

import json
import os
import subprocess
import sys

import pytest

from tests.conftest import ROOT

MOST_SHARED = 99 * 1024  # of sm_86


def _compiled(which, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    result = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.compile_kernels", which],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-4000:]
    return json.loads(result.stdout)


def _check(found, n_least):
    assert {kernel["arch"] for kernel in found} == {86, 90}
    assert len(found) >= n_least
    too_large = [kernel for kernel in found if kernel["shared"] > MOST_SHARED]
    assert not too_large


def test_some_kernels_of_each_kind_compile(tmp_path):
    _check(_compiled("quick", tmp_path), 5)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_kernel_compiles_for_every_type(tmp_path):
    _check(_compiled("all", tmp_path), 100)
