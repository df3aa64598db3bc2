"""Every kernel in CUDA C++ builds for an RTX 3090 and a Hopper GPU, and keeps its values in registers."""

import pytest

from makeway.kernels.cuda import FOLDER, all_kernels
from makeway.kernels.cuda.compiler import Module

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")

MOST_SHARED = 99 * 1024  # of a block on sm_86


def check(program, arch, tmp_path):
    files, names = program
    module = Module.compile(files, names, arch, cache_folder=tmp_path)
    for name in names:
        needs = module.resources[name]
        assert needs.shared_bytes <= MOST_SHARED, name
        assert needs.spill_bytes == 0, f"{name}: {needs}"


@pytest.mark.parametrize("program", all_kernels([8]), ids=lambda program: program[0][0].stem)
def test_the_largest_kernels_compile_for_an_rtx_3090(program, tmp_path):
    check(program, "sm_86", tmp_path)


def test_one_of_each_compiles_for_hopper(tmp_path):
    for files, names in all_kernels():
        check((files, names[:1]), "sm_90", tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("program", all_kernels(), ids=lambda program: program[0][0].stem)
def test_every_kernel_compiles(program, arch, tmp_path):
    check(program, arch, tmp_path)


def test_every_file_is_in_the_list():
    listed = {path for files, _ in all_kernels() for path in files}
    assert set(FOLDER.glob("*.cu")) == listed
