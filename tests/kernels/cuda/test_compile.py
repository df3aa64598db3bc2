"""Every kernel in CUDA C++ builds for an RTX 3090 and a Hopper GPU, and keeps its values in registers."""

import re
import subprocess
from pathlib import Path

import pytest

from makeway.kernels.cuda import FOLDER, all_kernels
from makeway.kernels.cuda.compiler import Module

pytest.importorskip("cuda.bindings.nvrtc", reason="cuda-bindings is not installed")
triton = pytest.importorskip("triton", reason="Triton, which brings a disassembler, is not installed")

MOST_SHARED = 99 * 1024  # of a block on sm_86
DISASSEMBLER = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
WAIT = "ACQBULK"  # wait_for_previous() in machine code


def check(program, arch, tmp_path):
    files, names = program
    module = Module.compile(files, names, arch, cache_folder=tmp_path)
    for name in names:
        needs = module.resources[name]
        assert needs.shared_bytes <= MOST_SHARED, name
        assert needs.spill_bytes == 0, f"{name}: {needs}"


def n_types(name):
    """Of a kernel's matrices: each has code of its own, that of each alone."""
    mask = re.match(r"linears_kernel<(\d+)ull", name)
    return int(mask[1]).bit_count() if mask else 1


def early_accesses(module, tmp_path):
    """By C++ name what reads or writes global memory before the kernel waits; copies of weights do not count."""
    (tmp_path / "code.cubin").write_bytes(module._binary.code)
    command = [DISASSEMBLER, "-c", tmp_path / "code.cubin"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = {}
    for name, symbol in module._binary.symbols.items():
        code = text.split(f".text.{symbol}:\n")[1].split(".text.")[0]
        assert code.count(WAIT) == n_types(name), name
        found[name] = re.findall(r" ((?:LD|LDG|ST|STG|RED|ATOM|ATOMG)[.][A-Z0-9.]+) ", code.partition(WAIT)[0])
    return found


@pytest.mark.parametrize("program", all_kernels("sm_86", [8]), ids=lambda program: program[0][0].stem)
def test_the_largest_kernels_compile_for_an_rtx_3090(program, tmp_path):
    check(program, "sm_86", tmp_path)


def check_order(program, tmp_path):
    """Nothing is read before the wait but weights, which are copied, and by down the plan, past the first-level cache.
    The compiler may move a load that it takes for one of constants, so the sources do not show it."""
    files, names = program
    module = Module.compile(files, names, "sm_90", cache_folder=tmp_path)
    for name, accesses in early_accesses(module, tmp_path).items():
        assert len(accesses) >= 2 if name.startswith("down") else not accesses, (name, accesses)
        assert all(re.fullmatch(r"LDG[.]E([.]64)?[.]STRONG[.]GPU", access) for access in accesses), (name, accesses)


def test_one_of_each_compiles_for_hopper(tmp_path):
    for files, names in all_kernels("sm_90"):
        check((files, names[:1]), "sm_90", tmp_path)


def test_what_is_read_before_the_kernel_before_has_ended(tmp_path):
    for files, names in all_kernels("sm_90", [1]):
        some = {name.partition("<")[0]: name for name in names}
        check_order((files, list(some.values())), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_86", "sm_90"])
@pytest.mark.parametrize("place", [0, 1], ids=["linear", "experts"])
def test_every_kernel_compiles(place, arch, tmp_path):
    program = all_kernels(arch)[place]
    check(program, arch, tmp_path)
    if arch == "sm_90":
        check_order(program, tmp_path)


def test_every_file_is_in_the_list():
    listed = {path for files, _ in all_kernels("sm_90") for path in files}
    assert set(FOLDER.glob("*.cu")) == listed
