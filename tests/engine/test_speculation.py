"""Drafts change speed alone: with every drafter, depth and quality of drafts each answer is the one computed alone.

Models with random weights draft badly, so most tests replace what the MTP block says by the answer itself, with errors:
then steps accept anything from no draft to all of them.
"""

import json
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest

from makeway import Engine, EngineConfig, SamplingParams, UserError
from makeway.experts.trace import TraceReader
from makeway.kv import BLOCK_TOKENS, Batch
from makeway.text.grammar import Grammar, GrammarVocabulary
from tests.conftest import DATA, golden_path
from tests.engine import rig
from tests.engine.test_invariance import BRIEF, LONG, story

FILE = rig.QWEN35MOE


@pytest.fixture(autouse=True, scope="module")
def _tight():
    with rig.tight():
        yield


def guess(engine, truths, *, quality, seed=0):
    """From now on the MTP block drafts the truth, by request, with probability `quality`, and else anything."""
    loop, rng = engine._loop, np.random.default_rng(seed)
    step = loop.speculation._step
    draft = step.draft

    def drafts(parts, states, *, ahead):
        found = draft(parts, states, ahead=ahead)
        for row, (sequence, _) in zip(found.logits, parts, strict=True):
            truth = next(truths[i] for i, s in loop._sequences.items() if s is sequence)
            at = sequence.length + ahead + 1
            is_right = at < len(truth) and rng.random() < quality
            row[truth[at] if is_right else int(rng.integers(len(row)))] = row.max() + 1
        return replace(found, best=found.logits.argmax(dim=-1))

    step.draft = drafts


def truth(file, tokens, sampling):
    return [*tokens, *(token for token, _ in rig.alone(file, tokens, sampling))]


def play(file, parts, *, quality=0.7, n_first=2, check_each=None, **config):
    """Answers to `parts`, the first ones together and the others while these answer: each as computed alone. Returns
    the status and the finish events."""
    config = {"drafter": "mtp", "audit": True} | config
    with rig.open_engine(file, **config) as engine:
        if "mtp" in config["drafter"]:
            guess(engine, [truth(file, *part) for part in parts], quality=quality)
        if check_each is not None:
            check_each(engine)
        ids = [engine.add(tokens, sampling) for tokens, sampling in parts[:n_first]]
        events = rig.run(engine, until=lambda events: len(rig.said(events, ids[0])) >= 2)
        ids += [engine.add(tokens, sampling) for tokens, sampling in parts[n_first:]]
        rig.run(engine, events)
        assert [e.text for e in events if e.kind == "error"] == []
        for i, (tokens, sampling) in zip(ids, parts, strict=True):
            assert rig.said(events, i) == rig.alone(file, tokens, sampling), f"request {i}"
        rig.check_idle(engine)
        return engine.status(), [e for e in events if e.kind == "finish"]


CASES = [
    # drafter, depth, quality, slots, handover, chunk
    ("mtp", 1, 0.5, 0, "auto", None),
    ("mtp", 2, 0.9, 3, "always", 7),
    ("mtp", 3, 0.6, 99, "never", None),
    ("mtp", 7, 1.0, 2, "always", 1),
    ("mtp", 7, 0.8, 1, "auto", 7),
    ("mtp", "auto", 0.9, 2, "auto", None),
    ("mtp+lookup", 3, 0.7, 2, "always", None),
    ("mtp+lookup", "auto", 0.3, 99, "auto", 7),
    ("lookup", 7, 0.0, 2, "always", None),
]


@pytest.mark.parametrize(("drafter", "depth", "quality", "slots", "handover", "chunk"), CASES)
def test_identity(drafter, depth, quality, slots, handover, chunk):
    """With preemption: the prompts are so long that not all answers have KV blocks to the end."""
    lengths = BRIEF if chunk == 1 else LONG
    config = {"slots": slots, "handover": handover, "chunk": chunk}
    status, _ = play(FILE, story(FILE, lengths), quality=quality, drafter=drafter, draft_depth=depth, **config)
    if isinstance(depth, int) and "mtp" in drafter:
        assert status["drafts"]["n_drafted"] > 0
        assert (status["drafts"]["n_accepted"] > 0) == (quality > 0)


