"""Kernels that may start early wait before anything else, and only where the GPU can make them."""

import ast

import pytest
import torch

pytest.importorskip("triton")

from makeway.kernels.triton.launch import overlap
from tests.conftest import ROOT
from tests.kernels.triton.compile_kernels import waits_first

MODULES = sorted((ROOT / "src" / "makeway" / "kernels" / "triton").glob("*.py"))


@pytest.mark.parametrize(
    ("kind", "capability", "can"),
    [("cpu", (9, 0), False), ("cuda", (8, 6), False), ("cuda", (9, 0), True), ("cuda", (12, 0), True)],
)
def test_kernels_overlap_from_hopper_on(kind, capability, can, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert overlap.__wrapped__(torch.device(kind)) == {"PDL": can, "launch_pdl": can}


def _takes_pdl(function):
    return any(argument.arg == "PDL" for argument in function.args.args)


def _first(function):
    has_docstring = ast.get_docstring(function) is not None
    return ast.unparse(function.body[1 if has_docstring else 0])


@pytest.mark.parametrize("path", MODULES, ids=lambda path: path.stem)
def test_a_kernel_that_may_start_early_begins_by_waiting(path):
    """In the source: that a program which returns at once has waited, too, is not seen in what was compiled."""
    tree = ast.parse(path.read_text())
    functions = {f.name: f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef)}
    early = {name for name, f in functions.items() if name != "begin" and _takes_pdl(f)}
    assert {name for name in early if _first(functions[name]) != "begin(PDL)"} == set()
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


def test_a_wait_behind_an_access_is_found():
    wait, load, shared = (
        "griddepcontrol.wait; // dummy",
        "@%p1 ld.global.b32 {%r1}, [%rd1];",
        "st.shared.b32 [%r1], %r2;",
    )
    parameter = "ld.param.b64 %rd1, [k_param_0];"
    assert waits_first("\n".join((parameter, shared, wait, load)))
    assert not waits_first("\n".join((parameter, load)))
    for access in (load, "atom.global.add.u32 %r1, [%rd1], 1;", "cp.async.cg.shared.global [%r1], [%rd1], 16;"):
        with pytest.raises(AssertionError, match="before the wait"):
            waits_first("\n".join((parameter, access, wait)))
