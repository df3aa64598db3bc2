import numpy as np

from makeway.experts.guess import TRY_EVERY, Limits


def test_a_layer_that_is_mostly_wrong_stops_and_tries_again():
    values = np.zeros(2, dtype=np.int32)
    limits = Limits(values, 4)
    assert values.tolist() == [4, 4]
    made = np.array([4, 4])
    for _ in range(3):
        limits.observe(made, np.array([3, 1]))
    assert values.tolist() == [4, 0]
    seen = []
    for _ in range(2 * TRY_EVERY):
        limits.observe(np.where(values > 0, made, 0), np.array([0, 0]))
        seen.append(values[1])
    assert sum(v > 0 for v in seen) == 2, "one step in so many"
    assert values[0] == 0 or limits.limits is values
    for _ in range(200):
        limits.observe(np.where(values > 0, made, 0), np.where(values > 0, made, 0))
    assert values.tolist() == [4, 4], "right again, so guessing pays again"
