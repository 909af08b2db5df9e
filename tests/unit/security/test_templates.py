"""Templates and rows that want more than a row's columns: refused, inert, or ended before they are huge."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.builder import Prepared, PromptBuilder, Rejected
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import JobSpec, PromptSpec
from tests.unit.contract.test_spec import LEAST

ROW: dict[str, Any] = {
    "x": "abc",
    "n": 10**9,
    "long": "word " * 100_000,
    "items": ["a", "b"],
    "fmt": "{:>999999999}%999999999d",
    "tags": "<!---->" * 300_000,
}


def render(template: str, row: dict[str, Any] = ROW) -> str:
    text = (
        PromptTemplate(PromptSpec(template=template + "{{ '' if x else '' }}", chat=False)).render(row).text
    )
    assert text is not None
    return text


REACHES_OUT = [
    "{{ ''.__class__.__mro__ }}",
    "{{ x.__class__.__base__.__subclasses__() }}",
    "{{ x['__class__'] }}",
    "{{ x|attr('__class__') }}",
    "{{ items|map(attribute='__class__')|list }}",
    "{{ range.__self__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ '{0.__class__.__mro__}'.format(x) }}",
    "{{ '{x.__class__}'.format_map({'x': x}) }}",
    "{{ '%s'|format(x.__class__) }}",
    "{% set ns = namespace() %}{% set ns.a = x.__class__ %}{{ ns.a }}",
    "{{ self.__init__.__globals__ }}",
    "{% for i in items %}{{ loop.__class__ }}{% endfor %}",
    "{% macro m() %}{% endmacro %}{{ m.__globals__ }}",
    "{{ items.append(1) }}",
    "{{ items.__setitem__(0, 1) }}",
]
NAMES = [
    "var",
    "conn",
    "ti",
    "dag_run",
    "params",
    "macros",
    "os",
    "environ",
    "config",
    "lipsum",
    "cycler",
    "open",
]
OTHER_TEMPLATES = [
    "{% include '/etc/passwd' %}",
    "{% include x %}",
    "{% import 'os' as os %}",
    "{% from 'os' import environ %}",
    "{% extends 'base' %}",
]


@pytest.mark.parametrize("template", REACHES_OUT)
def test_no_attribute_is_reached(template: str) -> None:
    try:
        text = render(template)
    except RenderError as error:
        text = str(error)
        assert text.startswith("prompt.template: ")
    assert "<class" not in text
    assert "<built-in" not in text
    assert ROW["items"] == ["a", "b"]


@pytest.mark.parametrize("name", NAMES)
def test_no_name_but_the_rows_columns_is_known(name: str) -> None:
    template = PromptTemplate(PromptSpec(template=f"{{{{ {name} }}}}{{{{ x }}}}"))
    assert template.columns == [name, "x"]  # so `split` looks for such a column, and refuses
    with pytest.raises(RenderError, match=f"'{name}' is undefined"):
        template.render(ROW)


@pytest.mark.parametrize("template", OTHER_TEMPLATES)
def test_no_other_template_is_read(template: str) -> None:
    with pytest.raises(SpecError, match="cannot read other templates"):
        render(template)


GROWS = [
    "{{ 'a' * 10**9 }}",
    "{{ x * n }}",
    "{{ n * x }}",
    "{{ [x] * n }}",
    "{{ [long] * 1000000 }}",
    "{{ (items * 1000000)|join(long) }}",
    "{{ long.join(items * 1000) }}",
    "{{ 'a'|center(999999999) }}",
    "{{ x|center(n) }}",
    "{{ x.ljust(n) }}{{ x.zfill(n) }}",
    "{{ x.rjust(width=n) }}",
    "{{ ('\\t' * 1000).expandtabs(n) }}",
    "{{ long|replace('', long) }}",
    "{{ long.replace('w', long) }}",
    "{{ long|indent(n) }}",
    "{{ ('\\n' * 1000)|indent(long) }}",
    "{{ long|wordwrap(1, wrapstring=long) }}",
    "{{ [1, [2]]|tojson(indent=n) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '%*d' % (n, 1) }}",
    "{{ '%(a)999999999d' % {'a': 1} }}",
    "{{ '%999999999d'|format(1) }}",
    "{{ '{:>999999999}'.format(x) }}",
    "{{ '{:>{}}'.format(x, n) }}",
    "{{ fmt.format(x) }}",
    "{{ ('{0}' * 100000).format(long) }}",
    "{{ ('%(a)s' * 100000) % {'a': long} }}",
    "{{ 10**(10**9) }}",
    "{{ 2 ** n }}",
    "{% set s = namespace(v=3) %}{% for i in range(99) %}{% set s.v = s.v * s.v %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set s.v = s.v ~ s.v %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set s.v = s.v + s.v %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set s.v = [s.v, s.v] %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set s.v = (s.v, s.v) %}{% endfor %}{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set s.v = {1: s.v, 2: s.v} %}{% endfor %}"
    "{{ s.v }}",
    "{% set s = namespace(v=x) %}{% for i in range(99) %}{% set t %}{{ s.v }}{{ s.v }}{% endset %}"
    "{% set s.v = t %}{% endfor %}{{ s.v }}",
    "{% macro m(v) %}{{ v }}{{ v }}{% endmacro %}{% set s = namespace(v=x) %}"
    "{% for i in range(99) %}{% set s.v = m(s.v) %}{% endfor %}{{ s.v }}",
    "{{ range(99999)|map('center', 99999)|list }}",
    "{{ range(99999)|map('string')|map('center', 99999)|join }}",
    "{{ range(99999)|batch(999999999, long)|list }}",
    "{{ items|slice(999999999)|list }}",
    "{{ ([items] * 100000)|sum(start=[]) }}",
    "{{ 1.5|round(999999999, 'floor') }}",
    "{{ x.translate({97: long}) }}",
    "{{ (5).to_bytes(n) }}",
    "{{ tags|striptags }}",
    "{% for a in range(99999) %}{{ long }}{% endfor %}",
]
LASTS = [
    "{% for i in range(10**9) %}{% endfor %}",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro m(k) %}{% if k %}{{ m(k - 1) }}{{ m(k - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in [[1, [2]]] recursive %}{{ loop(i) if i is iterable }}{{ loop([[1]]) }}{% endfor %}",
    "{{ range(99999)|select('in', [x] * 500000)|list }}",
    "{{ range(99999)|reject('in', range(99999)|list)|list }}",
    "{{ ([{'a': 1}] * 9999)|selectattr('a', 'in', [x] * 500000)|list }}",
    "{% set l = [x] * 500000 %}{% for i in range(99999) if i in l %}{% endfor %}",
    "{% set l = range(99999)|map('string')|list %}{% for i in range(99999) %}{{ i in l }}{% endfor %}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
]


HIDES = [
    "{% set s = namespace(l=[]) %}{% set s.l = s.l + [namespace(v=x)] %}",
    "{% set s = namespace(v=x) %}{% set s = namespace(next=s) %}",
    "{% set s = namespace({'next': namespace()}) %}",
    "{% set s = namespace() %}{% set s.next = s %}",
    "{% set s = namespace() %}{% set s.next, b = [s, 1] %}",
    "{% macro m() %}{{ varargs }}{% endmacro %}{{ m(namespace(), namespace()) }}",
]
"""What a namespace holds is not part of any weight: a chain or a list of them could grow past all bounds."""


@pytest.mark.parametrize("template", HIDES)
def test_a_namespace_is_part_of_no_other_value(template: str) -> None:
    with pytest.raises(RenderError, match="a namespace cannot stand in"):
        render(template)


def test_a_namespace_may_hold_what_is_not_defined() -> None:
    held = "{% set s = namespace(v=x.nothing) %}{% set s.w = [][0] %}"
    assert render(held + "{{ s.v|default('a') }}{{ s.w|default('b') }}") == "ab"


_SECONDS = 300.0
"""A process that renders all of them and has not ended after so long never will."""

_RENDER_ALL = """
import json, resource, sys
from airflow_batchinfer.prompts import sandbox
from tests.unit.security.test_templates import refusal_of

