"""Depths: what a configuration asks for, what is learnt, and what is chosen from it."""

import itertools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from makeway import EngineConfig, UserError
from makeway.engine.depth import PROBE_STEPS, Acceptance, DepthChooser, Drafting, StepCosts, Track, Wish
from makeway.memory.sizes import MAX_ROWS


@pytest.mark.parametrize(
    ("config", "has_mtp", "name", "depth"),
    [
        ({}, True, "mtp", 3),
        ({}, False, "none", 0),
        ({"drafter": "none"}, True, "none", 0),
        ({"drafter": "lookup"}, False, "lookup", 7),
        ({"drafter": "mtp+lookup"}, True, "mtp+lookup", 7),
        ({"drafter": "mtp", "draft_depth": 5}, True, "mtp", 5),
        ({"draft_depth": 0}, True, "none", 0),
        ({"draft_depth": 0}, False, "none", 0),
        ({"drafter": "none", "draft_depth": 0}, False, "none", 0),
    ],
)
def test_what_a_configuration_asks_for(config, has_mtp, name, depth):
    drafting = Drafting.of(EngineConfig(**config), has_mtp=has_mtp)
    assert (drafting.name, drafting.depth) == (name, depth)
    assert drafting.is_auto == ("draft_depth" not in config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"drafter": "mtp"}, "has no MTP block; use --drafter lookup or none"),
        ({"drafter": "mtp+lookup", "draft_depth": 2}, "has no MTP block"),
        ({"draft_depth": 2}, "--draft-depth 2: the model file has no MTP block to draft with"),
        ({"drafter": "none", "draft_depth": 2}, "--draft-depth 2 needs a drafter"),
    ],
)
def test_what_cannot_be_had_is_told(config, message):
    with pytest.raises(UserError, match=message):
        Drafting.of(EngineConfig(**config), has_mtp=False)


@pytest.mark.parametrize("bad", [{"drafter": "guess"}, {"draft_depth": -1}, {"draft_depth": "many"}])
def test_settings_that_do_not_exist(bad):
    with pytest.raises(UserError, match="use"):
        EngineConfig(**bad)


def test_acceptance_forgets_and_counts_only_what_was_decided():
    acceptance = Acceptance((0.7, 0.7, 0.7))
    acceptance.observe(3, 1)
    assert acceptance.rates[0] > 0.7 > acceptance.rates[1]
    assert acceptance.rates[2] == 0.7, "whether a third draft is right is open when the second was wrong"
    for _ in range(40):
        acceptance.observe(1, 0)
    assert acceptance.rates[0] < 0.05
    for _ in range(40):
        acceptance.observe(1, 1)
    assert acceptance.rates[0] > 0.95
    one, two, three = acceptance.survivals(3)
    assert one == acceptance.rates[0]
    assert two == pytest.approx(one * acceptance.rates[1])
    assert three == pytest.approx(two * acceptance.rates[2])


def costs(step_s, pass_s=0.1, n=3):
    """Costs measured a few times: seconds by rows."""
    out = StepCosts()
    for _ in range(n):
        for rows, seconds in step_s.items():
            out.observe(rows, step_s=seconds, n_passes=1, draft_s=pass_s)
    return out


def test_costs_are_medians_with_lines_between_and_a_floor():
    measured = costs({1: 1.0, 4: 1.6})
    assert measured.ratio(4) / measured.ratio(1) == pytest.approx(1.6)
    assert measured.per_pass / measured.ratio(1) == pytest.approx(0.1)
    before = measured.ratio(1)
    measured.observe(1, step_s=50.0, n_passes=0, draft_s=0.0)
    assert measured.ratio(1) == pytest.approx(before, rel=0.01), "one slow step changes nothing"
    assert measured.ratio(2) / measured.ratio(1) == pytest.approx(1.2)
    assert measured.ratio(8) > measured.ratio(4)
    noisy = costs({1: 1.0, 2: 0.5})
    assert noisy.ratio(2, least=1) >= noisy.ratio(1), "more rows never cost less"
    fresh = StepCosts()
    assert fresh.ratio(1) < fresh.ratio(2) < fresh.ratio(8)
    assert fresh.per_pass > 0


def test_a_machine_that_changes_its_pace_changes_no_ratio():
    """Two rows cost 1.3 times one; the machine becomes half as fast, and only single rows are measured for a while."""
    measured = costs({1: 1.0, 2: 1.3}, n=9)
    for _ in range(30):
        measured.observe(1, step_s=2.0, n_passes=0, draft_s=0.0)
    assert measured.ratio(2) / measured.ratio(1) == pytest.approx(1.3, rel=0.02)


def test_costs_that_are_old_are_forgotten():
    measured = costs({1: 1.0, 2: 9.0})
    for _ in range(StepCosts.STALE + 1):
        measured.observe(1, step_s=1.0, n_passes=0, draft_s=0.0)
    assert measured.ratio(2) < 2.0 * measured.ratio(1)
    assert measured.knows(1)
    assert not measured.knows(2)


def wish(rates, most=None, source="mtp", **track):
    acceptance = Acceptance(tuple(rates))
    return Wish(source, len(rates) if most is None else most, Track({source: acceptance}, **track))


FIXED = Drafting(("mtp",), 7, is_auto=False)
AUTO = Drafting(("mtp",), 7, is_auto=True)
rates = st.lists(st.floats(0, 1), min_size=7, max_size=7)
wishes = st.lists(st.none() | st.builds(wish, rates, st.integers(0, 7)), min_size=1, max_size=8)


