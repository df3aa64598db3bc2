"""Nothing but speed may change the tokens: slots, policy, lending, chunk, sweep, company, preemption, trace."""

import itertools

import pytest

from tests.devices import LazyDevice
from tests.engine import rig

FACTORS = {
    "file": rig.FILES[::-1],  # the quickest first: the covering set holds it most often
    "slots": (0, 1, 3, 99),
    "policy": ("lru", "lfu-decay", "lfru", "static", "random"),
    "handover": ("never", "auto", "always"),
    "chunk": (None, 7, 1),  # the quick ones first here, too
    "sweep_tokens": (None, 20, 7),
    "prefix_ram": (0, None),
    "drafter": ("none", "auto", "lookup"),
}
N_ANSWER = 6
LONG = (61, 62, 61, 9)  # each of three answers grows into a second block of 64 tokens; together there are five
BRIEF = (20, 18, 5, 9)


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


def covering():
    """Cases that hold every pair of values of any two factors, chosen greedily."""
    bit_of, masks = {}, []  # a bit for every pair of values, and a combination's pairs as a mask
    combinations = [dict(zip(FACTORS, values, strict=True)) for values in itertools.product(*FACTORS.values())]
    for case in combinations:
        pairs = itertools.combinations(case.items(), 2)
        masks.append(sum(1 << bit_of.setdefault(pair, len(bit_of)) for pair in pairs))
    open_pairs, cases = (1 << len(bit_of)) - 1, []
    while open_pairs:
        best = max(range(len(masks)), key=lambda i: (masks[i] & open_pairs).bit_count())
        cases.append(combinations[best])
        open_pairs &= ~masks[best]
    return cases


def story(file, lengths):
    """Prompts and sampling; the first two come together, the others while these answer."""
    return [
        (rig.prompt(file, n), rig.sampled(N_ANSWER, i) if i % 2 else rig.greedy(N_ANSWER))
        for i, n in enumerate(lengths)
    ]


def check(case, folder, *, lengths=LONG, with_trace=False):
    """Three answers at once and a fourth later in one engine: each as computed alone. Answers to LONG prompts need
    more KV blocks than there are."""
    config = dict(case)
    file = config.pop("file")
    if config["policy"] == "static":
        config["profile"] = rig.write_profile(file, folder / "profile", drafts=config.get("drafter") == "auto")
    if with_trace:
        config["trace"] = folder / "trace"
    with rig.open_engine(file, device=LazyDevice(), audit=True, **config) as engine:
        parts = story(file, lengths)
        ids = [engine.add(tokens, sampling) for tokens, sampling in parts[:2]]
        events, lent = [], set()
        while engine.busy:
            events += engine.step()
            if len(ids) == 2 and len(rig.said(events, ids[0])) >= 2:
                ids += [engine.add(tokens, sampling) for tokens, sampling in parts[2:]]
            if engine.memory.swing.lending is not None and engine.plan.n_slots:
                lending = engine.memory.swing.lending
                lent.add("all" if lending.n_kept == 0 else "some" if lending.n_lent else "none")
        assert [e.text for e in events if e.kind == "error"] == []
        for i, (tokens, sampling) in zip(ids, parts, strict=True):
            assert rig.said(events, i) == rig.alone(file, tokens, sampling)
        rig.check_idle(engine)
        assert (engine.status()["n_preempted"] >= 1) == (lengths is LONG)
        return lent


def test_every_pair_of_settings(tmp_path):
    lent = set()
    for i, case in enumerate(covering()):
        folder = tmp_path / str(i)
        folder.mkdir()
        lengths = LONG if i % 3 == 0 and case["chunk"] != 1 else BRIEF
        lent |= check(case, folder, lengths=lengths, with_trace=i % 2 == 0)
    assert lent >= {"none", "all"}


@pytest.mark.parametrize(("file", "slots"), [(rig.QWEN4EXP, 3), (rig.QWEN35MOE, 99), (rig.QWEN3MOE, 12)])
def test_some_slots_are_lent_and_some_stay(file, slots, tmp_path):
    case = {"file": file, "slots": slots, "policy": "lfru", "handover": "auto", "chunk": None, "sweep_tokens": None}
    assert "some" in check(case, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("file", rig.FILES)
@pytest.mark.parametrize("slots", FACTORS["slots"])
def test_every_combination(file, slots, tmp_path):
    rest = [FACTORS[name] for name in ("policy", "handover", "chunk", "sweep_tokens")]
    for i, (policy, handover, chunk, sweep_tokens) in enumerate(itertools.product(*rest)):
        folder = tmp_path / str(i)
        folder.mkdir()
        case = {"policy": policy, "handover": handover, "chunk": chunk, "sweep_tokens": sweep_tokens}
        case |= {"prefix_ram": (0, None)[i % 2], "drafter": FACTORS["drafter"][i % 5 % 3]}
        check({"file": file, "slots": slots} | case, folder, with_trace=i % 7 == 0)
