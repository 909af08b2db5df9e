"""Templates: columns found, rows rendered, and one row's trouble kept to itself."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts import sandbox
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import PromptSpec


def compiled(template: str, **fields: Any) -> PromptTemplate:
    return PromptTemplate(PromptSpec(template=template, **fields))


def text(template: str, row: dict[str, Any]) -> str:
    rendered = compiled(template, chat=False).render(row).text
    assert rendered is not None
    return rendered


@pytest.mark.parametrize(
    ("template", "columns"),
    [
        ("{{ b }} {{ a }} {{ b }}", ["b", "a"]),
        ('{{ row["odd name"] }} {{ row.plain }} {{ x }}', ["odd name", "plain", "x"]),
        ('{{ row["row"] }}', ["row"]),
        ("{% for item in items %}{{ item }}{{ loop.index }}{% endfor %}", ["items"]),
        ("{% set y = x %}{{ y }}", ["x"]),
        ("{% if flag %}{{ a }}{% else %}{{ b }}{% endif %}", ["flag", "a", "b"]),
        ("{% for i in range(3) %}{{ x[i] }}{% endfor %}", ["x"]),
        ("{{ x | default('none') | upper }}", ["x"]),
        ("{% macro m(a) %}{{ a }}{% endmacro %}{{ m(x) }}", ["x"]),
    ],
)
def test_columns_are_found_in_order_of_first_use(template: str, columns: list[str]) -> None:
    assert compiled(template).columns == columns


def test_columns_of_all_messages_count() -> None:
    prompt = PromptSpec.model_validate(
        {
            "messages": [
                {"role": "system", "content": "About {{ topic }}."},
                {"role": "user", "content": "{{ question }} on {{ topic }}"},
            ]
        }
    )
    assert PromptTemplate(prompt).columns == ["topic", "question"]


@pytest.mark.parametrize("template", ["{{ row }}", "{{ row | tojson }}", "{{ row[name] }}"])
def test_a_use_of_row_that_hides_its_column_is_a_spec_error(template: str) -> None:
    with pytest.raises(SpecError, match="known before it runs"):
        compiled(template)


def test_a_template_without_a_column_is_a_spec_error() -> None:
    with pytest.raises(SpecError, match="reads no column"):
        compiled("Say something.")


def test_null_renders_as_nothing_and_values_as_themselves() -> None:
    row = {"a": None, "b": 1.5, "c": ["x", {"y": 2}]}
    assert text("[{{ a }}|{{ b }}|{{ c[1].y }}]", row) == "[|1.5|2]"


@given(st.text())
def test_row_text_is_data_and_never_code(value: str) -> None:
    for hostile in (value, "{{ 7 * 7 }}" + value, "{% for x in y %}" + value, value + "{{ conn.password }}"):
        assert text("<{{ x }}>", {"x": hostile}) == f"<{hostile}>"


@pytest.mark.parametrize(
    ("template", "what"),
    [
        ("{{ x.__class__ }}", "unsafe"),
        ("{{ x.format.__globals__ }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}{{ x }}", "unsafe"),
        ("{{ items.append(1) }}", "unsafe"),
        ("{{ missing }}", r"'missing' is undefined \(the row has x, items\)"),
        ("{{ x - 1 }}", "TypeError"),
        ("{{ x * 99999999 }}", "more than"),
        ("{{ 10 ** 1000000 }}{{ x }}", "bounded"),
        ("{% for a in range(99999) %}{{ x * 1000 }}{% endfor %}", "characters"),
        ("{{ lipsum() }}{{ x }}", "undefined"),
    ],
)
def test_a_template_sees_and_makes_no_more_than_it_may(template: str, what: str) -> None:
    with pytest.raises(RenderError, match=what) as error:
        compiled(template).render({"x": "abc", "items": [1]})
    assert str(error.value).startswith("prompt.template: ")


def test_an_endless_loop_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "MAX_RENDER_SECONDS", 0.05)
    loops = "{% for a in range(99999) %}" * 3 + "{% endfor %}" * 3
    with pytest.raises(RenderError, match="took more than"):
        compiled(loops + "{{ x }}").render({"x": 1})


def test_system_and_examples_stand_before_the_row() -> None:
    template = compiled(
        "Classify: {{ text }}",
        system="Be {{ brief }}.",
        examples=[{"user": "{{ shown }}", "assistant": "yes"}],
    )
    assert template.columns == ["text"]
    assert template.render({"text": "hi"}).messages == [
        {"role": "system", "content": "Be {{ brief }}."},
        {"role": "user", "content": "{{ shown }}"},
        {"role": "assistant", "content": "yes"},
        {"role": "user", "content": "Classify: hi"},
    ]
