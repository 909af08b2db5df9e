"""Rows as a person should see them: the prompt as rendered beside what came of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answers import ShardAnswers
from airflow_batchinfer.pipeline.sampling import Ids, RowSample
from airflow_batchinfer.prompts.sandbox import RenderError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.shard import CUSTOM_ID, INPUT, ROW_ID

LONGEST_TEXT = 4_000
"""Characters of one text that are shown; prompts can be a thousand times longer."""

_COLUMNS = (
    "outcome",
    "reason",
    "message",
    "output",
    "vector",
    "finish_reason",
    "prompt_tokens",
    "output_tokens",
    "attempts",
)


class ShownRow(Document):
    """One row with its prompt and its answer; long texts are cut and say so."""

    row_id: int
    custom_id: str | None
    shard: int
    outcome: str
    reason: str | None
    message: str | None
    prompt: list[dict[str, str]]
    """Messages as rendered (`role`, `content`), before the over-long policy and the chat template."""
    output: str | None
    finish_reason: str | None
    prompt_tokens: int
    output_tokens: int
    attempts: int


class RowPicker:
    """Draws rows while shards go by: some that succeeded, and some dead ones of each reason."""

    def __init__(self, succeeded: int, dead_of_each_reason: int, seed: int) -> None:
        self._good = RowSample(succeeded, seed)
        self._dead: dict[str, RowSample] = {}
        self._dead_size = dead_of_each_reason
        self._seed = seed

    def see(self, shard: ShardAnswers) -> None:
        """Offer the rows of one shard that have an outcome. Raises `CorruptError`."""
        table = shard.answers(["outcome", "reason"])
        number = shard.planned.shard
        good = pc.equal(table["outcome"], Outcome.SUCCEEDED.value)
        self._good.add(_ids(table.filter(good)), number)
        for reason in pc.unique(table["reason"].drop_null()).to_pylist():
            sample = self._dead.setdefault(reason, RowSample(self._dead_size, self._seed))
            sample.add(_ids(table.filter(pc.equal(table["reason"], reason))), number)

    def succeeded(self, shards: Mapping[int, ShardAnswers]) -> list[ShownRow]:
        """The drawn rows that succeeded, in order of rank, which is random."""
        return _show_sample(self._good, shards)

    def dead(self, shards: Mapping[int, ShardAnswers]) -> dict[str, list[ShownRow]]:
        """The drawn dead rows by reason."""
        return {reason: _show_sample(s, shards) for reason, s in sorted(self._dead.items())}


def show_rows(shard: ShardAnswers, row_ids: Ids) -> list[ShownRow]:
    """The given rows of one shard, those that have an outcome, by row id. Raises `CorruptError`."""
    answers = shard.answers(_COLUMNS, keep=row_ids).to_pylist()
    sent = shard.sent([ROW_ID, CUSTOM_ID, INPUT])
    sent = sent.filter(pc.is_in(sent[ROW_ID], value_set=pa.array(row_ids)))
    rows = {row[ROW_ID]: row for row in sent.to_pylist()}
    template = PromptTemplate(shard.plan.spec.prompt)
    return [
        _shown(answer, rows[answer[ROW_ID]], template, shard.planned.shard)
        for answer in sorted(answers, key=lambda a: int(a[ROW_ID]))
    ]


def cut(text: str, longest: int = LONGEST_TEXT) -> str:
    """The text, or its start and a note of how much is left out."""
    if len(text) <= longest:
        return text
    return f"{text[:longest]}… [{len(text) - longest:,} more characters]"


def one_line(value: Any, longest: int = 200) -> str:
    """A value as a short line, text quoted: what it holds must not look like another line of a log."""
    return repr(str(cut(value, longest))) if isinstance(value, str) else cut(str(value), longest)


def _show_sample(sample: RowSample, shards: Mapping[int, ShardAnswers]) -> list[ShownRow]:
    shown: Iterable[list[ShownRow]] = (show_rows(shards[n], ids) for n, ids in sample.by_tag().items())
    return [row for rows in shown for row in rows]


def _shown(answer: dict[str, Any], row: dict[str, Any], template: PromptTemplate, shard: int) -> ShownRow:
    output = answer["output"]
    if output is None and answer["vector"] is not None:
        output = _describe_vector(np.asarray(answer["vector"], np.float32))
    return ShownRow(
        row_id=answer[ROW_ID],
        custom_id=row[CUSTOM_ID],
        shard=shard,
        outcome=answer["outcome"],
        reason=answer["reason"],
        message=None if answer["message"] is None else cut(answer["message"]),
        prompt=_prompt(template, row[INPUT]),
        output=None if output is None else cut(output),
        finish_reason=answer["finish_reason"],
        prompt_tokens=answer["prompt_tokens"],
        output_tokens=answer["output_tokens"],
        attempts=answer["attempts"],
    )


def _prompt(template: PromptTemplate, row: dict[str, Any]) -> list[dict[str, str]]:
    try:
        rendered = template.render(row)
    except RenderError as error:
        return [{"role": "render error", "content": cut(str(error))}]
    if rendered.messages is not None:
        return [{"role": m["role"], "content": cut(m["content"])} for m in rendered.messages]
    return [{"role": "text", "content": cut(rendered.text or "")}]


def _describe_vector(vector: np.ndarray[Any, np.dtype[np.float32]]) -> str:
    start = ", ".join(f"{x:.4f}" for x in vector[:6])
    return f"[{start}, …] · {len(vector)} numbers · length {float(np.linalg.norm(vector)):.4f}"


def _ids(table: pa.Table) -> Ids:
    ids: Ids = table[ROW_ID].to_numpy()
    return ids
