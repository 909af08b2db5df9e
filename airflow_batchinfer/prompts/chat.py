"""The model's chat template, applied to many rows fast.

`tokenizer.apply_chat_template` interprets a Jinja program for every row. Most chat templates only put
constant text around the contents; then a row's text is a handful of joined strings. Whether that is so
is established when the job starts: the template is run once over strings that record every look at
their content, and the joined text is compared with the template's own on texts chosen to upset it.
Where it is not so, each row's text is rendered: within our sandbox's bounds if that gives the tokenizer's
own text on the same texts, else by the tokenizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jinja2 import TemplateError

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.chat_sandbox import limited_chat_template
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.spec import PromptSpec

_PROBES = (
    "",
    " ",
    "\n",
    "plain text",
    "  spaces at both ends \n",
    "two\n\nlines\t",
    "<think>\nhm\n</think>\n\nanswer",
    "</think>",
    "[INST] [/INST] <<SYS>>",
    "<|im_start|>user<|im_end|></s><s><|eot_id|><|endoftext|><start_of_turn>",
    "{{ x }} {% y %} {# z #}",
    "/no_think",
    "<tool_call>{}</tool_call>",
    "ünïcödé 漢字 🙂\u00a0",
    "word " * 500,
)
"""Contents on which chat templates are known to differ from plain insertion."""


class ChatFormat:
    """Turns a row's rendered contents into the text the model was trained on."""

    def __init__(self, tokenizer: Any, prompt: PromptSpec, template: PromptTemplate) -> None:
        """Look at the chat template with the job's own conversation.

        Raises:
            SpecError: there is no chat template, or it refuses this conversation.
        """
        self._tokenizer = tokenizer
        self._chat_template = prompt.chat_template
        self._template = template
        if prompt.chat_template is None and not getattr(tokenizer, "chat_template", None):
            raise SpecError(
                "prompt: this model's tokenizer has no chat template; set `prompt.chat: false` to send the "
                "template's text as it is, or give a `prompt.chat_template`"
            )
        self._contents = len(prompt.templates())
        self._strips = False
        self._segments = self._find_segments()
        self._limited: Callable[[list[dict[str, str]]], str] | None = None
        if self._segments is None:
            self._limited = limited_chat_template(tokenizer, prompt.chat_template)
            if not self._agrees(self._render):
                self._limited = None

    @property
    def prefix(self) -> str:
        """Text that every row begins with; empty if that is not known."""
        return self._segments[0] if self._segments else ""

    def text(self, contents: list[str]) -> str:
        """The whole prompt of a row as text.

        Raises:
            TemplateError: the chat template refuses these contents.
            RenderError: it makes too much of them, or takes too long.
        """
        if self._segments is None:
            return self._render(contents)
        pieces = [self._segments[0]]
        for content, segment in zip(contents, self._segments[1:], strict=True):
            pieces += (content.strip() if self._strips else content, segment)
        return "".join(pieces)

    def _render(self, contents: list[str]) -> str:
        if self._limited is None:
            return self._apply(contents)
        return self._limited(self._template.messages(contents))

    def _apply(self, contents: list[str]) -> str:
        text: str = self._tokenizer.apply_chat_template(
            self._template.messages(contents),
            tokenize=False,
            add_generation_prompt=True,
            chat_template=self._chat_template,
        )
        return text

    def _find_segments(self) -> list[str] | None:
        """The constant texts before, between and after the contents; none if there are none such."""
        looked: set[str] = set()
        marks = [_Traced(f"\ue000batchinfer {i}\ue001", looked) for i in range(self._contents)]
        try:
            text = self._apply(list(marks))
        except (TemplateError, ValueError, KeyError) as error:
            raise SpecError(
                f"prompt: the model's chat template refuses this conversation: {error}"
            ) from error
        segments = []
        for mark in marks:
            before, found, text = text.partition(str(mark))
            if not found:
                return None
            segments.append(before)
        segments.append(text)
        if looked - {"strip"} or any(str(mark) in s for mark in marks for s in segments):
            return None
        self._segments, self._strips = segments, "strip" in looked
        return segments if self._agrees(self.text) else None

    def _agrees(self, text: Callable[[list[str]], str]) -> bool:
        for i, probe in enumerate(_PROBES):
            others = _PROBES[i - 1]
            for place in range(self._contents):
                contents = [others] * self._contents
                contents[place] = probe
                if _or_refused(text, contents) != _or_refused(self._apply, contents):
                    return False
        return True


def _or_refused(text: Callable[[list[str]], str], contents: list[str]) -> str | None:
    """The contents' text; none if the template refuses them."""
    try:
        return text(contents)
    except Exception:  # whatever an expression may meet on this text
        return None


class _Traced(str):
    """A string that records which of its methods a template calls; putting it somewhere is not one."""

    _looked: set[str]
    __slots__ = ("_looked",)

    def __new__(cls, text: str, looked: set[str]) -> _Traced:
        self = super().__new__(cls, text)
        self._looked = looked
        return self

    def __str__(self) -> str:
        return str.__str__(self)


def _traced(name: str) -> Any:
    method = getattr(str, name)

    def call(self: _Traced, *arguments: Any, **options: Any) -> Any:
        # A strip of something particular is no plain strip.
        self._looked.add(name if not any(a is not None for a in arguments) else f"{name}()")
        return method(self, *arguments, **options)

    return call


_LOOKS = {name for name in dir(str) if not name.startswith("_")} | {
    f"__{name}__" for name in ("contains", "eq", "ne", "lt", "gt", "len", "getitem", "iter")
}
for _name in _LOOKS:
    setattr(_Traced, _name, _traced(_name))
_Traced.__hash__ = str.__hash__  # type: ignore[method-assign]  # `__eq__` above took it away
