"""Drafts: text copied from the best earlier match, and chains of the MTP block that equal the oracles'."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway import SamplingParams
from makeway.engine.decode import DecodeStep
from makeway.engine.drafter import GRAM, LATE_TOKENS, MtpDrafter, TextIndex
from tests.conftest import golden_arrays
from tests.engine import rig

MODELS = {"qwen35moe-base.npz": rig.QWEN35MOE, "qwen4exp-base.npz": "qwen4exp-base-bf16.gguf"}
LIMIT = 3e-4  # float32 engine against a float32 oracle, as the golden data suggest


# -- text that has occurred ------------------------------------------------------------------------


def match_length(tokens, end):
    n = 0
    while n < end and n < 32 and tokens[end - 1 - n] == tokens[-1 - n]:
        n += 1
    return n


@given(st.lists(st.integers(0, 2), max_size=60), st.integers(1, 7), st.integers(GRAM, 6))
@settings(max_examples=150, deadline=None)
def test_a_guess_follows_the_longest_recent_match(tokens, most, least):
    index = TextIndex()
    for n in range(0, len(tokens), 5):  # the text grows between guesses
        index.guess(tokens[:n], 1)
    got = index.guess(tokens, most, least_match=least)
    assert got == TextIndex().guess(tokens, most, least_match=least)
    lengths = {end: match_length(tokens, end) for end in range(GRAM, len(tokens))}
    candidates = sorted((end for end, n in lengths.items() if n >= GRAM), reverse=True)[:4]
    best = max(candidates, key=lambda end: (lengths[end], end), default=None)
    if best is None or lengths[best] < least:
        assert got == []
        return
    whole = list(tokens)
    for i in range(most):  # a copy may run into itself
        whole.append(whole[best + i])
    assert got == whole[len(tokens) :]


def test_a_repeated_text_is_copied_round_and_round():
    assert TextIndex().guess([7, 1, 2, 3, 4, 1, 2, 3], 7) == [4, 1, 2, 3, 4, 1, 2]
    assert TextIndex().guess([5, 5, 5, 5], 3) == [5, 5, 5]
    assert TextIndex().guess([1, 2, 3, 4, 5], 3) == []
    assert TextIndex().guess([1, 2], 3) == []


# -- the MTP block ---------------------------------------------------------------------------------


class Spy:
    """What the MTP block said: (position, place in its chain, logits); and how many tokens it read late at a time."""

    def __init__(self, monkeypatch):
        self.rows, self.late = [], []
        draft, remember = DecodeStep.draft, DecodeStep.remember

        def spy_draft(step, parts, states, *, ahead):
            found = draft(step, parts, states, ahead=ahead)
            self.rows += [
                (sequence.length + ahead, ahead, row) for (sequence, _), row in zip(parts, found.logits, strict=True)
            ]
            return found

        def spy_remember(step, parts, states):
            self.late += [len(tokens) for _, tokens in parts]
            remember(step, parts, states)

        monkeypatch.setattr(DecodeStep, "draft", spy_draft)
        monkeypatch.setattr(DecodeStep, "remember", spy_remember)


def open_drafting(file, depth, **config):
    config = {"context": 256, "parallel": 1, "slots": 99, "drafter": "mtp", "draft_depth": depth} | config
    return rig.open_engine(file, **config)


def small_first(ways):
    """Every way with the small model, one with the large one; the others with it are slow."""
    small, large = MODELS
    cases = [pytest.param(large, way, marks=[pytest.mark.slow] if way != ways[0] else []) for way in ways]
    return [*((small, way) for way in ways), *cases]


@pytest.mark.parametrize(("name", "chunk"), small_first([None, 7]))
def test_drafts_right_behind_a_prompt_equal_the_oracles(name, chunk, monkeypatch):
    """The prompt went through a sweep; the first step's chain of three, in tokens and logits."""
    reference = golden_arrays(name)
    tokens, n = [int(t) for t in reference["tokens"]], int(reference["n_prompt"])
    spy = Spy(monkeypatch)
    with open_drafting(MODELS[name], 3, chunk=chunk, sweep_tokens=40) as engine:
        engine.add(tokens[:n], SamplingParams(max_tokens=8, ignore_eos=True))
        rig.run(engine, until=lambda _: spy.rows)
    assert [position for position, _, _ in spy.rows] == [n, n + 1, n + 2]
    logits = torch.stack([row for _, _, row in spy.rows])
    assert logits.argmax(dim=1).tolist() == reference["mtp_draft_tokens"].tolist()
    assert np.abs(logits.numpy() - reference["mtp_draft_logits"]).max() <= LIMIT


