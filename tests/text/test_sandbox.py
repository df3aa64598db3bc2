import time

import jinja2
import pytest
from jinja2.exceptions import SecurityError

from makeway.text.sandbox import BoundedSandbox, Budget
from makeway.text.template import ChatTemplate, TemplateError


def run(source, max_s=10.0, **variables):
    environment = BoundedSandbox(Budget(max_s), extensions=["jinja2.ext.loopcontrols"])
    code = environment.compile(environment.checked(source))
    template = jinja2.Template.from_code(environment, code, environment.make_globals(None))
    return template.render(**variables)


ENDLESS = {
    "nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "loops without calls": "{% set r = range(99999) | list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "a filtered loop": "{% set r = range(99999) | list %}{% for i in r if r | sum < 0 %}{% endfor %}",
    "a condition of a loop": "{% set r = range(99999) | list %}{% for i in r if -1 in r %}{% endfor %}",
    "recursive loops": "{% for i in [1, 2] recursive %}{{ loop([1, 2]) if loop.depth < 40 }}{% endfor %}",
    "macros": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
}


@pytest.mark.parametrize("name", ENDLESS)
def test_endless_templates_are_stopped(name):
    start = time.monotonic()
    with pytest.raises((SecurityError, RecursionError)):
        run(ENDLESS[name], max_s=0.1)
    assert time.monotonic() - start < 20


HUGE = {
    "product": "{{ 'a' * 10 ** 9 }}",
    "product, number first": "{{ 10 ** 9 * 'a' }}",
    "list": "{{ ([0] * 10 ** 9) | length }}",
    "number": "{{ 9 ** 99999 }}",
    "squares": "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "sum": "{% set ns = namespace(s='aaaa') %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "list sum": "{% set ns = namespace(s=[1]) %}{% for i in range(99) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "concatenation": "{% set ns = namespace(s='aa') %}{% for i in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "capture": "{% set ns = namespace(s='aa') %}{% for i in range(99) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"
    "{% endfor %}",
    "output": "{% set a = 'a' * 10 ** 7 %}{% for i in range(99) %}{{ a }}{% endfor %}",
    "filter join": "{{ (['a' * 10 ** 6] * 1000) | join }}",
    "method join": "{{ ''.join(['a' * 10 ** 6] * 1000) }}",
    "filter replace": "{{ ('a' * 10 ** 6) | replace('a', 'a' * 10 ** 6) }}",
    "method replace": "{{ ('a' * 10 ** 6).replace('a', 'a' * 10 ** 6) }}",
    "center": "{{ 'a' | center(10 ** 10) }}",
    "literal center": "{{ 'a' | center(10000000000) }}",
    "indent": "{{ 'a' | indent(10 ** 10, true) }}",
    "ljust": "{{ 'a'.ljust(10 ** 10) }}",
    "percent": "{{ '%9999999999d' % 1 }}",
    "percent star": "{{ '%*d' % (10 ** 10, 1) }}",
    "format filter": "{{ '%9999999999d' | format(1) }}",
    "format method": "{{ '{:>9999999999}'.format(1) }}",
    "nested format": "{{ '{:>{}}'.format(1, 10 ** 10) }}",
    "range": "{{ range(10 ** 9) | list }}",
    "lipsum": "{{ lipsum(10 ** 9) }}",
}


@pytest.mark.parametrize("name", HUGE)
def test_huge_results_are_refused_before_they_exist(name):
    start = time.monotonic()
    with pytest.raises((SecurityError, OverflowError, jinja2.UndefinedError)):
        run(HUGE[name])
    assert time.monotonic() - start < 20


def test_ordinary_templates_do_not_notice():
    source = (
        "{% for i in r if i %}{{ i ~ ':' ~ none ~ missing }}{% if i == 2 %}{% break %}{% endif %}{% endfor %}"
        "{{ '%5d|%s' % (3, 'a') }}{{ '{:>4}{}'.format(1, 10 ** 7) }}{{ 'a' * 3 }}{{ 2 ** 64 }}{{ [1] + [2] }}"
        "{{ '100000000%' }}{{ 1 | string | center(3) }}{{ 10 ** 9 | default(10 ** 12) }}"
    )
    assert run(source, r=[0, 1, 2, 3]) == (
        "1:None2:None    3|a   1" + str(10**7) + "aaa" + str(2**64) + "[1, 2]100000000% 1 " + str(10**9)
    )


def test_the_limit_is_told_with_the_line():
    template = ChatTemplate("a\n{{ 'a' * 10 ** 9 }}", bos_token="", eos_token="", name="FILE")
    with pytest.raises(TemplateError, match=r"^FILE: .*, line 2: it makes a text of more than \d+ characters$"):
        template.render([])
