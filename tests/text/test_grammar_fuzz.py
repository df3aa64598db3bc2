"""Random grammars: each is used or refused in one line, and nothing takes the process down."""

import json
import random

import numpy as np
import pytest

from makeway import UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from makeway.text.grammar import Grammar, GrammarVocabulary
from tests.conftest import ROOT

KEYWORDS = [
    "type",
    "properties",
    "items",
    "anyOf",
    "oneOf",
    "allOf",
    "enum",
    "const",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "pattern",
    "format",
    "required",
    "additionalProperties",
    "patternProperties",
    "minItems",
    "maxItems",
    "prefixItems",
    "$ref",
    "$defs",
    "multipleOf",
    "minProperties",
    "$id",
    "title",
]
TYPES = ["string", "integer", "object", "array", "number", "boolean", "null"]
VALUES = [*TYPES, 0, 1, -1, 1e300, 10**30, True, None, "", "(", "^a+$", "date", "#", "#/$defs/a", [], {}, "\0", "é"]
LARK = [
    "|",
    "start: ",
    "a b\n",
    'a: "x" ',
    " b*\n",
    "b: /[a-z]+/\n",
    'B: "q" & /z/\n',
    'A: "a".."z"\n',
    "A: B+\n",
    "%ignore /\\s+/\n",
    "<think>",
    "<[8187]>",
    '%json {"type":"object"}',
    "x[lazy]: /a*/\n",
    "(",
    ")",
    "[",
    "]",
    '"',
    "'",
    "/",
    "\n",
    ":",
    "?",
    "*",
    "{2,3}",
    "~",
    "@sub",
    "%import common.INT\n",
    "INT",
    "(?i)",
    "\\",
]
GBNF = [
    "a",
    "b",
    "root",
    '"x"',
    "[a-z]",
    "(",
    ")",
    "*",
    "+",
    "?",
    "{2}",
    "{2,}",
    "\n",
    "a ::= ",
    "b ::= ",
    "[^\\n]",
    ".",
    '"\\n"',
    '"\\x41"',
    "#c",
    "\\",
    "[",
    '"',
] + ["|"]
REGEX = [*"ab()[]{}|*+?.^$\\-,012&~", "(?i)", "(?s:", "\\d", "\\p{L}", "[^", "a{3}", "\\b", "(?P<n>", "é", "{1,9999}"]


def schema(random_, depth):
    """A random JSON schema, mostly nonsense."""
    if depth == 0 or random_.random() < 0.15:
        return random_.choice([True, {}, random_.choice(VALUES)])
    out = {}
    for _ in range(random_.randint(1, 4)):
        key = random_.choice(KEYWORDS)
        if key in ("properties", "patternProperties", "$defs"):
            value = {random_.choice("abc^["): schema(random_, depth - 1) for _ in range(2)}
        elif key in ("anyOf", "oneOf", "allOf", "prefixItems"):
            value = [schema(random_, depth - 1) for _ in range(random_.randint(0, 3))]
        elif key in ("items", "additionalProperties"):
            value = schema(random_, depth - 1)
        else:
            value = random_.choice(TYPES if key == "type" else VALUES)
        out[key] = [value] if key in ("required", "enum") else value
    return out


def some(random_, words):
    return random_.choice(["", " "]).join(random_.choice(words) for _ in range(random_.randint(1, 12)))


@pytest.fixture(scope="module")
def vocabulary():
    path = ROOT / "src" / "makeway" / "data" / "demo.gguf"
    with open_gguf(path) as file:
        return GrammarVocabulary(Tokenizer.from_metadata(file.metadata, source=path.name))


@pytest.mark.parametrize(
    ("n", "seed"), [(400, 0), *(pytest.param(5_000, seed, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_random_grammars_are_used_or_refused(vocabulary, n, seed):
    random_ = random.Random(seed)
    n_used = 0
    for _ in range(n):
        kind = random_.choice(["json_schema", "lark", "gbnf", "regex"])
        source = {
            "json_schema": lambda: json.dumps(schema(random_, 3)),
            "lark": lambda: "start: " + some(random_, LARK),
            "gbnf": lambda: "root ::= " + some(random_, GBNF),
            "regex": lambda: some(random_, REGEX),
        }[kind]()
        try:
            state = Grammar(kind, source, reasoning=random_.choice(["none", "open"])).compile(vocabulary).start()
            n_tokens = 0
            while n_tokens < 10 and not state.is_done:
                state.accept(random_.choice(np.flatnonzero(state.mask()).tolist()))
                n_tokens += 1
            state.rollback(random_.randint(0, n_tokens))
            assert state.mask().any()
            n_used += 1
        except UserError as error:
            message = str(error)
            assert "\n" not in message, source
            assert len(message) < 700, source
    assert 0.05 * n < n_used < n