@given(wishes, st.integers(1, MAX_ROWS), st.booleans())
@settings(max_examples=60)
def test_a_step_never_has_too_many_rows(wanted, n_rows, is_auto):
    n_rows = max(n_rows, len(wanted))
    depths = DepthChooser(AUTO if is_auto else FIXED, costs({1: 1.0, 8: 1.2})).choose(wanted, n_rows=n_rows)
    assert sum(depths) + len(wanted) <= n_rows
    for depth, w in zip(depths, wanted, strict=True):
        assert 0 <= depth <= (0 if w is None else w.most)


@given(wishes, st.integers(1, MAX_ROWS))
@settings(max_examples=60)
def test_fixed_depths_shrink_from_the_deepest(wanted, n_rows):
    n_rows = max(n_rows, len(wanted))
    depths = DepthChooser(FIXED, StepCosts()).choose(wanted, n_rows=n_rows)
    asked = [0 if w is None else w.most for w in wanted]
    free = n_rows - len(wanted)
    assert sum(depths) == min(free, sum(asked)), "no row is wasted"
    cut = [d for d, a in zip(depths, asked, strict=True) if d < a]
    assert all(max(depths) - d <= 1 for d in cut), "nobody is cut while another one is deeper"


@given(st.lists(rates, min_size=1, max_size=2), st.floats(0.01, 0.6), st.floats(0.0, 0.4))
@example([[0.5] + [0.0] * 6, [0.625, 1.0] + [0.0] * 5], 0.0625, 0.375)  # the first of both, for they share a pass
@settings(max_examples=40, deadline=None)
def test_auto_takes_what_promises_most_tokens_a_second(by_sequence, extra, pass_s):
    """Against every combination of depths up to 3."""
    n, n_rows = len(by_sequence), 8
    measured = costs({rows: 1.0 + extra * (rows - 1) for rows in range(1, 9)}, pass_s=pass_s)
    wanted = [wish(r[:3]) for r in by_sequence]

    def speed(depths):
        tokens = sum(1 + sum(w.chances[:d]) for w, d in zip(wanted, depths, strict=True))
        return tokens / (measured.ratio(n + sum(depths), least=n) + max(depths) * measured.per_pass)

    chosen = DepthChooser(AUTO, measured).choose(wanted, n_rows=n_rows)
    best = max(speed(d) for d in itertools.product(range(4), repeat=n) if sum(d) + n <= n_rows)
    assert speed(chosen) >= (best if any(chosen) else best / 1.0301) - 1e-9


def test_expensive_rows_or_bad_drafts_mean_none():
    assert DepthChooser(AUTO, costs({1: 1.0, 2: 2.5})).choose([wish([0.9] * 3)], n_rows=8) == [0]
    assert DepthChooser(AUTO, costs({1: 1.0, 8: 1.1})).choose([wish([0.01] * 3)], n_rows=8) == [0]
    assert DepthChooser(AUTO, costs({1: 1.0, 8: 1.1}, pass_s=0.02)).choose([wish([0.9] * 7)], n_rows=8) == [7]
    good, bad = wish([0.9] * 3), wish([0.05] * 3)
    assert DepthChooser(AUTO, costs({2: 1.0, 8: 1.2})).choose([bad, good], n_rows=8) == [0, 3]


def test_without_a_plain_step_to_compare_with_one_is_made():
    measured = costs({4: 1.0})
    chooser = DepthChooser(AUTO, measured)
    assert chooser.choose([wish([0.9] * 3)], n_rows=8) == [0]
    measured.observe(1, step_s=0.9, n_passes=0, draft_s=0.0)
    assert chooser.choose([wish([0.9] * 3)], n_rows=8) != [0]


def steps_of(n_tokens, *, is_right, measured):
    """A text of `n_tokens`, played with depths chosen by auto: what was drafted at each step."""
    track = Track({"mtp": Acceptance((0.7,) * 3)})
    chooser, played, n = DepthChooser(AUTO, measured), [], 0
    while n < n_tokens:
        was_due = track.is_due
        (depth,) = chooser.choose([Wish("mtp", 3, track)], n_rows=4)
        n_right = depth if is_right(n) else 0
        track.observe("mtp", depth, n_accepted=n_right, was_due=was_due and depth == 1)
        step_s = 1.0 + 0.3 * depth
        measured.observe(1 + depth, step_s=step_s, n_passes=depth, draft_s=0.2 * depth)
        played.append((n, depth, step_s + 0.2 * depth))
        n += 1 + n_right
    return played


def test_a_text_nobody_can_guess_costs_little():
    played = steps_of(600, is_right=lambda n: False, measured=StepCosts())
    assert sum(seconds for _, _, seconds in played) <= 1.03 * 600
    drafted = [n for n, depth, _ in played if depth]
    assert max(b - a for a, b in itertools.pairwise(drafted)) > PROBE_STEPS[0] * 8, "probes become rare"


def test_a_text_that_becomes_easy_is_found_out():
    played = steps_of(1200, is_right=lambda n: n > 300, measured=StepCosts())
    found = next(n for n, depth, _ in played if n > 300 and depth == 3)
    assert found < 300 + PROBE_STEPS[1] + 50
    late = [depth for n, depth, _ in played if n > found + 60]
    assert sum(depth == 3 for depth in late) > 0.9 * len(late)