@pytest.mark.parametrize(("name", "way"), small_first(["some steps", "each step", "with look-up", "two at once"]))
def test_drafts_inside_an_answer_equal_the_oracles(name, way, monkeypatch):
    """The first draft of each step: the block has read all tokens before it beside the trunk's own states, whatever
    was drafted, rejected or read late before. The answer is the golden one."""
    reference = golden_arrays(name)
    tokens, n = [int(t) for t in reference["tokens"]], int(reference["n_prompt"])
    wanted = dict(zip(range(len(tokens) - 48, len(tokens)), reference["mtp_logits_zero_first_tail"], strict=True))
    spy = Spy(monkeypatch)
    drafter = "mtp+lookup" if way == "with look-up" else "mtp"
    with open_drafting(MODELS[name], 3, drafter=drafter, parallel=2) as engine:
        chooser = engine._loop.speculation._chooser
        choose, turn = chooser.choose, Counter()

        def some(wishes, *, n_rows):
            turn["steps"] += 1
            depths = choose(wishes, n_rows=n_rows)
            return depths if way != "some steps" or turn["steps"] % 18 in (0, 1, 5) else [0] * len(depths)

        monkeypatch.setattr(chooser, "choose", some)
        for _ in range(2 if way == "two at once" else 1):
            engine.add(tokens[:n], SamplingParams(max_tokens=len(tokens) - n, ignore_eos=True), given=tokens[n:])
        rig.run(engine)
        rig.check_idle(engine)
    first = [(position, row) for position, ahead, row in spy.rows if ahead == 0 and position in wanted]
    assert len(first) >= 3
    for position, row in first:
        assert np.abs(row.numpy() - wanted[position]).max() <= LIMIT, f"position {position}"
    if way == "some steps":
        assert max(spy.late) >= LATE_TOKENS, "without drafts the block reads several tokens at once"


def test_reading_late_writes_what_reading_at_once_does(monkeypatch):
    """Keys, values and tail of the MTP block after an answer: drafted at every step, and never."""
    reference = golden_arrays("qwen35moe-base.npz")
    tokens, n = [int(t) for t in reference["tokens"]], int(reference["n_prompt"])
    kept = []
    for depth in (3, 0):
        with open_drafting(rig.QWEN35MOE, 3) as engine:
            speculation, layer = engine._loop.speculation, engine.model.facts.n_layers
            if depth == 0:
                monkeypatch.setattr(speculation._chooser, "choose", lambda wishes, n_rows: [0] * len(wishes))
            engine.add(tokens[:n], SamplingParams(max_tokens=40, ignore_eos=True), given=tokens[n : n + 28])
            rig.run(engine, until=lambda events: sum(e.kind == "token" for e in events) >= 28)
            (sequence,) = engine._loop._sequences.values()
            speculation.settle(sequence)
            kv, length = engine.memory.kv.layer(layer), n + 27
            assert sequence.length >= length
            keys = kv.keys[sequence.table.blocks].flatten(0, 1)[:length].clone()
            values = kv.values[sequence.table.blocks].flatten(0, 1)[:length].clone()
            kept.append((keys, values))
    for at_once, late in zip(*kept, strict=True):
        assert torch.equal(at_once, late)


def test_a_closed_sequence_leaves_nothing_behind():
    with open_drafting(rig.QWEN35MOE, 1, drafter="mtp+lookup", parallel=3) as engine:
        for i in range(3):
            engine.add(rig.prompt(rig.QWEN35MOE, 9, start=i), SamplingParams(max_tokens=4 + i, ignore_eos=True))
        rig.run(engine)
        speculation = engine._loop.speculation
        assert isinstance(speculation._mtp, MtpDrafter)
        assert not speculation._mtp._late
        assert not speculation._texts
        assert not speculation._tracks
