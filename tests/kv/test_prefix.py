"""A sequence that begins with a kept prefix goes on with the bits of one that read it."""

import pytest
import torch

from makeway.kv import BLOCK_TOKENS
from makeway.kv.prefix import PrefixCache, block_keys
from tests.conftest import golden_path
from tests.models.runner import Runner

FILES = {
    "qwen4exp-k96-UD-Q4_K_XL.gguf": True,
    "qwen35moe-base-bf16.gguf": True,
    "qwen3moe-base-bf16.gguf": False,
}
TOKENS = [(11 * i + i // 7) % 200 for i in range(3 * BLOCK_TOKENS)]
GIB = 1 << 30


def keep(runner, prefixes, tokens):
    """Reads `tokens` and keeps them."""
    sequence = runner.sequence()
    runner.residual(sequence, tokens)
    prefixes.put(tokens, sequence.table.blocks, sequence.state.snapshot(torch.device("cpu")))
    sequence.close()


def resume(runner, prefixes, tokens):
    """(tokens that were kept, logits of the rest)."""
    sequence = runner.sequence()
    found = prefixes.find(tokens)
    n = 0
    if found is not None:
        n = len(found.tokens)
        sequence.reserve(len(tokens))
        prefixes.load(found, sequence)
    logits = runner.model.head(runner.residual(sequence, tokens[n:]))
    sequence.close()
    return n, logits


@pytest.mark.parametrize(("file", "needs_state"), FILES.items())
def test_bits_equal_a_cold_read(file, needs_state):
    runner = Runner(golden_path(file))
    prefixes = PrefixCache(runner.cache, budget_bytes=GIB, needs_state=needs_state)
    first = TOKENS[: 2 * BLOCK_TOKENS]
    keep(runner, prefixes, first)
    runner.logits([1, 2, 3] * 70)  # others use the blocks and the places in between
    for tail in (TOKENS[2 * BLOCK_TOKENS :][:30], [5], [9] * 40):
        n, logits = resume(runner, prefixes, first + tail)
        assert n == len(first)
        assert torch.equal(logits, runner.logits(first + tail)[n:])
    half = first[:BLOCK_TOKENS] + [3, 4, 5]
    n, logits = resume(runner, prefixes, half)
    assert n == (0 if needs_state else BLOCK_TOKENS), "recurrent state is kept at the end only"
    assert torch.equal(logits, runner.logits(half)[n:])
    assert resume(runner, prefixes, [7, *first])[0] == 0
    n, _ = resume(runner, prefixes, first)
    assert n == (0 if needs_state else BLOCK_TOKENS), "a token must be left to read"


def test_the_oldest_goes_first_and_shared_blocks_are_kept_once():
    runner = Runner(golden_path("qwen35moe-base-bf16.gguf"))
    block = runner.cache.block_bytes
    prefixes = PrefixCache(runner.cache, budget_bytes=GIB, needs_state=True)
    keep(runner, prefixes, TOKENS[:BLOCK_TOKENS])
    state = prefixes.nbytes - block
    assert state > 0
    keep(runner, prefixes, TOKENS[: 2 * BLOCK_TOKENS])
    assert prefixes.nbytes == 2 * block + 2 * state
    keep(runner, prefixes, TOKENS[: 2 * BLOCK_TOKENS])
    assert prefixes.nbytes == 2 * block + 2 * state
    prefixes.budget_bytes = 3 * block + 2 * state
    assert prefixes.find(TOKENS[: BLOCK_TOKENS + 1]) is not None  # used: now the other one is the oldest
    keep(runner, prefixes, [1] * BLOCK_TOKENS)
    assert prefixes.find(TOKENS[: 2 * BLOCK_TOKENS + 1]).tokens == tuple(TOKENS[:BLOCK_TOKENS])
    assert prefixes.nbytes == 2 * block + 2 * state
    assert len(prefixes) == 2
    prefixes.budget_bytes = block
    keep(runner, prefixes, [2] * BLOCK_TOKENS)
    assert prefixes.find([2] * BLOCK_TOKENS + [1]) is None, "larger than the budget"
    prefixes.clear()
    assert prefixes.find([1] * (BLOCK_TOKENS + 1)) is None
    assert prefixes.nbytes == 0


def test_a_key_depends_on_all_tokens_before():
    keys = block_keys(TOKENS)
    assert len(keys) == 3
    other = block_keys([TOKENS[0] + 1, *TOKENS[1:]])
    assert all(a != b for a, b in zip(keys, other, strict=True))
    assert block_keys(TOKENS[: BLOCK_TOKENS - 1]) == []