sandbox.MAX_RENDER_SECONDS = 0.1
refusal_of("{{ x }}")  # whatever is loaded at first use is loaded now
pages = int(open("/proc/self/statm").read().split()[0])
most = pages * resource.getpagesize() + 400 * 1024 * 1024
resource.setrlimit(resource.RLIMIT_AS, (most, most))
for template in json.load(sys.stdin):
    print(json.dumps([template, refusal_of(template)]), flush=True)
"""


def refusal_of(template: str) -> str:
    """Name of the error that a template is refused with; empty if it is rendered."""
    try:
        render(template)
    except (Exception, MemoryError) as error:
        return type(error).__name__
    return ""


@pytest.fixture(scope="module")
def refusals() -> dict[str, str]:
    """What became of each template in a process that may take 400 MiB more and no time to speak of.

    A template that hangs it, or takes it down, is missing, and so are those behind it.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _RENDER_ALL],
        cwd=Path(__file__).parents[3],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            said, _ = process.communicate(json.dumps(GROWS + LASTS), timeout=_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            said, _ = process.communicate()
    return dict(json.loads(line) for line in said.splitlines())


@pytest.mark.parametrize("template", GROWS)
def test_what_grows_is_refused_before_it_does(refusals: dict[str, str], template: str) -> None:
    assert refusals[template] in ("RenderError", "SpecError")


@pytest.mark.parametrize("template", LASTS)
def test_what_does_not_end_is_ended(refusals: dict[str, str], template: str) -> None:
    assert refusals[template] == "RenderError"


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ x|upper }}{{ x.center(7) }}|{{ '%03d' % 7 }}{{ '{:>4}'.format(x) }}", "ABC  abc  |007 abc"),
        ("{{ items|join(', ') }}{{ x ~ 1 ~ none }}{{ x + '!' }}{{ x * 2 }}", "a, babc1Noneabc!abcabc"),
        ("{{ {'a': [1, x]}|tojson }}{{ items|map('upper')|list }}", "{\"a\": [1, \"abc\"]}['A', 'B']"),
        ("{% for i in range(3) if i %}{{ loop.index }}{{ i }}{% endfor %}", "1122"),
        ("{% macro m(a) %}<{{ a }}>{% endmacro %}{{ m(x) }}{{ 7 // 2 }}{{ 2**10 }}", "&lt;abc&gt;31024"),
        ("{{ x|replace('b', '--') }}{{ 'a\nb'|indent(2) }}{{ 1.25|round(1) }}", "a--ca\n  b1.2"),
        (
            "{{ items|select('eq', 'b')|list }}{{ items|reject('in', x)|list }}{{ []|select|list }}",
            "['b'][][]",
        ),
        (
            "{% set s = namespace(n=0, l=[]) %}"
            "{% for i in items %}{% set s.n = s.n + 1 %}{% set s.l = s.l + [i] %}{% endfor %}"
            "{% macro m(t) %}{{ t.n }}{{ t.l|join }}{% endmacro %}{{ m(s) }}",
            "2ab",
        ),
        ("{% for i in items if i != 'a' %}{{ loop.length }}{{ i }}{% else %}none{% endfor %}", "1b"),
        ("{{ x if x in ['abc', 'd'] else 'no' }}{{ (1, 2)|sum }}{{ items|sort|first }}", "abc3a"),
    ],
)
def test_what_templates_are_for_still_works(template: str, text: str) -> None:
    assert render(template) == text.replace("&lt;", "<").replace("&gt;", ">")


