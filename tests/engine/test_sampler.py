import numpy as np
import pytest

from makeway import EngineFailed, SamplingParams, UserError
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


ALLOWED = np.array([True, False, False, True, True])


def masked(params, allowed=ALLOWED, position=0, seen=(), counts=None):
    return sampler.choose(
        LOGITS, params, seed=3, position=position, seen=list(seen), counts=counts or {}, allowed=allowed
    )


def test_a_mask_comes_before_everything_else():
    assert masked(SamplingParams()) == 3
    assert masked(SamplingParams(logit_bias={1: float("inf")})) == 3
    assert masked(SamplingParams(temperature=1.0, top_k=1)) == 3  # top-k counts what is left
    assert masked(SamplingParams(repetition_penalty=9.0), seen=[3]) == 0
    draws = [masked(SamplingParams(temperature=1.0), position=i) for i in range(5_000)]
    expected = np.where(ALLOWED, np.exp(LOGITS), 0) / np.exp(LOGITS[ALLOWED]).sum() * len(draws)
    observed = np.bincount(draws, minlength=5)
    assert observed[~ALLOWED].sum() == 0
    assert ((observed - expected)[ALLOWED] ** 2 / expected[ALLOWED]).sum() < 13.82  # 2 degrees of freedom, p = 0.001


def test_a_draw_at_the_very_end_of_the_distribution_stays_inside_the_mask(monkeypatch):
    monkeypatch.setattr(sampler, "uniform", lambda seed, position: 1.0)
    assert masked(SamplingParams(temperature=1.0)) == 4
    assert masked(SamplingParams(temperature=1.0), allowed=LOGITS > 2) == 1


def test_an_empty_mask_is_our_fault_and_a_banned_one_the_users():
    with pytest.raises(EngineFailed, match="allows no token"):
        masked(SamplingParams(), allowed=np.zeros(5, dtype=bool))
    with pytest.raises(EngineFailed, match="does not fit"):
        masked(SamplingParams(), allowed=np.ones(6, dtype=bool))
    with pytest.raises(UserError, match="logit_bias"):
        masked(SamplingParams(logit_bias={1: -float("inf")}), allowed=LOGITS > 2)


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


@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_the_head_of_the_vocabulary_decides_what_the_whole_of_it_would(spread):
    rng = np.random.default_rng(5)
    settings = [
        {},
        {"top_k": 40},
        {"top_p": 0.9},
        {"min_p": 0.05},
        {"top_k": 20, "top_p": 0.8, "min_p": 0.1},
        {"top_p": 0.3, "min_p": 0.2},
    ]
    n_by_head = 0
    for seed in range(40):
        values = np.round(rng.normal(0, spread, 6000), 1)  # many ties
        for setting in settings:
            params = SamplingParams(temperature=0.8, **setting)
            number = sampler.uniform(seed, 3)
            by_head = sampler._draw_from_head(values, params, number)
            n_by_head += by_head is not None
            assert by_head in (None, sampler._draw(values, params, number))
    assert n_by_head > 40, "else this compares nothing"


def test_the_best_tokens_are_those_of_a_full_sort():
    rng = np.random.default_rng(6)
    for n in (1, 7, 64, 500):
        values = rng.integers(0, 30, 500).astype(np.float64)
        assert sampler._best(values, n).tolist() == np.argsort(-values, kind="stable")[:n].tolist()
    for n in (1, 5, 20, 1024):
        for allowed in (6007, 900, 3):  # a mask leaves -inf
            values = np.round(rng.normal(0, 3, 6007), 1)
            values[rng.permutation(6007)[allowed:]] = -np.inf
            assert sampler._best(values, n).tolist() == np.argsort(-values, kind="stable")[:n].tolist()
