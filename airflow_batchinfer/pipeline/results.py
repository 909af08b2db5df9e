"""Results: the columns of the results table, and answered rows as such columns."""

from __future__ import annotations

import base64
from datetime import datetime

import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.pipeline.answered import AnsweredBatch
from airflow_batchinfer.pipeline.outputs import OutputColumns
from airflow_batchinfer.pipeline.tables import delta_type
from airflow_batchinfer.run.outcome import Outcome
from airflow_batchinfer.run.plan import Plan

PARTITION_BY = ("run_id", "answered_in")

_ANSWER_FIELDS = [
    pa.field("finish_reason", pa.string()),
    pa.field("prompt_tokens", pa.int32()),
    pa.field("output_tokens", pa.int32()),
    pa.field("cached_tokens", pa.int32()),
    pa.field("attempts", pa.int16()),
    pa.field("finished_at", pa.timestamp("us", tz="UTC")),
]


class ResultColumns:
    """Makes rows of the results table of one run.

    Columns: `row_id`, `custom_id`, the carried columns, the output columns, how the answer came about
    (`finish_reason`, tokens, `attempts`, `finished_at`, `copy_of`), and where it belongs: `job`,
    `run_id`, `run_created_at`, `generation`, `answered_in` (the run that paid for it, another than
    `run_id` after a replay) and `fingerprint`.
    """

    def __init__(self, plan: Plan, *, run_id: str, run_created_at: str, generation: int) -> None:
        """Rows answered in `plan`'s run, filed under `run_id`."""
        self._outputs = OutputColumns(plan.spec)
        self._carried = carried_schema(plan)
        prefix = plan.spec.output.carry_prefix
        self._same = {
            "job": pa.scalar(plan.job),
            "run_id": pa.scalar(run_id),
            "run_created_at": pa.scalar(datetime.fromisoformat(run_created_at), pa.timestamp("us", "UTC")),
            "generation": pa.scalar(generation, pa.int32()),
            "answered_in": pa.scalar(plan.run_id),
            "fingerprint": pa.scalar(plan.fingerprint),
        }
        self.exact_schema = pa.schema(
            [
                pa.field("row_id", pa.int64()),
                pa.field("custom_id", pa.string()),
                *(pa.field(prefix + f.name, f.type) for f in self._carried),
                *self._outputs.fields,
                *_ANSWER_FIELDS,
                pa.field("copy_of", pa.int64()),
                *(pa.field(name, value.type) for name, value in self._same.items()),
            ]
        )
        """With the input's own types: what exports write."""
        self.schema = pa.schema([f.with_type(delta_type(f.type)) for f in self.exact_schema])
        """With types that Delta has."""

    def rows(self, batch: AnsweredBatch, *, exact: bool) -> pa.RecordBatch | None:
        """Rows of `schema` or `exact_schema` for the batch's succeeded rows; none if there are none."""
        good = pc.equal(batch.answers.column("outcome"), Outcome.SUCCEEDED.value)
        count = pc.sum(good).as_py() or 0
        if not count:
            return None
        answers = batch.answers.filter(good)
        columns = [batch.row_ids.filter(good), batch.custom_ids.filter(good)]
        for field in self._carried:
            columns.append(to_type(batch.carried[field.name].filter(good), field.type))
        columns += self._outputs.columns(answers.column(self._outputs.source))
        columns += [answers.column(f.name).cast(f.type) for f in _ANSWER_FIELDS]
        columns.append(batch.copy_of.filter(good))
        columns += [pa.repeat(value, count) for value in self._same.values()]
        if exact:
            return pa.record_batch(columns, schema=self.exact_schema)
        return pa.record_batch(
            [to_type(c, f.type) for c, f in zip(columns, self.schema, strict=True)], schema=self.schema
        )


def carried_schema(plan: Plan) -> pa.Schema:
    """The carried columns with the types that the input has them in."""
    if plan.input.carry_schema is None:
        return pa.schema([])
    return pa.ipc.read_schema(pa.py_buffer(base64.b64decode(plan.input.carry_schema)))


def to_type(values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast, also where Arrow has no direct cast: to text, and to coarser timestamps."""
    if values.type == kind:
        return values
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return values.cast(kind, safe=False)
    if pa.types.is_string(kind) and (pa.types.is_duration(values.type) or pa.types.is_nested(values.type)):
        return pa.array([None if v is None else str(v) for v in values.to_pylist()], pa.string())
    return values.cast(kind)
