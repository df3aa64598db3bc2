"""The rule of verification by itself: how many rows stand, in which order they are looked at, what is drawn."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from makeway import SamplingParams
from makeway.engine import sampler
from makeway.engine.verify import verify


@given(st.data())
def test_rows_stand_up_to_the_first_draft_that_differs(data):
    tokens = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=8))
    drafts = data.draw(st.lists(st.integers(0, 2), min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    ends_at = data.draw(st.none() | st.integers(0, len(tokens) - 1))
    rows = torch.arange(len(tokens), dtype=torch.float32)[:, None]
    seen = []

    def choose(row):
        seen.append(int(row))
        return None if seen[-1] == ends_at else tokens[seen[-1]]

    n = verify(drafts, rows, choose)
    wanted = 1
    while wanted <= len(drafts) and drafts[wanted - 1] == tokens[wanted - 1] and ends_at != wanted - 1:
        wanted += 1
    assert n == wanted
    assert seen == list(range(n)), "each row that stands is looked at once, in order, and no other"


def test_what_is_drawn_behind_drafts_follows_the_distribution():
    """Chi-square over 20,000 draws in steps of up to four rows; 4 degrees of freedom, limit at p = 0.001."""
    logits = np.array([1.0, 3.0, 2.0, 2.0, -1.0], dtype=np.float32)
    params = SamplingParams(temperature=0.8)
    text = []

    def choose(_):
        text.append(sampler.choose(logits, params, seed=3, position=len(text), seen=text, counts={}))
        return text[-1]

    n_rows = []
    while len(text) < 20_000:
        drafts = [1] * (len(n_rows) % 4)
        n_rows.append(verify(drafts, torch.zeros(1 + len(drafts), 5), choose))
    p = np.exp(logits / 0.8) / np.exp(logits / 0.8).sum()
    observed = np.bincount(text, minlength=5)
    expected = p * len(text)
    assert ((observed - expected) ** 2 / expected).sum() < 18.47
    first = np.mean([n > 1 for n, i in zip(n_rows, range(len(n_rows)), strict=True) if i % 4 == 1])
    assert abs(first - p[1]) < 0.03, "a draft is accepted with its own probability"
