from makeway import Timings
from makeway.engine.request import DraftCounts
from makeway.server.usage import Usage


def test_a_prompt_counts_once_however_many_answers_it_has():
    usage = Usage([10, 4])
    usage.add(Timings(10, 5, prompt_s=1.0, answer_s=2.0, n_cached=3, drafts=DraftCounts(2, 6, 4)), 0)
    usage.add(Timings(10, 7, prompt_s=0.5, answer_s=2.0, n_cached=9), 0)
    usage.add(Timings(4, 1, prompt_s=0.5, answer_s=0.0, n_cached=2), 1)
    assert usage.openai() == {
        "prompt_tokens": 14,
        "completion_tokens": 13,
        "total_tokens": 27,
        "prompt_tokens_details": {"cached_tokens": 5},
        "completion_tokens_details": {
            "reasoning_tokens": 0,
            "accepted_prediction_tokens": 4,
            "rejected_prediction_tokens": 2,
        },
    }
    assert usage.anthropic() == {
        "input_tokens": 9,
        "output_tokens": 13,
        "cache_read_input_tokens": 5,
        "cache_creation_input_tokens": 0,
    }
    assert usage.speed()["prompt_n"] == 2
    assert usage.speed()["prompt_per_second"] == 4.0


def test_without_an_answer_there_is_no_speed():
    assert Usage([3]).speed() is None
    assert Usage([3]).openai()["total_tokens"] == 3
