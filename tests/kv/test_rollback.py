"""Rejected rows of verify steps never were: bit for bit, over every golden model."""

import random
from functools import cache

import pytest
import torch

from makeway.kernels import REFERENCE
from makeway.kv import BLOCK_TOKENS, Batch
from makeway.models.base import run_trunk
from tests.conftest import golden_arrays, golden_path
from tests.models.runner import CPU, Runner

MODELS = {
    "qwen3moe-base.npz": "qwen3moe-base-bf16.gguf",
    "qwen3next-base.npz": "qwen3next-base-bf16.gguf",
    "qwen35moe-base.npz": "qwen35moe-base-bf16.gguf",
    "qwen4exp-base.npz": "qwen4exp-base-bf16.gguf",
    "qwen4exp-k96-quant.npz": "qwen4exp-k96-UD-Q4_K_XL.gguf",
}


RNG = random.Random(11)


@cache
def golden(name):
    """A runner, its golden tokens, and their logits [n, vocab] from one plain pass."""
    runner = Runner(golden_path(MODELS[name]))
    tokens = [int(t) for t in golden_arrays(name)["tokens"]]
    return runner, tokens, runner.logits(tokens)


@pytest.fixture(params=MODELS)
def model(request):
    return golden(request.param)


@pytest.fixture(params=["qwen3moe-base.npz", "qwen35moe-base.npz", "qwen4exp-k96-quant.npz"])
def unlike(request):
    """Three of them that differ in what they remember."""
    return golden(request.param)


def verify(runner, parts):
    """Logits of a verify step by sequence; parts: (sequence, tokens)."""
    for sequence, tokens in parts:
        sequence.reserve(len(tokens))
    batch = Batch.of(parts, device=CPU, keep_rows=True)
    logits = runner.model.head(run_trunk(runner.model, runner.experts, batch))
    return [logits[s.rows] for s in batch.segments]


def wrong(tokens, at, n, rng):
    """`n` tokens that differ from those at positions at, at + 1, ..."""
    return [(tokens[(at + i) % len(tokens)] + 1 + rng.randrange(90)) % 256 for i in range(n)]


