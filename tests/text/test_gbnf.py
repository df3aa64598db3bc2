import re

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from makeway import UserError
from makeway.gguf import open_gguf
from makeway.text import Tokenizer
from makeway.text.gbnf import gbnf_to_lark
from makeway.text.grammar import Grammar, GrammarVocabulary
from tests.conftest import ROOT


@pytest.fixture(scope="module")
def tokenizer():
    path = ROOT / "src" / "makeway" / "data" / "demo.gguf"
    with open_gguf(path) as file:
        return Tokenizer.from_metadata(file.metadata, source=path.name)


@pytest.fixture(scope="module")
def vocabulary(tokenizer):
    return GrammarVocabulary(tokenizer)


def accepts(compiled, tokenizer, text):
    """Whether the text is a whole answer, read with the tokens that the mask offers for it."""
    state, data = compiled.start(), text.encode()
    while data:
        mask = state.mask()
        lengths = range(len(data), 0, -1)
        by_bytes = {tokenizer.token_bytes(i): i for i in mask.nonzero()[0].tolist() if not tokenizer.is_special(i)}
        token = next((by_bytes[data[:n]] for n in lengths if data[:n] in by_bytes), None)
        if token is None:
            return False
        state.accept(token)
        data = data[len(tokenizer.token_bytes(token)) :]
    return bool(state.mask()[list(tokenizer.eos_ids)].all())


CASES = [
    ('root ::= "a" "b"', ["ab"], ["a", "b", "", "abc"]),
    ('root ::= "a" | "b" |', ["a", "b", ""], ["ab"]),
    ('root ::= ("a" | "b")* "c"?', ["", "abba", "bc", "c"], ["ca", "cc"]),
    ('root ::= "x"{2} "y"{1,} "z"{0,2}', ["xxy", "xxyyzz"], ["xy", "xxyzzz", "xxz"]),
    ("root ::= [a-cx\\-]+", [], None),
    ("root ::= [a-cx-]+", ["abcx-"], ["d", "w"]),
    ("root ::= [^a-c\\n]+", ["xyz é-^"], ["xa", "x\n", ""]),
    (r'root ::= "\x41\u00e9\U0001F600\n\t\"\\/" [\]\[/]', ['Aé😀\n\t"\\/]', 'Aé😀\n\t"\\//'], ["Aé"]),
    ("root ::= .{3}", ["a\né", "..."], ["ab"]),
    ('root ::= "(" root ")" | "()"', ["()", "((()))"], ["(()", "(())("]),
    ("root ::= a-b A_b\na-b ::= [0-9]\nA_b ::= [a-z] # a comment\n\n# another\n", ["1a"], ["a1", "11"]),
    ('root ::= (\n "a"\n | # c\n "b"\n)\n', ["a", "b"], ["ab"]),
    ('root ::= "a" |\n "b"', ["a", "b"], ["ab"]),
    ('root ::= root "a" | "a"', ["a", "aaa"], [""]),
    ('start ::= "b"\nroot ::= "a" start', ["ab"], ["b"]),
    ('root ::= [a-z]+ "a"', ["xa", "aaa"], ["x", "a"]),
    ('root ::= word "a"\nword ::= [a-z]+', ["xa", "aaa"], ["x", "a"]),
    ("root ::= x x\nx ::= [0-9] | [0-9] [0-9]", ["12", "123", "1234"], ["1", "12345"]),
    ('root ::= "a"?+', ["", "aa"], ["b"]),
    ('root ::= empty "x"\nempty ::= ""', ["x"], [""]),
]


@pytest.mark.parametrize(("grammar", "inside", "outside"), CASES, ids=[c[0][:30] for c in CASES])
def test_the_language_is_the_one_that_was_written(tokenizer, vocabulary, grammar, inside, outside):
    if outside is None:  # llama.cpp knows no such escape either
        with pytest.raises(UserError, match=r"line 1, column 15: unknown escape"):
            gbnf_to_lark(grammar)
        return
    compiled = Grammar("gbnf", grammar).compile(vocabulary)
    for text in inside:
        assert accepts(compiled, tokenizer, text), text
    for text in outside:
        assert not accepts(compiled, tokenizer, text), text


@pytest.mark.parametrize(
    ("grammar", "words"),
    [
        ("", "no rule 'root'"),
        ('x ::= "a"', "no rule 'root'"),
        ('root ::= "a" nope', "line 1, column 14: there is no rule 'nope'"),
        ('root = "a"', "line 1, column 6: a rule is written"),
        ('root ::= "a"\n"b"', "line 2, column 1: a rule is written"),
        ('root ::= "a" )', r"line 1, column 14: unexpected '\)'"),
        ('root ::= ("a"', "line 1, column 14: a group is not closed"),
        ('root ::= "a', "line 1, column 10: a text"),
        ("root ::= [a", "line 1, column 10: a text or a class"),
        ("root ::= []", "column 11: a class of characters is empty"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ('root ::= "\\q"', "column 11: unknown escape"),
        ('root ::= "\\x4"', "column 11: unknown escape"),
        ('root ::= "\\ud800"', "no character"),
        ('root ::= "a"{3,2}', "column 13: a repetition must not end below"),
        ('root ::= "a"{x}', "column 13: a repetition is written"),
        ("root ::= <think>", "column 10: unexpected '<'"),
        ("root ::= !<think>", "column 10: unexpected '!'"),
        ('root ::= "a"\nroot ::= "b"', "line 2, column 1: the rule 'root' is there twice"),
        ("root ::= " + "(" * 5000, "too deeply"),
    ],
)
def test_what_is_wrong_is_said_with_its_place(grammar, words):
    with pytest.raises(UserError, match=words) as error:
        gbnf_to_lark(grammar)
    assert "\n" not in str(error.value)


WORDS = st.recursive(
    st.sampled_from(['"a"', '"ab"', "[ab]", "[^a]", "."]),
    lambda inner: (
        st.builds("({} {})".format, inner, inner)
        | st.builds("({} | {})".format, inner, inner)
        | st.builds("({}){}".format, inner, st.sampled_from("*?+"))
    ),
    max_leaves=5,
)


@given(WORDS, st.text("abc", max_size=5))
@example('("a" | "ab") "b"', "ab")
@settings(max_examples=100, deadline=None)
def test_a_grammar_without_recursion_is_a_regular_expression(tokenizer, vocabulary, words, text):
    """Against Python's `re`."""
    compiled = Grammar("gbnf", f"root ::= word\nword ::= {words}").compile(vocabulary)
    expected = re.fullmatch(words.replace('"', "").replace(" ", ""), text) is not None
    assert accepts(compiled, tokenizer, text) == expected
