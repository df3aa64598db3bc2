import pytest

from makeway import SamplingParams
from makeway.server.errors import ApiError
from makeway.server.fields import Fields
from makeway.server.sampling import choice_of, read_sampling


def read(**values):
    return read_sampling(Fields(values), n_vocab=100, max_tokens=7, logprobs=None)


def test_the_defaults_are_openai_s():
    assert read() == SamplingParams(max_tokens=7, temperature=1.0)


def test_everything_that_can_be_asked_for():
    given = {
        "temperature": 0.5,
        "top_k": 9,
        "top_p": 0.25,
        "min_p": 0.125,
        "typical_p": 0.5,
        "repetition_penalty": 1.5,
        "presence_penalty": -1,
        "frequency_penalty": 2,
        "seed": 12,
        "ignore_eos": True,
    }
    expected = SamplingParams(max_tokens=7, **(given | {"logit_bias": {3: -100.0}, "stop": ("a", "b")}))
    assert read(**given, logit_bias={"3": -100}, stop=["a", "b"]) == expected


def test_values_with_a_meaning_of_their_own():
    assert read(top_k=-1).top_k == 0
    assert 0 < read(top_p=0).top_p < 1e-6
    assert read(seed=-1).seed == 2**64 - 1
    assert read(stop="one").stop == ("one",)
    assert read(stop=None, seed=None, logit_bias=None) == read()


@pytest.mark.parametrize(
    ("values", "param"),
    [
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": 1e-300}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 1.1}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": [1]}, "stop"),
        ({"stop": ["x"] * 65}, "stop"),
        ({"stop": "x" * 5000}, "stop"),
        ({"logit_bias": {"100": 1}}, "logit_bias.100"),
        ({"logit_bias": {"x": 1}}, "logit_bias.x"),
        ({"logit_bias": {"²": 1}}, "logit_bias.²"),
        ({"logit_bias": {"1": 101}}, "logit_bias.1"),
        ({"logit_bias": [1]}, "logit_bias"),
    ],
)
def test_values_out_of_range_name_the_field(values, param):
    with pytest.raises(ApiError) as error:
        read(**values)
    assert error.value.status == 400
    assert error.value.param == param


def test_several_answers_have_different_seeds():
    sampling = read(seed=2**64 - 1)
    assert [choice_of(sampling, i).seed for i in range(3)] == [2**64 - 1, 0, 1]
    assert choice_of(read(), 3).seed is None