def remembered(runner, sequence):
    """All that later tokens can see of a sequence that is settled: states, windows, live raw keys, pooled keys, KV."""
    seen = {key: t for key, t in sequence.state.tensors.items() if key[0] != "raw"}
    n = sequence.length
    for layer in runner.facts.kv_shapes:
        if layer >= runner.facts.n_layers:
            continue
        kv = runner.cache.layer(layer, runner.states.ring(layer))
        order = sequence.table.blocks
        seen["keys", layer] = kv.keys[order].flatten(0, 1)[:n]
        seen["values", layer] = kv.values[order].flatten(0, 1)[:n]
        if kv.pooled is not None:
            pooled, ring, ratio = kv.indexer
            seen["pooled", layer] = pooled[order].flatten(0, 1)[: n // ratio]
            live = [p % ring.shape[1] for p in range(n // ratio * ratio, n)]
            seen["raw", layer] = ring[sequence.place][live]
    return seen, dict(sequence.state.windows)


def assert_remembers(runner, sequence, tokens):
    """`sequence` is as one that ran `tokens` and nothing else."""
    other = runner.sequence()
    runner.residual(other, tokens)
    sequence.settle(REFERENCE)
    (seen, windows), (wanted, wanted_windows) = remembered(runner, sequence), remembered(runner, other)
    other.close()
    assert windows == wanted_windows
    for key, t in wanted.items():
        assert torch.equal(seen[key], t), key


def test_a_chain_of_steps_gives_the_bits_of_the_accepted_tokens_alone(model):
    runner, tokens, whole = model
    rng = random.Random(7)
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:30])
    n_right = [0, 1, 4, 2, 0, 0, 8, 3, 1, 1, 5, 0, 8]
    for turn, n in enumerate(n_right):
        at = sequence.length
        n = min(n, len(tokens) - at)
        drafts = wrong(tokens, at + n, 8 - n if turn % 2 else max(1 - n, rng.randrange(9 - n)), rng)
        rows = verify(runner, [(sequence, tokens[at : at + n] + drafts)])[0]
        sequence.accept(n)
        assert sequence.length == at + n
        assert len(sequence.table.blocks) == -(-(at + n) // BLOCK_TOKENS)
        assert torch.equal(rows[:n], whole[at : at + n]), f"step {turn}"
        if turn % 3 == 2:
            sequence.settle(REFERENCE)
        if turn % 4 == 3:  # a plain pass between verify steps
            at, m = sequence.length, 1 + turn % 3
            plain = runner.model.head(runner.residual(sequence, tokens[at : at + m]))
            assert torch.equal(plain, whole[at : at + m]), f"plain pass after step {turn}"
    assert_remembers(runner, sequence, tokens[: sequence.length])
    rest = runner.model.head(runner.residual(sequence, tokens[sequence.length :]))
    assert torch.equal(rest, whole[len(whole) - len(rest) :])
    sequence.close()


@pytest.mark.parametrize("n_accepted", [0, 3])
def test_whatever_is_accepted_the_sequence_remembers_that_alone(model, n_accepted):
    runner, tokens, _ = model
    for n_prompt in (1, 38):
        sequence = runner.sequence()
        runner.residual(sequence, tokens[:n_prompt])
        rows = tokens[n_prompt : n_prompt + n_accepted] + wrong(tokens, n_prompt + n_accepted, 4 - n_accepted, RNG)
        verify(runner, [(sequence, rows)])
        sequence.accept(n_accepted)
        assert_remembers(runner, sequence, tokens[: n_prompt + n_accepted])
        sequence.close()


def test_sequences_in_one_step_accept_on_their_own(unlike):
    runner, tokens, whole = unlike
    backwards = tokens[::-1]
    alone = runner.logits(backwards)
    a, b = runner.sequence(), runner.sequence()
    runner.residual(a, tokens[:20])
    runner.residual(b, backwards[:11])
    for n_a, n_b in ((1, 3), (2, 0), (0, 4), (4, 4), (3, 1)):
        at, bt = a.length, b.length
        rows_a = tokens[at : at + n_a] + wrong(tokens, at + n_a, 4 - n_a, RNG)
        rows_b = backwards[bt : bt + n_b] + wrong(backwards, bt + n_b, 4 - n_b, RNG)
        got_a, got_b = verify(runner, [(a, rows_a), (b, rows_b)])
        a.accept(n_a)
        b.accept(n_b)
        assert torch.equal(got_a[:n_a], whole[at : at + n_a])
        assert torch.equal(got_b[:n_b], alone[bt : bt + n_b])
    assert_remembers(runner, a, tokens[: a.length])
    assert_remembers(runner, b, backwards[: b.length])
    a.close()
    b.close()


def test_the_first_chunk_of_a_sweep_replays_and_later_ones_do_not(unlike):
    runner, tokens, whole = unlike
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:20])
    verify(runner, [(sequence, tokens[20:22] + wrong(tokens, 22, 2, RNG))])
    sequence.accept(2)
    sequence.reserve(40)
    chunks = [Batch.of([(sequence, tokens[i : i + 20])], device=CPU, offset=i - 22) for i in (22, 42)]
    parts = [runner.model.embed(batch) for batch in chunks]
    for layer in range(runner.facts.n_layers):
        for i, batch in enumerate(chunks):
            h, moe = runner.model.mix(layer, parts[i], batch)
            runner.experts(layer, moe)
            parts[i] = runner.model.combine(layer, h, moe)
    sequence.advance(40)
    assert torch.equal(runner.model.head(torch.cat(parts)), whole[22:62])
    assert_remembers(runner, sequence, tokens[:62])
    sequence.close()


def test_a_snapshot_after_accepted_rows_is_a_point_to_come_back_to(unlike):
    runner, tokens, whole = unlike
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:25])
    verify(runner, [(sequence, tokens[25:28] + wrong(tokens, 28, 1, RNG))])
    with pytest.raises(AssertionError, match="accept"):
        sequence.snapshot()
    with pytest.raises(AssertionError, match="accept"):
        runner.residual(sequence, [1])
    sequence.accept(3)
    if runner.states.shapes.is_recurrent:
        with pytest.raises(AssertionError, match="settle"):
            sequence.snapshot()
    sequence.settle(REFERENCE)
    point = sequence.snapshot()
    for _ in range(2):
        verify(runner, [(sequence, [3, 4, 5])])  # left unanswered: restoring forgets it
        sequence.restore(point)
    assert torch.equal(runner.model.head(runner.residual(sequence, tokens[28:])), whole[28:])
    sequence.close()


def test_accept_is_bounded_by_the_rows_and_a_step_by_the_room(unlike):
    runner, tokens, _ = unlike
    sequence = runner.sequence()
    runner.residual(sequence, tokens[:5])
    with pytest.raises(AssertionError, match="1 rows of 0"):
        sequence.accept(1)
    verify(runner, [(sequence, tokens[5:8])])
    with pytest.raises(AssertionError, match="4 rows of 3"):
        sequence.accept(4)
    sequence.accept(3)
    if runner.states.shapes.is_recurrent:
        with pytest.raises(AssertionError, match="room for 8"):
            verify(runner, [(sequence, tokens[8:17])])
    sequence.close()
