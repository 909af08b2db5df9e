"""Chat templates as joined text: the same text as the tokenizer's own, or the tokenizer itself."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.chat import ChatFormat
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import PromptSpec

pytestmark = pytest.mark.worker_env

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + eos_token }}{% endfor %}"
TRIMS = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}\n{% endfor %}"
LOOKS_INSIDE = "{% for m in messages %}{% if '<think>' in m.content %}!{% endif %}{{ m.content }}{% endfor %}"
CUTS = "{% for m in messages %}{{ m.content[:5] }}{% endfor %}"
DROPS_EMPTY = "{% for m in messages %}{% if m.content %}*{{ m.content }}{% endif %}{% endfor %}"
TRIMS_THE_WHOLE = "{% for m in messages %}{{ (m.role ~ ': ' ~ m.content) | trim }}{% endfor %}"
SHOUTS = "{% for m in messages %}{{ m.content.upper() }}{% endfor %}"
LOOPS = """{%- set text = messages[-1].content -%}
{%- if "round" in text -%}
{%- for i in range(99999) -%}{%- for j in range(99999) -%}{%- endfor -%}{%- endfor -%}
{%- endif -%}
{%- if "much" in text %}{{ text * 9999999 }}{% endif -%}
{{ text }}"""
DUMPS = "{% for m in messages %}{{ m | tojson }}{{ none }}{{ nothing }}{% break %}{% endfor %}"
CONTENTS = ["", "  padded\n", "plain", "<think>x</think> y", "<|im_end|>", "Ünï 漢字", "a" * 5000]


def chat(tokenizer: Any, **prompt: Any) -> ChatFormat:
    spec = PromptSpec.model_validate({"template": "{{ text }}", **prompt})
    return ChatFormat(tokenizer, spec, PromptTemplate(spec))


@pytest.mark.parametrize(
    ("source", "constant"),
    [
        (None, True),
        (PLAIN, True),
        (TRIMS, True),
        (LOOKS_INSIDE, False),
        (CUTS, False),
        (DROPS_EMPTY, False),
        (TRIMS_THE_WHOLE, False),
        (SHOUTS, False),
        (DUMPS, False),
    ],
)
def test_text_equals_the_tokenizers_own(tokenizer: Any, source: str | None, constant: bool) -> None:
    format_ = chat(tokenizer, system="Be kind.", chat_template=source)
    assert bool(format_.prefix) is constant
    for content in CONTENTS:
        messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": content}]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, chat_template=source
        )
        assert format_.text([content]) == expected


def test_a_row_on_which_the_chat_template_takes_too_long_is_given_up(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_batchinfer.prompts.sandbox.MAX_RENDER_SECONDS", 0.2)
    format_ = chat(tokenizer, chat_template=LOOPS)
    assert format_.text(["short"]) == "short"
    with pytest.raises(RenderError, match="took more than"):
        format_.text(["round and round"])
    with pytest.raises(RenderError, match="made more than"):
        format_.text(["too much"])


def test_a_chat_template_that_needs_the_tokenizer_gets_it(tokenizer: Any) -> None:
    format_ = chat(tokenizer, chat_template=f"{{% generation %}}{SHOUTS}{{% endgeneration %}}")
    assert format_.text(["abc"]) == "ABC"


def test_several_templated_messages(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Topic: {{ topic }}"},
        {"role": "user", "content": "{{ text }}"},
    ]
    format_ = chat(tokenizer, template=None, messages=messages)
    assert format_.prefix == "<|im_start|>system\n"
    assert format_.text(["Topic: x", "hello"]) == (
        "<|im_start|>system\nTopic: x<|im_end|>\n<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    )


def test_a_conversation_the_template_refuses_is_a_spec_error(tokenizer: Any) -> None:
    with pytest.raises(SpecError, match="no system please"):
        chat(tokenizer, system="x", chat_template="{{ raise_exception('no system please') }}")


def test_a_model_without_a_chat_template_is_a_spec_error() -> None:
    class Bare:
        chat_template = None

    with pytest.raises(SpecError, match=r"prompt\.chat: false"):
        chat(Bare())