def test_a_row_costs_only_itself() -> None:
    spec = JobSpec.parse(LEAST | {"prompt": {"template": "{{ text * times }}"}})
    hostile = "{{ 7 * 7 }}{% for i in range(10**9) %}{% include '/etc/passwd' %}{{ conn.x }}"
    rows = [{"text": "a", "times": 2}, {"text": "a", "times": 10**12}, {"text": hostile, "times": 1}]
    first, second, third = PromptBuilder(spec, None, None, takes_tokens=False).build(rows)
    assert isinstance(first, Prepared)
    assert first.prompts[0].messages == [{"role": "user", "content": "aa"}]
    assert isinstance(second, Rejected)
    assert second.reason is Reason.RENDER_ERROR
    assert isinstance(third, Prepared)
    assert third.prompts[0].messages == [{"role": "user", "content": hostile}]


@pytest.mark.parametrize(
    "template", ["{{ " + "(" * 5000 + "x", "{{ x" + "[0]" * 5000 + " }}", "{% if x %}" * 500]
)
def test_an_expression_nested_too_deep_is_a_spec_error(template: str) -> None:
    with pytest.raises(SpecError, match=r"nested too deep|line 1:"):
        PromptTemplate(JobSpec.parse(LEAST | {"prompt": {"template": template}}).prompt)
