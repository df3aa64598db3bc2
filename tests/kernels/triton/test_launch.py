"""Kernels that may start early wait before anything else, and only where the GPU can make them."""

import ast
import re

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from makeway.kernels.triton.launch import begin, overlap
from tests.conftest import ROOT
from tests.kernels.triton.compile_kernels import READ_EARLY, waits_first

MODULES = sorted((ROOT / "src" / "makeway" / "kernels" / "triton").glob("*.py"))


@pytest.mark.parametrize(
    ("kind", "capability", "can"),
    [("cpu", (9, 0), False), ("cuda", (8, 6), False), ("cuda", (9, 0), True), ("cuda", (12, 0), True)],
)
def test_kernels_overlap_from_hopper_on(kind, capability, can, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert overlap.__wrapped__(torch.device(kind)) == {"PDL": can, "launch_pdl": can}
    assert overlap.__wrapped__(torch.device(kind), joins=True) == {"PDL": can, "launch_pdl": False}


def _takes_pdl(function):
    return any(argument.arg == "PDL" for argument in function.args.args)


def _before_the_wait(function):
    """Statements of a kernel that come before it waits; it returns without that when it never does."""
    statements = [ast.unparse(s) for s in function.body[ast.get_docstring(function) is not None :]]
    return statements[: statements.index("begin(PDL)")] if "begin(PDL)" in statements else [*statements, "return"]


LOADED_EARLY = {"positions", "row_segment", "blocks", "table", "block_tables", "first_row", "n_rows", "places"}
LOADED_EARLY |= {"n_replay", "state_at"}
"""Where kernels may load from before they wait: rows of the pass, block tables, and a state of their own."""


def _begins_by_waiting(module, function):
    before = "\n".join(_before_the_wait(function))
    if (module, function.name) not in READ_EARLY:
        return before == ""
    loads = set(re.findall(r"\bload\((\w+)", before))
    return loads <= LOADED_EARLY and not re.search(r"\breturn\b|\bstore\b|\batomic", before)


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_kernel_that_may_start_early_begins_by_waiting(path):
    """In the source: that a program which returns at once has waited, too, is not seen in what was compiled."""
    tree = ast.parse(path.read_text())
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    early = {name for name, f in functions.items() if name != "begin" and _takes_pdl(f)}
    assert {name for name in early if not _begins_by_waiting(path.stem, functions[name])} == set()
    launched = set()
    for call in ast.walk(tree):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Subscript)
            and isinstance(call.func.value, ast.Name)
        ):
            unpacked = [ast.unparse(k.value) for k in call.keywords if k.arg is None]
            overlaps = any(text.startswith("overlap(") for text in unpacked)
            assert overlaps == (call.func.value.id in early), call.func.value.id
            launched.add(call.func.value.id)
    assert early <= launched


@triton.jit
def mixing_kernel(x, y, N: tl.constexpr, PDL: tl.constexpr):
    """A value of y from all of x; two of three programs have one."""
    begin(PDL)
    program = tl.program_id(0)
    if program % 3 == 2:
        return
    total = tl.sum(tl.load(x + tl.arange(0, N)), 0)
    tl.store(y + program, (total + program) % 1021)


def test_a_chain_of_launches_keeps_its_order(device):
    """Each overwrites what the one before it reads, and reads what that one writes; between them one of torch's."""
    n, steps = (4096, 40) if device.type == "cuda" else (64, 6)
    x, y = torch.arange(n, dtype=torch.int32, device=device), torch.zeros(n, dtype=torch.int32, device=device)

    def chain():
        for step in range(steps):
            mixing_kernel[(n,)](x, y, N=n, num_warps=4, **overlap(device))
            if step % 4 == 3:
                y.add_(step)
            mixing_kernel[(n,)](y, x, N=n, num_warps=4, **overlap(device))

    expected = [torch.arange(n), torch.zeros(n, dtype=torch.int64)]

    def by_hand():
        program = torch.arange(n)
        for step in range(steps):
            for source, target in ((0, 1), (1, 0)):
                mixed = (expected[source].sum() + program) % 1021
                expected[target] = torch.where(program % 3 == 2, expected[target], mixed)
                if step % 4 == 3 and target == 1:
                    expected[1] += step

    chain()
    by_hand()
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            chain()
        for _ in range(3):
            graph.replay()
            by_hand()
    assert x.tolist() == expected[0].tolist()
    assert y.tolist() == expected[1].tolist()


def test_a_wait_behind_an_access_is_found():
    wait, load, shared = (
        "griddepcontrol.wait; // dummy",
        "@%p1 ld.global.b32 {%r1}, [%rd1];",
        "st.shared.b32 [%r1], %r2;",
    )
    parameter = "ld.param.b64 %rd1, [k_param_0];"
    assert waits_first("\n".join((parameter, shared, wait, load)), reads_early=False)
    assert not waits_first("\n".join((parameter, load)), reads_early=False)
    for access in (load, "atom.global.add.u32 %r1, [%rd1], 1;", "cp.async.cg.shared.global [%r1], [%rd1], 16;"):
        with pytest.raises(AssertionError, match="before the wait"):
            waits_first("\n".join((parameter, access, wait)), reads_early=False)
    assert waits_first("\n".join((load, wait)), reads_early=True)
    with pytest.raises(AssertionError, match="before the wait"):
        waits_first("\n".join((load, "st.global.b32 [%rd1], %r1;", wait)), reads_early=True)
