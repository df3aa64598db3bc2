"""The house rules that a program can check."""

import ast

import pytest

from tests.conftest import ROOT

PLACES = {"kernels/cuda/cache.py"}  # may ask the environment where the user's cache folder is: a place, not a switch
SOURCES = sorted((ROOT / "src" / "makeway").rglob("*.py"))


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT / "src")))
def test_a_source_file_keeps_the_rules(path):
    text = path.read_text(encoding="utf-8")
    tree = ast.parse(text)
    assert len(text.splitlines()) <= 500, "the file has outgrown its room"
    assert ast.get_docstring(tree), "a module says what it owns"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and str(path.relative_to(ROOT / "src" / "makeway")) not in PLACES:
            assert node.attr not in ("environ", "getenv"), "no environment variable is a switch"
        assert not isinstance(node, ast.Global), "no global state"
        if isinstance(node, ast.ExceptHandler):
            assert node.type is not None, "no bare except"
        if isinstance(node, ast.Name):
            assert node.id != "NotImplementedError", "no stubs"
