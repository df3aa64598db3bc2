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
