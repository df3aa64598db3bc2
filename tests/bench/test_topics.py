"""Token rows, streams and vocabulary of synthetic models."""

import numpy as np
import pytest
import torch

from makeway.bench.topics import SPECIAL, Knobs, row_period, token_rows, token_stream, vocabulary
from makeway.gguf import GGMLType
from makeway.quants import decode_rows
from makeway.text import Tokenizer


def decoded(knobs, *, is_head=False, n_vocab=600, hidden=256):
    raw = token_rows(GGMLType.Q8_0, n_vocab, hidden=hidden, knobs=knobs, is_head=is_head)
    return decode_rows(torch.from_numpy(raw), GGMLType.Q8_0).numpy()


@pytest.mark.parametrize("locality", [0.0, 0.5, 1.0])
def test_locality_is_the_likeness_of_tokens_of_one_topic(locality):
    rows = decoded(Knobs(locality=locality, n_topics=8))
    assert len(rows) == 600
    assert rows.std() == pytest.approx(1.0, rel=0.05)
    likeness = np.corrcoef(rows)
    topic = np.arange(600) % 8
    same = (topic[:, None] == topic[None]) & ~np.eye(600, dtype=bool)
    assert likeness[same].mean() == pytest.approx(locality, abs=0.03)
    assert abs(likeness[topic[:, None] != topic[None]].mean()) < 0.05


def test_the_output_pulls_towards_the_topic_of_the_residual():
    knobs = Knobs(locality=0.5, n_topics=8, pull=20.0)
    logits = decoded(knobs) @ decoded(knobs, is_head=True).T
    topic = np.arange(600) % 8
    same = topic[:, None] == topic[None]
    gap = logits[same].mean() - logits[~same].mean()
    assert gap == pytest.approx(20.0 * 0.5**0.5, rel=0.1)


def test_a_stream_stays_in_a_topic_and_skips_special_tokens():
    knobs = Knobs(n_topics=16)
    tokens = token_stream(20_000, n_vocab=1000, knobs=knobs, topic_tokens=50, seed=1)
    assert tokens.min() >= 0
    assert 900 < tokens.max() < 1000 - len(SPECIAL)
    hops = (np.diff(tokens % 16) != 0).mean()
    assert hops == pytest.approx(1 / 50 * 15 / 16, rel=0.2)
    assert len(np.unique(tokens)) > 900
    assert (tokens == token_stream(20_000, n_vocab=1000, knobs=knobs, topic_tokens=50, seed=1)).all()


def test_rows_repeat_after_a_whole_number_of_topics():
    assert row_period(248_320, 64) == 8192
    assert row_period(300, 64) == 256
    with pytest.raises(ValueError, match="topics"):
        row_period(10, 64)


def test_the_vocabulary_encodes_any_text():
    text = Tokenizer.from_metadata(vocabulary(300, "qwen2"), source="synthetic")
    words = "the thing: naïve 漢字 \n"
    ids = text.encode(words)
    assert text.decode(ids) == words
    assert 256 in ids  # the merge of t and h
    assert max(ids) < 300
    with pytest.raises(ValueError, match="too small"):
        vocabulary(259, "qwen2")


def test_knobs_that_mean_nothing_are_refused():
    for bad in ({"locality": 1.5}, {"skew": -1.0}, {"n_topics": 0}, {"pull": -1.0}):
        with pytest.raises(ValueError, match="locality"):
            Knobs(**bad)