@pytest.mark.slow
@pytest.mark.parametrize("file", [FILE, "qwen4exp-base-bf16.gguf"])
@pytest.mark.parametrize("drafter", ["mtp", "mtp+lookup", "lookup"])
@pytest.mark.parametrize("depth", [1, 2, 3, 7, "auto"])
def test_identity_of_every_drafter_and_depth(file, drafter, depth):
    cases = [(1, "always"), (0, "auto"), (3, "auto"), (99, "never")]
    for i, (slots, handover) in enumerate(cases if file == FILE else cases[:1]):
        config = {"slots": slots, "handover": handover, "chunk": (1, 7, None)[i % 3], "sweep_tokens": (None, 20)[i % 2]}
        play(file, story(file, LONG), quality=(0.5, 0.8)[i % 2], drafter=drafter, draft_depth=depth, **config)


@pytest.mark.parametrize("file", [rig.QWEN4EXP, rig.QWEN3MOE])
def test_text_is_copied_where_there_is_no_block(file):
    """Given answers that repeat themselves are copied and accepted; what follows is the model's own."""
    prompt = list(rig.prompt(file, 12))
    given = (prompt * 3)[:30]
    with rig.open_engine(file, drafter="lookup", draft_depth=4, context=128, parallel=1) as engine:
        i = engine.add(prompt, rig.greedy(36), given=given)
        events = rig.run(engine)
        rig.check_idle(engine)
    drafts = next(e.timings.drafts for e in events if e.kind == "finish")
    assert drafts.n_accepted >= 15
    answer = rig.said(events, i)
    assert [token for token, _ in answer[:30]] == given
    assert answer[30:] == rig.alone(file, (*prompt, *given), rig.greedy(6))


# -- sampling --------------------------------------------------------------------------------------


def seeds(n):
    """Answers of 5 tokens with a seed and a temperature each."""
    return [
        (
            rig.prompt(FILE, 4, start=seed),
            SamplingParams(
                max_tokens=5, ignore_eos=True, logprobs=20, seed=seed, temperature=(0.3, 0.8, 1.5)[seed % 3]
            ),
        )
        for seed in range(n)
    ]


def test_the_same_seed_gives_the_same_text():
    status, _ = play(FILE, seeds(9), quality=0.7, n_first=9, draft_depth=3, slots=3)
    assert status["drafts"]["n_accepted"] > 5


@pytest.mark.slow
def test_a_hundred_seeds_give_the_same_texts():
    play(FILE, seeds(100), quality=0.7, n_first=100, draft_depth=3, slots=3)


def one_by_one(file, requests, *, drafter, truths=None, **config):
    """Events by request, of requests (tokens, sampling, grammar) in one engine."""
    config = {"context": 192, "parallel": 3, "slots": 99, "draft_depth": 3 if drafter != "none" else 0} | config
    with rig.open_engine(file, drafter=drafter, **config) as engine:
        if truths is not None:
            guess(engine, truths, quality=0.8)
        for tokens, sampling, grammar in requests(engine):
            engine.add(tokens, sampling, grammar=grammar)
        events = rig.run(engine)
        rig.check_idle(engine)
        return [
            [(e.kind, e.token, e.text, e.logprobs, e.reason, e.stop_string) for e in events if e.request_id == i]
            for i in range(engine._next_id)
        ], events


