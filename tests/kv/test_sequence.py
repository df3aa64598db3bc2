"""Going back in a sequence: by truncating where that is possible, else by snapshots."""

import pytest
import torch

from tests.conftest import golden_arrays, golden_path
from tests.models.runner import Runner


def golden(name, file):
    return Runner(golden_path(file)), [int(t) for t in golden_arrays(f"{name}.npz")["tokens"]]


def test_truncate_of_a_dense_model_gives_the_same_bits():
    runner, tokens = golden("qwen3moe-base", "qwen3moe-base-bf16.gguf")
    whole = runner.logits(tokens)
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:70])
    runner.residual(sequence, [5, 6, 7, 8, 9])
    sequence.truncate(66)
    rest = runner.model.head(runner.residual(sequence, tokens[66:]))
    assert torch.equal(rest, whole[66:])


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("qwen3next-base", "qwen3next-base-bf16.gguf"),
        ("qwen35moe-base", "qwen35moe-base-bf16.gguf"),
        ("qwen4exp-k96", "qwen4exp-k96-UD-Q4_K_XL.gguf"),
    ],
)
def test_snapshot_and_restore_of_a_hybrid_model_give_the_same_bits(name, file):
    runner, tokens = golden(name, file)
    whole = runner.logits(tokens)
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:43])
    point = sequence.snapshot()
    assert point.nbytes == sequence.nbytes > 0
    for detour in ([1, 2, 3], [9] * 30):
        runner.residual(sequence, detour)
        sequence.restore(point)
        assert sequence.length == 43
    assert torch.equal(runner.model.head(runner.residual(sequence, tokens[43:])), whole[43:])
    with pytest.raises(AssertionError, match="restore a snapshot"):
        sequence.truncate(10)
