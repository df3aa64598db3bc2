"""A sweep gives the bits of a plain pass, and needs each expert once."""

import pytest
import torch

from makeway.engine.prefill import Sweep
from tests.conftest import golden_arrays, golden_path
from tests.models.runner import Runner

CASES = [
    ("qwen4exp-k96.npz", "qwen4exp-k96-UD-Q4_K_XL.gguf"),
    ("qwen35moe-base.npz", "qwen35moe-base-bf16.gguf"),
    ("qwen3moe-base.npz", "qwen3moe-base-bf16.gguf"),
]


@pytest.mark.parametrize(("arrays", "file"), CASES)
@pytest.mark.parametrize(("chunk", "sweep_tokens"), [(1, 50), (7, 1000), (1000, 1000), (16, 33), (5, 5)])
def test_bits_equal_a_plain_pass(arrays, file, chunk, sweep_tokens):
    runner = Runner(golden_path(file))
    tokens = [int(t) for t in golden_arrays(arrays)["tokens"]][:80]
    whole = runner.logits(tokens)
    runner.experts.ids.clear()
    sequence, rows = runner.sequence(), []
    for i in range(0, len(tokens), sweep_tokens):
        piece = tokens[i : i + sweep_tokens]
        sequence.reserve(len(piece))
        sweep = Sweep(runner.model, runner.experts, parts=[(sequence, piece)], chunk=chunk)
        before, last = sequence.length, 0
        for _ in sweep.steps():
            assert sequence.length == before
            assert last <= sweep.tokens_done < sweep.n_tokens
            assert not sweep.is_done
            last = sweep.tokens_done
        assert sweep.tokens_done == len(piece)
        assert sequence.length == before + len(piece)
        rows.append(runner.model.head(sweep.residual(sweep.parts[0])))
    assert torch.equal(torch.cat(rows), whole)
    n_sweeps = -(-len(tokens) // sweep_tokens)
    assert all(len(calls) == n_sweeps for calls in runner.experts.ids.values()), (
        "one visit to a layer's experts a sweep"
    )
