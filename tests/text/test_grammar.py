import json
import random
import re

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway import EngineFailed, UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from makeway.text.grammar import Grammar, GrammarVocabulary
from tests.conftest import ROOT

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["é", "ü/x", 'a"b']}, "minItems": 1},
        "home": {"$ref": "#/$defs/place"},
        "score": {"type": ["number", "null"]},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
    "$defs": {
        "place": {
            "type": "object",
            "properties": {"zip": {"type": "string", "pattern": "^[0-9]{5}$"}, "in": {"$ref": "#/$defs/place"}},
            "required": ["zip"],
        }
    },
}
N_PADDING = 24


@pytest.fixture(scope="module")
def tokenizer():
    path = ROOT / "src" / "makeway" / "data" / "demo.gguf"
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, source=path.name)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return GrammarVocabulary(tokenizer, n_vocab=tokenizer.n_tokens + N_PADDING)


@pytest.fixture(scope="module")
def closers(tokenizer):
    """Tokens that bring JSON nearer to its end: what a walk that has gone on for long prefers."""
    endings = [tokenizer.token_bytes(i) in (b'"', b"}", b"]", b'"}', b'"]', b"]}") for i in range(tokenizer.n_tokens)]
    return np.array(endings + [False] * N_PADDING)


def walk(compiled, tokenizer, closers, seed):
    """The text of a random answer that follows the masks, until the end."""
    random_ = random.Random(seed)
    controls = [i for i in range(tokenizer.n_tokens - 8, tokenizer.n_tokens) if i not in tokenizer.eos_ids]
    assert all(map(tokenizer.is_special, controls))
    state, ids = compiled.start(), []
    while True:
        mask = state.mask()
        assert mask.dtype == bool
        assert mask.shape == (tokenizer.n_tokens + N_PADDING,)
        assert not mask[tokenizer.n_tokens :].any()
        ends = [i for i in tokenizer.eos_ids if mask[i]]
        assert len(ends) in (0, len(tokenizer.eos_ids))
        assert not mask[controls].any()
        assert ends or not state.is_done
        if ends and (state.is_done or random_.random() < 0.3 or len(ids) > 40):
            state.accept(random_.choice(ends))
            assert state.is_done
            return tokenizer.decode(ids)
        if len(ids) > 40 and (mask & closers).any():
            mask &= closers
        mask[list(tokenizer.eos_ids)] = False
        choices = np.flatnonzero(mask)
        token = int(choices[random_.randrange(len(choices))])
        state.accept(token)
        ids.append(token)
        assert len(ids) < 2000


def test_200_random_walks_through_a_schema_parse_and_validate(tokenizer, vocabulary, closers):
    compiled = Grammar("json_schema", json.dumps(PERSON)).compile(vocabulary)
    texts = {walk(compiled, tokenizer, closers, seed) for seed in range(200)}
    assert len(texts) == 200
    for text in texts:
        jsonschema.validate(json.loads(text), PERSON)


def test_random_walks_through_the_other_kinds(tokenizer, vocabulary, closers):
    regex = r"([0-9]{1,3}\.){3}[0-9]{1,3}|é+[^a-z\n]?"
    gbnf = 'root ::= "[" item ("," item)* "]"\nitem ::= [1-9] [0-9]* | root'
    lark = 'start: "(" start ")" | NAME\nNAME: /[a-c]{1,4}/'
    kinds = {"json_object": "", "regex": regex, "gbnf": gbnf, "lark": lark}
    compiled = {kind: Grammar(kind, source).compile(vocabulary) for kind, source in kinds.items()}
    for seed in range(20):
        texts = {kind: walk(grammar, tokenizer, closers, seed) for kind, grammar in compiled.items()}
        assert isinstance(json.loads(texts["json_object"]), dict)
        assert re.fullmatch(regex, texts["regex"])
        assert isinstance(json.loads(texts["gbnf"]), list)
        depth = texts["lark"].count("(")
        assert re.fullmatch(f"[(]{{{depth}}}[a-c]{{1,4}}[)]{{{depth}}}", texts["lark"])


def test_the_mask_is_what_the_language_allows(tokenizer, vocabulary):
    """Every token against Python's own engine: it is allowed exactly when some text of a small language starts so."""
    compiled = Grammar("regex", "a[bc]*d?").compile(vocabulary)
    state = compiled.start()
    state.accept(tokenizer.encode("a")[0])
    mask = state.mask()
    for i in range(tokenizer.n_tokens):
        text = tokenizer.token_bytes(i)
        expected = not tokenizer.is_special(i) and re.fullmatch(rb"[bc]*d?", text) is not None
        assert mask[i] == (expected or i in tokenizer.eos_ids), text


def test_characters_that_the_tokenizer_would_compose(tokenizer, vocabulary, closers):
    """The tokenizer composes e + U+0301 (NFC); what a schema demands must come out as written."""
    compiled = Grammar("json_schema", json.dumps({"const": "e\u0301 <think>"})).compile(vocabulary)
    assert json.loads(walk(compiled, tokenizer, closers, 0)) == "e\u0301 <think>"


@given(st.integers(0, 10**6), st.integers(0, 30), st.integers(0, 30))
@settings(max_examples=60, deadline=None)
def test_rollback_and_clone_give_the_state_as_it_was(tokenizer, vocabulary, seed, n, back):
    compiled = Grammar("json_schema", json.dumps(PERSON)).compile(vocabulary)
    random_ = random.Random(seed)
    state, ids, masks = compiled.start(), [], []
    for _ in range(n):
        masks.append(state.mask())
        ids.append(random_.choice(np.flatnonzero(masks[-1]).tolist()))
        state.accept(ids[-1])
        if state.is_done:
            break
    masks.append(state.mask())
    other = state.clone()
    back = min(back, len(ids))
    state.rollback(back)
    kept = len(ids) - back
    assert (state.mask() == masks[kept]).all()
    assert (other.mask() == masks[-1]).all()
    for token, mask in zip(ids[kept:], masks[kept + 1 :], strict=True):
        state.accept(token)
        assert (state.mask() == mask).all()


