import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from makeway.errors import UserError
from makeway.text import Detokenizer, StopMatcher, Tokenizer
from tests.text.test_tokenizer import metadata


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_metadata(metadata(), source="test")


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_pieces_add_up_to_the_whole_and_never_split_a_character(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, tokenizer.n_tokens - 1), max_size=40))
    for skip in (True, False):
        stream = Detokenizer(tokenizer, skip_special=skip)
        pieces = [stream.push(i) for i in ids]
        pieces.append(stream.flush())
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip)


def test_a_character_in_several_tokens_appears_at_once(tokenizer):
    text = "é🙂👍🏽漢"
    ids = tokenizer.encode(text)
    assert len(ids) > len(text), "the small vocabulary must split characters for this test to mean anything"
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(i) for i in ids]
    assert stream.flush() == ""
    assert "�" not in "".join(pieces)
    assert "".join(pieces) == text


@settings(max_examples=300, deadline=None)
@given(
    data=st.binary(max_size=24)
    | st.lists(st.sampled_from([0x41, 0x80, 0xA0, 0xBF, 0xC3, 0xE0, 0xED, 0xE2, 0xF0, 0xF4, 0xFF]), max_size=24).map(
        bytes
    )
)
def test_bytes_that_are_no_text_become_what_a_whole_decode_makes_of_them(tokenizer, data):
    of_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.n_tokens) if len(tokenizer.token_bytes(i)) == 1}
    stream = Detokenizer(tokenizer)
    pieces = [stream.push(of_byte[bytes((byte,))]) for byte in data]
    assert "".join(pieces) + stream.flush() == data.decode("utf-8", errors="replace")


def test_an_invalid_id_is_refused(tokenizer):
    for skip in (True, False):
        with pytest.raises(UserError, match="out of range"):
            Detokenizer(tokenizer, skip_special=skip).push(tokenizer.n_tokens)


def first_complete(text, stops):
    """Brute force: the stop string complete first (the longest of several), and the text before it."""
    for end in range(1, len(text) + 1):
        hits = [s for s in stops if text[:end].endswith(s)]
        if hits:
            stop = max(hits, key=len)
            return text[: end - len(stop)], stop
    return text, None


@settings(max_examples=400, deadline=None)
@given(
    text=st.text(alphabet="abc", max_size=24),
    stops=st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4),
    cuts=st.lists(st.integers(0, 24), max_size=6),
)
def test_stops_are_found_over_every_cut(text, stops, cuts):
    edges = [0, *sorted(min(c, len(text)) for c in cuts), len(text)]
    matcher, out, wanted = StopMatcher(stops), "", first_complete(text, stops)
    for a, b in itertools.pairwise(edges):
        out += matcher.push(text[a:b])
        # What is out is never taken back: it is a prefix of the final text, and only a possible stop is held.
        assert wanted[0].startswith(out)
        held = text[len(out) : b]
        if matcher.stopped is None and held:
            assert any(s.startswith(held) for s in stops)
    out += matcher.flush()
    assert (out, matcher.stopped) == wanted


@pytest.mark.parametrize("text", ["say <|stop|> now", "ein Ende, 漢字 ENDE", "aab aaab aaaab", "no stop at all \n\n"])
def test_every_split_into_two_and_into_characters_gives_the_same(text):
    stops = ["<|stop|>", "ENDE", "ende", "漢字 E", "aaaab", "aaab!", "\n\nUser:", "\n\n\n"]
    wanted = first_complete(text, stops)
    for pieces in ([text[:i], text[i:]] for i in range(len(text) + 1)):
        matcher = StopMatcher(stops)
        assert ("".join(map(matcher.push, pieces)) + matcher.flush(), matcher.stopped) == wanted
    matcher = StopMatcher(stops)
    assert ("".join(map(matcher.push, text)) + matcher.flush(), matcher.stopped) == wanted


@pytest.mark.parametrize(
    ("stops", "text", "wanted"),
    [
        (["ab", "abc"], "xabc", ("x", "ab")),  # together at the start: the shorter one, at once
        (["bc", "abc"], "xabc", ("x", "abc")),  # together at the end: the longer one
        (["abcd", "bc"], "xabcd", ("xa", "bc")),  # complete first
        ([], "abc", ("abc", None)),
        (["a"], "", ("", None)),
    ],
)
def test_which_of_several_stops_it_is(stops, text, wanted):
    for order in (stops, stops[::-1]):
        matcher = StopMatcher(order)
        assert (matcher.push(text) + matcher.flush(), matcher.stopped) == wanted


def test_many_long_stops_cost_nothing_more():
    stops = ["a" * 500 + chr(0x4E00 + i) for i in range(500)]
    matcher = StopMatcher(stops)
    start = time.monotonic()
    out = "".join(matcher.push("a" * 50) for _ in range(2000))
    assert time.monotonic() - start < 2
    assert out + matcher.flush() == "a" * 100_000


def test_nothing_comes_after_a_stop():
    matcher = StopMatcher(["END"])
    assert matcher.push("text EN") == "text "
    assert matcher.push("D and more") == ""
    assert matcher.stopped == "END"
    assert matcher.push("more") == ""
    assert matcher.flush() == ""


def test_an_empty_stop_is_refused():
    with pytest.raises(UserError, match="empty"):
        StopMatcher(["a", ""])
    for wrong in ("END", [1]):
        with pytest.raises(UserError, match="list of texts"):
            StopMatcher(wrong)
