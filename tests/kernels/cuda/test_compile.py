"""Every kernel in CUDA C++ builds for an RTX 3090 and a Hopper GPU, without spilling."""

import importlib.util

import pytest

from makeway.kernels.cuda import FOLDER, all_kernels
from makeway.kernels.cuda.compiler import Module

MOST_SHARED = 99 * 1024  # of sm_86

pytestmark = pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="cuda-bindings is not installed")


@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("program", all_kernels(), ids=lambda program: program[0][0].stem)
def test_every_kernel_compiles(program, arch, tmp_path):
    files, names = program
    module = Module.compile(files, names, arch, cache_folder=tmp_path)
    for name in names:
        needs = module.resources[name]
        assert needs.shared_bytes <= MOST_SHARED, name
        assert needs.spill_bytes == 0, f"{name}: {needs}"


def test_every_file_is_in_the_list():
    listed = {path for files, _ in all_kernels() for path in files}
    assert set(FOLDER.glob("*.cu")) == listed
