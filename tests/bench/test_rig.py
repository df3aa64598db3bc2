"""The rig: streams differ, an answer is what is given, and a shape's changes are checked."""

import pytest

from makeway import UserError
from makeway.bench.rig import Setup, opened
from makeway.bench.topics import Knobs
from makeway.config import EngineConfig

CONFIG = EngineConfig(device="cpu", context=256, parallel=1, slots=4, prefix_ram=0, drafter="none")


def test_an_answer_is_what_is_given_and_prompts_differ():
    with opened(Setup(shape="tiny-qwen3", config=CONFIG)) as rig:
        assert rig.tokens(50) != rig.tokens(50)
        given = [7, 9, 7, 500]
        rig.add(30, given)
        found = []
        while rig.engine.busy:
            found += [e.token for e in rig.step() if e.kind == "token"]
        assert found == given
        assert rig.counts().hits + rig.counts().misses > 0
        with pytest.raises(UserError, match="512"):
            rig.engine.add([1], given=[3, 512])


def test_a_shape_takes_the_changes_it_knows():
    assert Setup(shape="flash-next", layers=24, ple_rows=0, knobs=Knobs(0.4)).model_shape().n_layers == 24
    with pytest.raises(UserError, match="tiny-qwen3"):
        Setup(shape="huge").model_shape()
    with pytest.raises(UserError, match="no PLE"):
        Setup(shape="qwen3-30b-a3b", ple_rows=0).model_shape()
