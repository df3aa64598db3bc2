import pytest

from makeway import SamplingParams, UserError
from makeway.server.conversation import MAX_GRAMMARS, Conversations
from makeway.server.errors import ApiError
from makeway.server.openai_requests import ChatRequest, Delivery
from makeway.text.grammar import Grammar
from tests.server.engines import small_tokenizer
from tests.server.test_chat import ADD, HI, TEMPLATE

DELIVERY = Delivery(stream=False, usage=False, progress=False)


def conversations(template=TEMPLATE):
    tokenizer = small_tokenizer()
    return Conversations(tokenizer, n_vocab=tokenizer.n_tokens, template=template)


def asked(**values):
    return ChatRequest(model=None, messages=HI, sampling=SamplingParams(), delivery=DELIVERY, **values)


@pytest.mark.parametrize(
    ("template", "arguments", "reasoning"),
    [
        ("{{ messages[0].content }}", {}, "none"),
        ("<think>\n", {}, "open"),
        ("<think></think>\n\n", {}, "none"),
        ("{# <think> #}x", {}, "optional"),
        (TEMPLATE, {"enable_thinking": True}, "open"),
        (TEMPLATE, {}, "optional"),
    ],
)
def test_a_grammar_begins_where_reasoning_ends(template, arguments, reasoning):
    rendered = conversations(template).render(asked(grammar=Grammar("regex", "a"), template_arguments=arguments))
    assert rendered.grammar == Grammar("regex", "a", reasoning=reasoning)
    assert rendered.is_open == (reasoning == "open")


def test_a_begun_answer_has_no_reasoning():
    arguments = {"enable_thinking": True}
    rendered = conversations().render(asked(prefill="So", template_arguments=arguments, grammar=Grammar("regex", "a")))
    assert rendered.text.endswith("<think>\n\n</think>\n\nSo")
    assert not rendered.has_reasoning
    assert rendered.grammar.reasoning == "none"


def test_forced_calls_have_a_grammar_and_unwanted_ones_no_tools():
    talk = conversations()
    for choice, only in (("required", None), ("named", "add")):
        assert talk.render(asked(tools=[ADD], tool_choice=choice, only_tool=only)).grammar.kind == "lark"
    assert talk.render(asked(tools=[ADD])).grammar is None
    assert "<tools>" in talk.render(asked(tools=[ADD])).text
    silent = talk.render(asked(tools=[ADD], tool_choice="none"))
    assert "<tools>" not in silent.text
    assert silent.tools == []


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "does not compile"),
        ("{{ messages[5].content.x.y }}", "failed"),
        ("{% for i in range(1000000000) %}{% endfor %}", "chat template"),
    ],
)
def test_a_template_that_refuses_or_fails_says_so(template, message):
    with pytest.raises(UserError, match=message):
        conversations(template).render(asked())


def test_a_model_without_a_template_says_what_to_do():
    talk = conversations()
    talk._sources.clear()
    with pytest.raises(ApiError, match="--chat-template"):
        talk.render(asked())
    with pytest.raises(ApiError, match="knows no tools"):
        conversations("{{ messages }}").render(asked(tools=[ADD]))


def test_compiled_grammars_are_kept_up_to_a_limit():
    talk = conversations()
    first = talk.compile(Grammar("regex", "a"))
    assert talk.compile(Grammar("regex", "a")) is first
    for i in range(MAX_GRAMMARS):
        talk.compile(Grammar("regex", f"b{i}"))
    assert len(talk._grammars) == MAX_GRAMMARS
    assert talk.compile(Grammar("regex", "a")) is not first
    with pytest.raises(UserError, match="regular expression"):
        talk.compile(Grammar("regex", "("))
