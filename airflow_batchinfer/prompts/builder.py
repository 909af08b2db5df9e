"""`PromptBuilder`: rows in, requests out. The one object the worker's preparation thread calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from jinja2 import TemplateError

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.prompts.chat import ChatFormat
from airflow_batchinfer.prompts.overlong import OverLong, OverLongError
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.prompts.tokens import TextEncoder, prompt_limit
from airflow_batchinfer.spec import EmbedTask, JobSpec

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request carries: `token_ids` for a token engine, else `messages` or `text`."""

    token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    text: str | None = None

    @property
    def tokens(self) -> int:
        """Prompt tokens; for a text engine a guess of one token in four characters."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.messages is not None:
            return sum(len(m["content"]) for m in self.messages) // 4 + 1
        return len(self.text or "") // 4 + 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row ready for the engine: one prompt, or several windows of an over-long row."""

    prompts: tuple[Prompt, ...]
    combination: Literal["concat", "list", "majority"] = "concat"
    separator: str = "\n"

    @property
    def tokens(self) -> int:
        """Prompt tokens of all its prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    def combine(self, answers: Sequence[str]) -> str:
        """The row's answer from its prompts' answers, in the order of `prompts`."""
        if len(answers) == 1:
            return answers[0]
        if self.combination == "list":
            return json.dumps(list(answers), ensure_ascii=False)
        if self.combination == "majority":
            return Counter(answers).most_common(1)[0][0]  # a tie goes to the one seen first
        return self.separator.join(answers)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that is never sent, and why."""

    reason: Reason
    message: str


class PromptBuilder:
    """Makes a job's prompts, a batch of rows at a time. Not to be shared between threads."""

    def __init__(
        self, spec: JobSpec, tokenizer: Any | None, max_model_len: int | None, *, takes_tokens: bool = True
    ) -> None:
        """Compile the templates and look at the chat template.

        Args:
            spec: the job.
            tokenizer: the model's tokenizer (`tokens.load_tokenizer`). A text engine may do without:
                then nothing is counted, and the engine refuses what is too long.
            max_model_len: tokens that prompt and answer may have together (`tokens.context_length`);
                none: unknown, nothing is too long.
            takes_tokens: whether the engine wants token ids; else messages or text.

        Raises:
            SpecError: the template, the chat template, the lengths or the over-long policy cannot work.
        """
        if tokenizer is None and (takes_tokens or spec.overlong.policy != "reject"):
            raise SpecError(
                "model.tokenizer: needed"
                + (
                    ""
                    if takes_tokens
                    else f", since `overlong.policy: {spec.overlong.policy}` cuts by tokens"
                )
            )
        self._template = PromptTemplate(spec.prompt)
        self._overlong_spec = spec.overlong
        self._takes_tokens = takes_tokens
        self._plain = _is_plain_text(spec)
        self._limit = None if max_model_len is None else prompt_limit(spec, max_model_len)
        self._format: ChatFormat | None = None
        self._encoder: TextEncoder | None = None
        if tokenizer is None:
            return
        if not self._plain:
            self._format = ChatFormat(tokenizer, spec.prompt, self._template)
        self._encoder = TextEncoder(
            tokenizer,
            # A chat template writes the special tokens itself.
            add_special_tokens=self._plain,
            prefix="" if self._format is None else self._format.prefix,
        )
        if self._limit is not None:
            self._overlong = OverLong(spec.overlong, self._encoder, self._render, self._encode, self._limit)

    @property
    def columns(self) -> list[str]:
        """Input columns the prompt reads."""
        return self._template.columns

    def build(self, rows: Sequence[Row]) -> list[Prepared | Rejected]:
        """Make the prompts of a batch of rows; one result a row, in order. No row makes it fail."""
        results: list[Prepared | Rejected | None] = [None] * len(rows)
        waiting: list[int] = []
        contents: list[list[str]] = []
        texts: list[str] = []
        for i, row in enumerate(rows):
            if all(_is_blank(row.get(column)) for column in self._template.columns):
                names = ", ".join(self._template.columns)
                results[i] = Rejected(Reason.EMPTY_INPUT, f"null or blank: {names}")
                continue
            try:
                rendered = self._template.contents(row)
                texts.append(self._text(rendered))
            except RenderError as error:
                results[i] = Rejected(Reason.RENDER_ERROR, str(error))
                continue
            contents.append(rendered)
            waiting.append(i)
        counted = self._count(texts)
        for i, rendered, ids in zip(waiting, contents, counted, strict=True):
            if ids is not None and self._limit is not None and len(ids) > self._limit:
                results[i] = self._fit(rows[i], len(ids))
            else:
                results[i] = Prepared((self._prompt(rendered, ids),))
        assert all(result is not None for result in results)
        return results  # type: ignore[return-value]

    def _text(self, contents: list[str]) -> str:
        """The prompt's whole text.

        Raises:
            RenderError: the chat template refuses this row, or fails on it in any other way.
        """
        if self._format is None:
            return contents[0]  # of use only where it is the whole prompt, or nothing is counted
        try:
            return self._format.text(contents)
        except (TemplateError, RenderError) as error:
            raise RenderError(f"the model's chat template: {error}") from error
        except Exception as error:  # an expression on this row's text
            raise RenderError(f"the model's chat template: {type(error).__name__}: {error}") from error

    def _count(self, texts: list[str]) -> list[list[int]] | list[None]:
        if self._encoder is None or not texts:
            return [None] * len(texts)
        return self._encoder.encode(texts)

    def _prompt(self, contents: list[str], ids: list[int] | None) -> Prompt:
        if self._takes_tokens:
            return Prompt(token_ids=ids)
        if self._plain:
            return Prompt(text=contents[0])
        return Prompt(messages=self._template.messages(contents))

    def _fit(self, row: Row, tokens: int) -> Prepared | Rejected:
        try:
            windows = self._overlong.fit(row, tokens)
            prompts = tuple(self._prompt(window.contents, window.token_ids) for window in windows)
        except OverLongError as error:
            return Rejected(Reason.OVER_LONG, str(error))
        except RenderError as error:
            return Rejected(Reason.RENDER_ERROR, str(error))
        return Prepared(prompts, self._overlong_spec.combine, self._overlong_spec.separator)

    def _encode(self, contents: list[str]) -> list[int]:
        assert self._encoder is not None
        return self._encoder.encode([self._text(contents)])[0]

    def _render(self, row: Row) -> list[str]:
        return self._template.contents(row)


def _is_plain_text(spec: JobSpec) -> bool:
    """Whether the rendered template is the whole prompt.

    So it is for embedding, unless the job asks for a conversation: embedding models seldom have one.
    """
    prompt = spec.prompt
    if not isinstance(spec.task, EmbedTask):
        return not prompt.chat
    return not (prompt.messages or prompt.system or prompt.examples or prompt.chat_template)


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, str) and not value.strip())
