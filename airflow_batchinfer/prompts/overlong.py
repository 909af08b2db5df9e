"""Rows that do not fit: cut the named column, never the instructions, or split it into windows.

All cuts are made between tokens of the column's own text; the row is rendered again and counted again,
since a template may use a column twice, or change it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.tokens import TextEncoder
from airflow_batchinfer.spec import OverLongSpec

Row = Mapping[str, Any]

_STEPS = 4
_ROUNDS = 32
"""Attempts at finding the longest part that fits: by steps, then by halves, which is enough for any text."""


class OverLongError(Exception):
    """The row cannot be made to fit; says by how much, and why the policy did not help."""


@dataclass(frozen=True, slots=True)
class Window:
    """A prompt that fits: the rendered contents of the cut row, and their token ids."""

    contents: list[str]
    token_ids: list[int]


class OverLong:
    """A job's over-long policy."""

    def __init__(
        self,
        spec: OverLongSpec,
        encoder: TextEncoder,
        render: Callable[[Row], list[str]],
        encode: Callable[[list[str]], list[int]],
        limit: int,
    ) -> None:
        """Bind the policy to a job.

        Args:
            spec: the policy.
            encoder: tells where a text's tokens are.
            render: a row's contents; raises `RenderError`.
            encode: token ids of the prompt around some contents; raises `RenderError`.
            limit: most tokens a prompt may have.

        Raises:
            SpecError: the policy cuts texts, and the tokenizer cannot tell where their tokens are.
        """
        if spec.policy != "reject" and not encoder.knows_spans:
            raise SpecError(
                f"overlong.policy: `{spec.policy}` needs a fast tokenizer (a model with tokenizer.json); use "
                "`reject`, or name another in `model.tokenizer`"
            )
        self._spec = spec
        self._encoder = encoder
        self._render = render
        self._encode = encode
        self._limit = limit

    def fit(self, row: Row, tokens: int) -> list[Window]:
        """The prompts that stand for a row of `tokens` tokens: one, or its windows.

        Raises:
            OverLongError: the policy is `reject`, or cannot help.
            RenderError: the template fails on the cut row.
        """
        if self._spec.policy == "reject":
            raise OverLongError(self._excess(tokens))
        column = self._spec.column
        assert column is not None
        text = row.get(column)
        if not isinstance(text, str):
            kind = type(text).__name__
            raise OverLongError(
                f"{self._excess(tokens)}; column `{column}` is {kind}, and only text can be cut"
            )
        spans = self._encoder.spans(text)
        if self._spec.policy == "truncate":
            return [self._truncate(row, column, text, spans, tokens)]
        return self._split(row, column, text, spans, tokens)

    def _truncate(
        self, row: Row, column: str, text: str, spans: list[tuple[int, int]], tokens: int
    ) -> Window:
        """Keep as much of the column as fits."""

        def kept(count: int) -> Window:
            return self._window({**row, column: _keep(text, spans, count, self._spec.keep)})

        guess = len(spans) - (tokens - self._limit)
        _, found = _largest(kept, guess, len(spans) - 1, self._limit)
        if found is None:
            raise OverLongError(self._instructions_too_long(row, column, tokens))
        return found

    def _split(
        self, row: Row, column: str, text: str, spans: list[tuple[int, int]], tokens: int
    ) -> list[Window]:
        """Windows of the column that overlap, each as long as fits."""
        overlap = self._spec.overlap_tokens
        windows: list[Window] = []
        start = 0
        while True:

            def window(count: int, start: int = start) -> Window:
                last = min(start + count, len(spans)) - 1
                return self._window({**row, column: text[spans[start][0] : spans[last][1]]})

            rest = len(spans) - start
            guess = len(spans) - (tokens - self._limit)
            count, found = _largest(window, min(guess, rest), rest, self._limit)
            if found is None or (count < rest and count <= overlap):
                raise OverLongError(
                    f"{self._instructions_too_long(row, column, tokens)}; a window holds {count} tokens of "
                    f"it, and neighbours must share overlong.overlap_tokens={overlap}"
                )
            windows.append(found)
            if count >= rest:
                return windows
            start += count - overlap

    def _window(self, row: Row) -> Window:
        contents = self._render(row)
        return Window(contents, self._encode(contents))

    def _excess(self, tokens: int) -> str:
        return f"the prompt has {tokens} tokens, and {self._limit} fit beside the answer"

    def _instructions_too_long(self, row: Row, column: str, tokens: int) -> str:
        try:
            rest = len(self._window({**row, column: ""}).token_ids)
        except RenderError:
            return self._excess(tokens)
        return f"{self._excess(tokens)}; {rest} of them are not in column `{column}`"


def _keep(text: str, spans: list[tuple[int, int]], count: int, keep: str) -> str:
    """`count` tokens of a text, from its start, its end, or half from both."""
    if count <= 0:
        return ""
    if keep == "start":
        return text[: spans[count - 1][1]]
    if keep == "end":
        return text[spans[len(spans) - count][0] :]
    front = (count + 1) // 2
    back = count - front
    tail = text[spans[len(spans) - back][0] :] if back else ""
    return text[: spans[front - 1][1]] + tail


def _largest(
    window_of: Callable[[int], Window], guess: int, most: int, limit: int
) -> tuple[int, Window | None]:
    """The largest count up to `most` (about) whose window fits, and that window; 0 and none if none fits.

    Steps by the tokens that lack or are left, which nearly always ends after one or two, then by halves.
    """
    low, high = 0, most + 1  # `low` fits, or is 0; `high` does not fit
    best: Window | None = None
    count = max(1, min(guess, most))
    for tried in range(_ROUNDS):
        if not low < count < high:
            break
        window = window_of(count)
        slack = limit - len(window.token_ids)
        if slack >= 0:
            low, best = count, window
        else:
            high = count
        if slack == 0:
            break
        count += slack
        if tried >= _STEPS or not low < count < high:
            count = (low + high) // 2
    return low, best
