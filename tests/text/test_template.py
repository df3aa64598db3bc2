import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from enum import StrEnum
from pathlib import Path, PurePosixPath

import pytest

from makeway.text.template import ChatTemplate, TemplateError
from tests.conftest import SHARED

USER = [{"role": "user", "content": "Grüße <&>"}]


def render(source, messages=USER, **arguments):
    template = ChatTemplate(source, bos_token="<s>", eos_token="</s>", name="t")
    return template.render(messages, **arguments)


def test_the_helpers_of_transformers():
    source = """
    {%- for m in messages %}
        {%- if loop.index > 1 %}{% break %}{% endif %}
        {%- generation %}{{ bos_token }}{{ m.role }}:{{ m | tojson }}{{ eos_token }}{% endgeneration %}
    {%- endfor %}
    {%- if add_generation_prompt %}GO{% endif %}{% if enable_thinking is defined %}T{{ enable_thinking }}{% endif %}
    {{- tools | tojson(indent=1) if tools else '' }}{{ strftime_now('%%')[:1] }}"""
    out = render(source, USER + USER, enable_thinking=False, tools=[{"name": "f"}])
    assert out == '<s>user:{"role": "user", "content": "Grüße <&>"}</s>GOTFalse[\n {\n  "name": "f"\n }\n]%'
    assert "GO" not in render(source, add_generation_prompt=False)


CASES = json.loads((Path(__file__).parent / "templates.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("name", CASES["templates"])
def test_own_templates_render_as_transformers_renders_them(name):
    template = ChatTemplate(CASES["templates"][name], bos_token="<s>", eos_token="</s>", name=name)
    for conversation, expected in zip(CASES["conversations"], CASES["expected"][name], strict=True):
        before = json.dumps(conversation)
        if expected is None:
            with pytest.raises(TemplateError):
                template.render(**conversation)
        else:
            assert template.render(**conversation) == expected
        assert json.dumps(conversation) == before


def test_the_date_is_today():
    assert render("{{ strftime_now('%Y') }}") in {str(datetime.now().year), str(datetime.now().year - 1)}


def test_arguments_win_over_the_tokens_but_not_over_the_messages():
    assert render("{{ bos_token }}{{ messages[0].role }}", bos_token="B") == "Buser"


def test_only_plain_data_reaches_a_template():
    class Mode(StrEnum):
        FAST = "fast"

    assert render("{{ mode }}{{ pair }}", mode=Mode.FAST, pair=(1, True)) == "fast[1, True]"
    assert render("{{ mode.name }}|", mode=Mode.FAST) == "|"
    with pytest.raises(TemplateError, match=r"^t: messages\[0\]\.content is of type PurePosixPath"):
        render("x", [{"role": "user", "content": PurePosixPath("x")}])
    with pytest.raises(TemplateError, match="messages must be a list of objects"):
        render("x", ["hello"])
    deep = current = []
    for _ in range(sys.getrecursionlimit()):
        current.append([])
        current = current[0]
    with pytest.raises(TemplateError, match="RecursionError"):
        render("x", deep=deep)


def test_a_template_may_not_change_what_it_is_given():
    messages = [{"role": "user", "content": "a", "tags": ["x"]}]
    for source in ("{% set _ = messages[0].update(role='b') %}", "{% set _ = dict.update(messages[0], role='b') %}"):
        with suppress(TemplateError):
            render(source, messages)
        assert messages == [{"role": "user", "content": "a", "tags": ["x"]}]


def test_threads_share_a_template():
    template = ChatTemplate("{% for m in messages %}{{ m.content }}{% endfor %}", bos_token="", eos_token="", name="t")
    texts = [str(i) * 50 for i in range(40)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: template.render([{"role": "user", "content": t}]), texts)) == texts


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("a\n\n{{ messages[0].role.nope.nope }}", 3),
        ("{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n\n{{ f() }}", 2),
        ("a\n{{ {1: 2} | tojson(sort_keys=3, indent=messages) }}", 2),
        ("{% include 'x' %}", 1),
    ],
)
def test_failures_name_their_line(source, line):
    with pytest.raises(TemplateError, match=f"^t: the chat template failed on these messages, line {line}: "):
        render(source)


@pytest.mark.parametrize("source", ["{{ " + "(" * 5000, "{% for %}", "{{ x | nofilter }}", "{% unknown %}", "{{ 'a }}"])
def test_whatever_does_not_compile_is_refused_at_once(source):
    with pytest.raises(TemplateError, match=r"^t: the chat template does not compile"):
        ChatTemplate(source, bos_token="", eos_token="", name="t")


def test_a_template_that_raises_gives_its_own_message():
    with pytest.raises(TemplateError, match="refuses these messages, line 1: only users"):
        render("{{ raise_exception('only users') }}")


def test_a_template_that_does_not_compile_names_its_line():
    with pytest.raises(TemplateError, match="line 2"):
        render("a\n{% if %}")


@pytest.mark.parametrize(
    "source", ["{{ messages.nothing.more }}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}", "{{ undefined_function() }}"]
)
def test_whatever_fails_inside_is_one_clear_error(source):
    with pytest.raises(TemplateError, match="failed on these messages"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__.__mro__ }}",
        "{{ ''.__class__.__base__.__subclasses__() }}",
        "{% set _ = messages.append(1) %}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
    ],
)
def test_the_sandbox_holds(source):
    with pytest.raises(TemplateError):
        render(source)


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Wetter für einen Ort",
            "parameters": {"type": "object", "properties": {"ort": {"type": "string"}}},
        },
    }
]
HISTORY = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Wie ist das Wetter in Köln?"},
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "I need the tool.",
        "tool_calls": [{"type": "function", "function": {"name": "weather", "arguments": {"ort": "Köln"}}}],
    },
    {"role": "tool", "content": "18 °C"},
]


@pytest.mark.parametrize("name", ["Qwen-Qwen3-0.6B", "Qwen3-Coder", "Qwen3.5-4B"])
def test_published_qwen_templates(name):
    path = SHARED / "templates" / f"{name}.jinja"
    if not path.exists():
        pytest.skip("published templates are not shipped with the tests")
    source = path.read_text(encoding="utf-8")
    plain = render(source, [{"role": "user", "content": "Hi"}])
    assert "<|im_start|>user\nHi<|im_end|>\n" in plain
    assert "<|im_start|>assistant\n" in plain.split("<|im_end|>\n")[-1]
    full = render(source, HISTORY, tools=TOOLS)
    for needle in ("Be brief.", "Wetter für einen Ort", "Köln", "18 °C", "weather"):
        assert needle in full
    if name != "Qwen3-Coder":
        without = render(source, [{"role": "user", "content": "Hi"}], enable_thinking=False)
        assert without.endswith("<think>\n\n</think>\n\n")
