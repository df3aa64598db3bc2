import numpy as np
import pytest

from makeway import SamplingParams, UserError
from makeway.engine import sampler

LOGITS = np.array([1.0, 3.0, 2.0, 2.0, -1.0], dtype=np.float32)


def choose(params, position=0, seed=0, seen=(), counts=None):
    return sampler.choose(LOGITS, params, seed=seed, position=position, seen=list(seen), counts=counts or {})


def softmax(x):
    e = np.exp(np.asarray(x, dtype=np.float64) - max(x))
    return e / e.sum()


def test_greedy_takes_the_best_and_the_lower_id_of_equals():
    assert choose(SamplingParams()) == 1
    assert choose(SamplingParams(logit_bias={1: -100.0})) == 2


def test_draws_follow_the_distribution():
    """Chi-square over 20,000 draws at successive positions; 4 degrees of freedom, limit at p = 0.001."""
    params = SamplingParams(temperature=0.7)
    draws = [choose(params, position=i, seed=42) for i in range(20_000)]
    expected = softmax(LOGITS / 0.7) * len(draws)
    observed = np.bincount(draws, minlength=5)
    assert ((observed - expected) ** 2 / expected).sum() < 18.47


def test_a_draw_depends_on_seed_and_position_alone():
    params = SamplingParams(temperature=1.0)
    first = [choose(params, position=i, seed=7) for i in range(50)]
    assert [choose(params, position=i, seed=7) for i in reversed(range(50))] == first[::-1]
    assert [choose(params, position=i, seed=8) for i in range(50)] != first


@pytest.mark.parametrize(
    ("params", "kept"),
    [
        (SamplingParams(temperature=1.0), [1, 2, 3, 0, 4]),
        (SamplingParams(temperature=1.0, top_k=3), [1, 2, 3]),
        (SamplingParams(temperature=1.0, top_p=0.5), [1]),
        (SamplingParams(temperature=1.0, top_p=0.7), [1, 2]),
        (SamplingParams(temperature=1.0, min_p=0.3), [1, 2, 3]),
        (SamplingParams(temperature=1.0, top_k=1), [1]),
        (SamplingParams(temperature=1.0, typical_p=0.3), [2, 3]),
    ],
)
def test_filters_keep_the_right_tokens(params, kept):
    ids, p = sampler.probabilities(LOGITS.astype(np.float64), params)
    assert ids.tolist() == kept
    assert p.sum() == pytest.approx(1.0)
    np.testing.assert_allclose(p, softmax(LOGITS[kept]))


def test_temperature_is_applied_after_the_filters():
    hot = SamplingParams(temperature=100.0, top_p=0.7)
    assert sampler.probabilities(LOGITS.astype(np.float64), hot)[0].tolist() == [1, 2]


def test_penalties():
    out = sampler.adjusted(LOGITS, SamplingParams(repetition_penalty=2.0), seen=[1, 4, 1], counts={})
    np.testing.assert_allclose(out, [1.0, 1.5, 2.0, 2.0, -2.0])
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    out = sampler.adjusted(LOGITS, params, seen=[1], counts={1: 2, 2: 1})
    np.testing.assert_allclose(out, [1.0, 2.0, 1.25, 2.0, -1.0])
    assert choose(params, counts={1: 10}) == 2


def test_logprobs_are_the_models_own():
    got = sampler.logprobs(LOGITS, 2, n_best=2)
    logp = np.log(softmax(LOGITS))
    assert got.chosen == pytest.approx(logp[2])
    assert [i for i, _ in got.best] == [1, 2]
    assert [p for _, p in got.best] == pytest.approx([logp[1], logp[2]])


@pytest.mark.parametrize(
    "bad",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"min_p": -0.1},
        {"typical_p": 0.0},
        {"repetition_penalty": 0.0},
        {"presence_penalty": float("nan")},
        {"max_tokens": 0},
        {"logprobs": 21},
        {"stop": ("",)},
        {"seed": -1},
        {"logit_bias": {1: float("nan")}},
    ],
)
def test_bad_parameters_are_one_clear_line(bad):
    with pytest.raises(UserError) as error:
        SamplingParams(**bad)
    assert "\n" not in str(error.value)
    assert next(iter(bad)).split("_")[0] in str(error.value)