def test_a_token_outside_the_mask_is_refused_and_changes_nothing(tokenizer, vocabulary):
    state = Grammar("regex", "ab").compile(vocabulary).start()
    before = state.mask()
    for token in (tokenizer.encode("b")[0], min(tokenizer.eos_ids), tokenizer.n_tokens, -1):
        with pytest.raises(EngineFailed, match="not what the grammar allows"):
            state.accept(token)
    assert (state.mask() == before).all()
    with pytest.raises(EngineFailed, match="taken back"):
        state.rollback(1)
    state.accept(tokenizer.encode("ab")[0])
    assert state.is_done
    assert set(np.flatnonzero(state.mask())) == tokenizer.eos_ids


def test_a_grammar_that_gets_lost_is_the_users_fault(vocabulary):
    """Without an end the forced text is endless, which llguidance finds out on the way."""
    state = Grammar("gbnf", 'root ::= "x" root').compile(vocabulary).start()
    state.accept(int(np.flatnonzero(state.mask())[0]))
    assert not state.is_done
    for _ in range(2):
        with pytest.raises(UserError, match=r"cannot be followed after 1 tokens: .*Too many items"):
            state.mask()
    state.rollback(1)
    with pytest.raises(UserError, match="cannot be followed"):
        state.clone().mask()


@pytest.mark.parametrize("reasoning", ["open", "optional"])
def test_reasoning_may_come_first(tokenizer, vocabulary, reasoning):
    compiled = Grammar("json_object", reasoning=reasoning).compile(vocabulary)
    thought = {"open": 'hm "{', "optional": "<think>hm {"}[reasoning]

    def follows(text):
        state = compiled.start()
        for byte in text.encode():  # a token a byte, as a model may
            token = next(i for i in range(tokenizer.n_tokens) if tokenizer.token_bytes(i) == bytes([byte]))
            state.accept(token)
        return state.is_done

    assert follows(thought + "</think>\n\n{}")
    assert not follows(thought)
    assert follows("{}") == (reasoning == "optional")
    with pytest.raises(EngineFailed):
        follows(thought + "</think>\n\nNo")
    if reasoning == "open":
        assert not compiled.start().mask()[list(tokenizer.eos_ids)].any()


@pytest.mark.parametrize(
    ("kind", "source", "words"),
    [
        ("json_schema", '{"type":', "no JSON: Expecting value: line 1 column 9"),
        ("json_schema", "[]", "must be an object"),
        ("json_schema", '{"properties": {"a~/b": {"items": {"type": "strin"}}}}', "at #/properties/a~0~1b/items: Inv"),
        ("json_schema", '{"anyOf": [{"type": "null"}, {"not": {}}]}', 'at #/anyOf/1: Unimplemented keys: ["not"]'),
        ("json_schema", '{"$ref": "#/$defs/x"}', "at #: Pointer '/$defs/x' does not exist"),
        ("json_schema", '{"$ref": "#"}', "wrong or not supported"),
        ("json_schema", '{"type": "string", "pattern": "a("}', "column 2: unclosed group"),
        ("json_schema", '{"x-guidance": {"lenient": true}, "uniqueItems": true}', "uniqueItems"),
        ("json_schema", '{"enum": []}', "Unsatisfiable"),
        ("json_schema", '{"enum": ["\\ud800"]}', "surrogate"),
        ("json_schema", '{"items":' * 900 + "{}" + "}" * 900, "levels"),
        ("regex", "x(a", "column 2: unclosed group"),
        ("regex", "a(?=b)", "column 2: look-around"),
        ("regex", "\ud800", "surrogate"),
        ("regex", "a" * 300_000, "300000 bytes"),
        ("gbnf", 'root ::= "a" nope', "column 14: there is no rule 'nope'"),
        ("gbnf", 'root ::= "a"\nx = "b"', "line 2"),
        ("gbnf", 'x ::= "a"', "no rule 'root'"),
        ("gbnf", "root ::= <[3]>", "line 1"),
        ("gbnf", "root ::= " + "(" * 5000, "groups"),
        ("lark", 'start: "a"\nx: @', "line 2, column"),
        ("lark", "", "no start rule"),
        ("lark", "start: " + "\n".join(f"a{i}: a{i + 1}" for i in range(3000)), "rules"),
        ("lark", 'start: /[^\\x00-\\U0010ffff]/ "a"', "grammar"),
    ],
)
def test_a_wrong_grammar_is_one_line_that_says_where(vocabulary, kind, source, words):
    with pytest.raises(UserError) as error:
        Grammar(kind, source).compile(vocabulary)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_the_largest_grammars_allowed_do_not_reach_the_end_of_the_stack(vocabulary):
    deep = {"$ref": "#/$defs/d0", "$defs": {f"d{i}": {"items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(380)}}
    deep["$defs"]["d380"] = {"type": "string"}
    Grammar("json_schema", json.dumps(deep)).compile(vocabulary)
    rules = "\n".join(f'a{i}: ((("y" a{i + 1} | "z")))' for i in range(240))
    Grammar("lark", f'start: a0\n{rules}\na240: "x"').compile(vocabulary)


def test_a_vocabulary_wider_than_the_logits_is_refused(tokenizer):
    with pytest.raises(UserError, match="logits"):
        GrammarVocabulary(tokenizer, n_vocab=tokenizer.n_tokens - 1)
