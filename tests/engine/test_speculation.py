"""Drafts change speed alone: with every drafter and depth each answer is the one computed alone, bit for bit."""

import itertools

import pytest

from makeway import UserError
from tests.engine import rig
from tests.engine.test_invariance import BRIEF, LONG, check

DRAFTS = {
    rig.QWEN35MOE: ("mtp", "lookup", "mtp+lookup"),
    rig.QWEN4EXP: ("lookup",),
    rig.QWEN3MOE: ("lookup",),
}


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


CASES = [
    (file, drafter, depth, slots)
    for file, drafters in DRAFTS.items()
    for drafter, (depth, slots) in itertools.product(drafters, ((1, 0), (3, 2), (7, 99), ("auto", 1)))
]


@pytest.mark.parametrize(("file", "drafter", "depth", "slots"), CASES)
def test_identity(file, drafter, depth, slots, tmp_path):
    case = {"file": file, "slots": slots, "policy": "lru", "handover": "auto", "drafter": drafter, "draft_depth": depth}
    check(case | {"chunk": None, "sweep_tokens": None, "prefix_ram": 0}, tmp_path, lengths=BRIEF, with_trace=True)


def test_a_draft_block_missing_from_the_file_is_told_before_anything_is_loaded():
    with pytest.raises(UserError, match="no MTP block; use --drafter lookup or none"):
        rig.open_engine(rig.QWEN3MOE, drafter="mtp")
    with pytest.raises(UserError, match="no MTP block"):
        rig.open_engine(rig.QWEN4EXP, drafter="mtp+lookup")
    with pytest.raises(UserError, match="no MTP block to draft with"):
        rig.open_engine(rig.QWEN3MOE, drafter="auto", draft_depth=2)
    with pytest.raises(UserError, match="a step has 8"):
        rig.open_engine(rig.QWEN35MOE, drafter="mtp", draft_depth=8)