def test_penalties_bias_stops_limits_and_grammars_see_the_tokens_in_order():
    """The very events of an engine without drafts, in the same order for each request."""
    schema = json.dumps({"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3})
    more = {"temperature": 0.9, "seed": 5, "logprobs": 3}
    stops = []

    def requests(engine):
        vocabulary = GrammarVocabulary(engine.tokenizer, n_vocab=engine.model.facts.n_vocab)
        grammar = Grammar("json_schema", schema).compile(vocabulary)
        prompt = rig.prompt(FILE, 9)
        return [
            (prompt, SamplingParams(max_tokens=14, ignore_eos=True, **more), None),
            (prompt, SamplingParams(max_tokens=14, ignore_eos=True, repetition_penalty=1.6, **more), None),
            (prompt, SamplingParams(max_tokens=14, presence_penalty=1.1, frequency_penalty=0.7, **more), None),
            (prompt, SamplingParams(max_tokens=14, logit_bias={7: 4.0, 9: -100.0}, **more), None),
            (prompt, SamplingParams(max_tokens=14, ignore_eos=True, stop=tuple(stops), **more), None),
            (prompt, SamplingParams(max_tokens=1, **more), None),
            (prompt, SamplingParams(max_tokens=40, **more), grammar),
            (
                prompt,
                SamplingParams(max_tokens=40, logit_bias=dict.fromkeys(range(512), -float("inf")), **more),
                grammar,
            ),
        ]

    plain, _ = one_by_one(FILE, requests, drafter="none")
    text = "".join(event[2] for event in plain[0])
    stops.append(text[len(text) // 2 : len(text) // 2 + 2])
    plain, events = one_by_one(FILE, requests, drafter="none")
    assert plain[4][-1][4] == "stop"
    assert plain[6][-1][4] == "stop"
    assert plain[7][-1][0] == "error"
    truths = [
        [*rig.prompt(FILE, 9), *(e.token for e in events if e.request_id == i and e.token is not None)]
        for i in range(len(plain))
    ]
    drafted, events = one_by_one(FILE, requests, drafter="mtp", truths=truths)
    for wanted, got in zip(plain, drafted, strict=True):
        assert [e for e in got if e[0] != "progress"] == [e for e in wanted if e[0] != "progress"]
    assert sum(e.timings.drafts.n_accepted for e in events if e.timings is not None) > 20


# -- rows ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("parallel", "depth"), [(3, 7), pytest.param(5, 3, marks=pytest.mark.slow), (11, 2)])
def test_a_full_step_drafts_less_and_then_sequences_take_turns(parallel, depth, monkeypatch):
    parts = [(rig.prompt(FILE, 4, start=i), rig.greedy(6 + i % 4)) for i in range(parallel)]
    widths, shares = set(), set()
    make = Batch.of

    def watched(parts, **options):
        if "keep_rows" in options:
            widths.add(sum(len(tokens) for _, tokens in parts))
            shares.add(tuple(sorted(len(tokens) for _, tokens in parts)))
        return make(parts, **options)

    monkeypatch.setattr(Batch, "of", watched)
    status, ends = play(FILE, parts, n_first=parallel, parallel=parallel, draft_depth=depth, context=192)
    assert status["plan"]["rows"] == 8
    assert len(ends) == parallel
    assert max(widths) == 8
    if parallel == 3:
        assert (2, 3, 3) in shares, "depth shrinks first, the deepest first"
    if parallel == 5:
        assert (1, 1, 2, 2, 2) in shares
    assert all(len(share) <= 8 for share in shares)


# -- counters, trace, plan -------------------------------------------------------------------------


def test_what_was_drafted_is_counted_and_traced(tmp_path):
    n = 17
    parts = [(rig.prompt(FILE, 6), rig.greedy(n))]
    status, (end,) = play(
        FILE, parts, quality=1.0, n_first=1, parallel=1, draft_depth=3, trace=tmp_path / "t", context=64
    )
    drafts = end.timings.drafts
    assert (drafts.n_steps, drafts.n_drafted, drafts.n_accepted) == (4, 12, 12)
    assert drafts.by_place == [[4, 4]] * 3
    assert drafts.depths == [0, 0, 0, 4]
    assert drafts.acceptance == 1.0
    assert drafts.tokens_per_step == 4.0
    assert n == 1 + drafts.n_steps + drafts.n_accepted
    wanted = {
        "drafter": "mtp",
        "depth": 3,
        "is_auto": False,
        "n_drafted": 12,
        "acceptance": 1.0,
        "tokens_per_step": 4.0,
    }
    assert wanted.items() <= status["drafts"].items()
    assert status["n_steps"] == 4
    with TraceReader(tmp_path / "t") as trace:
        records = [record.ids for record in trace if record.phase == "decode"]
    assert [len(ids) for ids in records] == [4] * 4
    for ids in records:
        assert (ids[:, :-1] >= 0).all()
        assert (ids[:-1, -1] >= 0).all(), "the MTP block read the last token and two drafts"
        assert (ids[-1, -1] == -1).all()


def test_a_file_with_a_block_runs_without_it():
    with rig.open_engine(FILE, drafter="none") as off, rig.open_engine(FILE, drafter="mtp") as on:
        assert not any("MTP" in region.name or region.name == "replay rows" for region in off.plan.regions)
        assert any("MTP" in region.name for region in on.plan.regions)
        assert len(on.plan.layers) == len(off.plan.layers) + 1
        assert off.memory.store.nbytes < on.memory.store.nbytes
        for engine in (off, on):
            i = engine.add(rig.prompt(FILE, 9), rig.greedy(4))
            assert rig.said(rig.run(engine), i) == rig.alone(FILE, rig.prompt(FILE, 9), rig.greedy(4))


# -- with kept prefixes ----------------------------------------------------------------------------


def test_an_answers_blocks_are_kept_and_the_block_goes_on_drafting_the_same():
    """The second turn reads only what is new, and its first drafts have the bits of an engine that read it all."""
    prompt, sampling = rig.prompt(FILE, 110), SamplingParams(max_tokens=2 * BLOCK_TOKENS - 110 + 6, ignore_eos=True)
    said, drafted = [], []
    config = {"drafter": "mtp", "draft_depth": 3, "context": 256, "parallel": 1, "slots": 99}
    for prefix_ram in (0, None):
        with rig.open_engine(FILE, **config, prefix_ram=prefix_ram) as engine:
            if prefix_ram is None:
                guess(engine, {0: [*prompt, *said[0]]}, quality=0.8)
            i = engine.add(prompt, sampling)
            answer = [token for token, _ in rig.said(rig.run(engine), i)]
            said.append(answer)
            step, rows = engine._loop.speculation._step, []
            draft = type(step).draft

            def spy(parts, states, *, ahead, step=step, draft=draft, rows=rows):
                out = draft(step, parts, states, ahead=ahead)
                rows.append(out.logits.clone())
                return out

            step.draft = spy
            turn = [*prompt, *answer, 3, 4, 5]
            i = engine.add(turn, SamplingParams(max_tokens=5, ignore_eos=True))
            events = rig.run(engine)
            said.append([token for token, _ in rig.said(events, i)])
            end = next(e for e in events if e.kind == "finish")
            assert end.timings.n_cached == (2 * BLOCK_TOKENS if prefix_ram is None else 0)
            drafted.append(rows)
    assert said[:2] == said[2:]
    assert len(drafted[0]) == len(drafted[1]) >= 3
    for cold, warm in zip(*drafted, strict=True):
        assert cold.equal(warm)


# -- the demo model --------------------------------------------------------------------------------


def test_the_demo_model_drafts_well():
    """Held-out text, continued greedily: most first drafts are right, and the text is that of no drafts."""
    path = resources.files("makeway") / "data" / "demo.gguf"
    text = (DATA / "heldout.txt").read_text(encoding="utf-8")
    answers = []
    for drafter in ("none", "mtp"):
        depth = 2 if drafter == "mtp" else "auto"
        config = EngineConfig(device="cpu", context=256, parallel=1, drafter=drafter, draft_depth=depth, prefix_ram=0)
        with Engine.load(path, config) as engine:
            tokens = engine.tokenizer.encode(text)[1000:1032]
            i = engine.add(tokens, SamplingParams(max_tokens=16, ignore_eos=True))
            answers.append(rig.said(rig.run(engine), i))
            drafts = engine.status()["drafts"]
    assert answers[0] == answers[1]
    (n_first, right_first), _ = drafts["by_place"]
    assert right_first / n_first > 0.5
    assert drafts["tokens_per_step"] > 1.6


def test_a_draft_block_missing_from_the_file_is_told_before_anything_is_loaded():
    for file, config, message in (
        (rig.QWEN3MOE, {"drafter": "mtp"}, "no MTP block; use --drafter lookup or none"),
        (rig.QWEN4EXP, {"drafter": "mtp+lookup"}, "no MTP block"),
        (rig.QWEN3MOE, {"drafter": "auto", "draft_depth": 2}, "no MTP block to draft with"),
        (FILE, {"drafter": "mtp", "draft_depth": 8}, "a step has 8"),
    ):
        with pytest.raises(UserError, match=message):
            Engine(golden_path(file), EngineConfig(device="cpu", **config))
