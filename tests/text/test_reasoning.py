import pytest
from hypothesis import given
from hypothesis import strategies as st

from makeway.text import ChatTemplate
from makeway.text.reasoning import ReasoningSplitter, Split, opens_reasoning
from tests.text.test_tools import TEMPLATES, template_source


def split(parts, opened):
    splitter = ReasoningSplitter(opened=opened)
    splits = [splitter.push(part) for part in parts] + [splitter.flush()]
    return "".join(s.reasoning for s in splits), "".join(s.content for s in splits)


@pytest.mark.parametrize(
    ("opened", "text", "reasoning", "content"),
    [
        (True, "hm\n</think>\n\nYes. \n", "hm", "Yes. \n"),
        (True, "\n\n a  b \n\n</think>c", "a  b", "c"),
        (True, "</think>\n\nYes", "", "Yes"),
        (True, "never ends \n</thin", "never ends \n</thin", ""),
        (True, "a</think>b</think>c<think>d", "a", "b</think>c<think>d"),
        (True, "a <think> b</think>c", "a <think> b", "c"),
        (True, "", "", ""),
        (False, "<think>\nhm\n</think>\n\nYes", "hm", "Yes"),
        (False, "\n<think>hm", "hm", ""),
        (False, "\n Yes <think>no</think>", "", "\n Yes <think>no</think>"),
        (False, "<thinker> yes", "", "<thinker> yes"),
        (False, "\n<thin", "", "\n<thin"),
        (False, "a</think>b", "", "a</think>b"),
    ],
)
def test_reasoning_and_content(opened, text, reasoning, content):
    assert split([text], opened) == (reasoning, content)
    assert split(text, opened) == (reasoning, content)


PARTS = ["<think>", "</think>", "<", "</", "think>", "\n", " ", "word", "é"]


@given(st.booleans(), st.lists(st.sampled_from(PARTS), max_size=12), st.data())
def test_how_the_text_is_cut_changes_nothing(opened, snippets, data):
    text = "".join(snippets)
    whole = split([text], opened)
    assert split(text, opened) == whole
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=5)))
    assert split([text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)], opened) == whole
    kept = "".join(whole).replace(" ", "").replace("\n", "")
    all_text = text.replace(" ", "").replace("\n", "")
    for tag in ("<think>", "</think>"):  # nothing but the tags and white space is lost
        all_text, kept = all_text.replace(tag, ""), kept.replace(tag, "")
    if "<" not in all_text:
        assert kept == all_text


def test_only_what_may_be_a_tag_is_held_back():
    splitter = ReasoningSplitter(opened=True)
    assert splitter.push("a <") == Split(reasoning="a")
    assert splitter.push("b") == Split(reasoning=" <b")
    assert splitter.push(" \n") == Split()
    assert splitter.push("</think>\n") == Split()
    assert splitter.push("\nYes <") == Split(content="Yes <")
    assert splitter.flush() == Split()


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("thinking", [True, False])
def test_the_prompt_tells_whether_reasoning_is_open(name, thinking):
    template = ChatTemplate(template_source(name), bos_token="", eos_token="", name=name)
    prompt = template.render([{"role": "user", "content": "hi"}], enable_thinking=thinking)
    assert opens_reasoning(prompt) == (name == "Qwen3.5-4B" and thinking)
