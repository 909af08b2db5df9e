"""A run's profile: what its answers look like in numbers, small enough to keep for ever.

The report draws it, the pilot and the drift check judge by it, the next run is compared with it.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from airflow_batchinfer.outcome import Outcome, Reason
from airflow_batchinfer.pipeline.answers import ShardAnswers, copies_of
from airflow_batchinfer.pipeline.histogram import Histogram
from airflow_batchinfer.pipeline.vectors import measure_vectors
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, GenerateTask

_COUNTED = ("outcome", "reason", "finish_reason")
_NUMBERS = ("prompt_tokens", "output_tokens", "cached_tokens", "attempts")

_REFUSAL = (
    r"^\W*(i'?m sorry|i am sorry|sorry,|i apologi[sz]e|as an ai\b|i('m| am) (not able|unable)|"
    r"i can(no|')t (help|assist|answer|provide|comply))"
)
"""How a model's refusal begins, in English. A hint, not a proof."""


class Profile(Document):
    """Counts are of input rows; lengths, tokens and attempts of sent rows (copies cost nothing)."""

    rows: int = Field(0, description="Input rows that have an outcome.")
    sent: int = Field(0, description="Sent rows that have an outcome.")
    counts: dict[str, int] = Field(default_factory=dict, description="By outcome.")
    reasons: dict[str, int] = Field(default_factory=dict, description="By reason of the dead.")
    finish_reasons: dict[str, int] = Field(default_factory=dict, description="Of rows that succeeded.")
    labels: dict[str, int] = Field(default_factory=dict, description="`choice`: answers that succeeded.")
    refusals: int = Field(0, description="`generate`: answers that succeeded but refuse, by their words.")
    prompt_tokens: Histogram = Histogram()
    output_tokens: Histogram = Histogram()
    vector_norms: Histogram = Field(Histogram(), description="`embed`: norms in thousandths.")
    cached_tokens: int = 0
    retried: int = Field(0, description="Sent rows that took more than one attempt.")
    saved_tokens: int = Field(0, description="Tokens that copies would have cost.")

    @property
    def tokens(self) -> Tokens:
        """What the rows that have an outcome cost."""
        return Tokens(
            prompt=self.prompt_tokens.total, output=self.output_tokens.total, cached=self.cached_tokens
        )

    def plus(self, other: Profile) -> Profile:
        """Both together."""
        return Profile(
            rows=self.rows + other.rows,
            sent=self.sent + other.sent,
            counts=_sum(self.counts, other.counts),
            reasons=_sum(self.reasons, other.reasons),
            finish_reasons=_sum(self.finish_reasons, other.finish_reasons),
            labels=_sum(self.labels, other.labels),
            refusals=self.refusals + other.refusals,
            prompt_tokens=self.prompt_tokens.plus(other.prompt_tokens),
            output_tokens=self.output_tokens.plus(other.output_tokens),
            vector_norms=self.vector_norms.plus(other.vector_norms),
            cached_tokens=self.cached_tokens + other.cached_tokens,
            retried=self.retried + other.retried,
            saved_tokens=self.saved_tokens + other.saved_tokens,
        )


def profile_shard(shard: ShardAnswers) -> Profile:
    """The profile of one shard's durable answers. Raises `CorruptError`."""
    task = shard.plan.spec.task
    labelled, free, embeds = (isinstance(task, t) for t in (ChoiceTask, GenerateTask, EmbedTask))
    answer = ["vector"] if embeds else ["output"] if labelled or free else []
    table = shard.as_committed().answers([*_COUNTED, *_NUMBERS, *answer])
    if table.num_rows == 0:
        return Profile()
    row_ids = table[ROW_ID].to_numpy()
    copies = copies_of(shard, row_ids)
    weight = pa.array(1 + copies)
    # A copy may be quarantined for what it carries while the row that was sent is not, and the reverse.
    quarantined = shard.quarantined_inputs(row_ids)
    out = int(quarantined.sum())
    left = pa.array(1 + copies - quarantined)
    good = pc.and_(pc.equal(table["outcome"], Outcome.SUCCEEDED.value), pc.greater(left, 0))
    prompt = table["prompt_tokens"].to_numpy().astype(np.int64)
    output = table["output_tokens"].to_numpy().astype(np.int64)
    ran = (prompt + output) > 0
    return Profile(
        rows=int(pc.sum(weight).as_py()),
        sent=table.num_rows,
        counts=_moved(_tally(table["outcome"], weight), Outcome.SUCCEEDED, Outcome.INVALID, out),
        reasons=_moved(_tally(table["reason"], weight), None, Reason.EXPECTATION_FAILED, out),
        finish_reasons=_tally(table["finish_reason"].filter(good), left.filter(_flat(good))),
        labels=_tally(table["output"].filter(good), left.filter(_flat(good))) if labelled else {},
        refusals=_refusals(table["output"].filter(good), left.filter(_flat(good))) if free else 0,
        vector_norms=_norms(table["vector"].filter(good)) if embeds else Histogram(),
        prompt_tokens=Histogram.of(prompt[ran]),
        output_tokens=Histogram.of(output[ran]),
        cached_tokens=int(table["cached_tokens"].to_numpy().sum()),
        retried=int((table["attempts"].to_numpy() > 1).sum()),
        saved_tokens=int((copies * (prompt + output)).sum()),
    )


def _tally(values: pa.ChunkedArray, weight: pa.Array) -> dict[str, int]:
    """Weighted counts of the values that are not null."""
    grouped = pa.table({"value": values, "weight": weight}).group_by("value").aggregate([("weight", "sum")])
    pairs = zip(grouped["value"].to_pylist(), grouped["weight_sum"].to_pylist(), strict=True)
    return {value: int(n) for value, n in sorted(pairs, key=lambda p: str(p[0])) if value is not None}


def _moved(counts: dict[str, int], source: str | None, target: str, rows: int) -> dict[str, int]:
    """The counts after so many rows went from one to the other."""
    if not rows:
        return counts
    moved = counts | {target: counts.get(target, 0) + rows}
    if source is not None:
        moved[source] = moved.get(source, 0) - rows
    return {str(k): n for k, n in sorted(moved.items()) if n}


def _refusals(outputs: pa.ChunkedArray, weight: pa.Array) -> int:
    refuses = pc.match_substring_regex(outputs, _REFUSAL, ignore_case=True)
    return int(pc.sum(weight.filter(_flat(pc.fill_null(refuses, False)))).as_py() or 0)


def _norms(vectors: pa.ChunkedArray) -> Histogram:
    _, norms = measure_vectors(vectors)
    return Histogram.of(np.round(norms * 1000).astype(np.int64))


def _flat(mask: pa.ChunkedArray) -> pa.Array:
    return mask.combine_chunks() if isinstance(mask, pa.ChunkedArray) else mask


def _sum(one: dict[str, int], other: dict[str, int]) -> dict[str, int]:
    return dict(sorted((Counter(one) + Counter(other)).items()))
