"""Dead letters: one row of the table for each row of a finished run that did not succeed."""

from __future__ import annotations

from enum import StrEnum

import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answered import AnsweredBatch
from airflow_batchinfer.pipeline.duck import Converter, duck_type
from airflow_batchinfer.run.plan import Plan


class Status(StrEnum):
    """What has become of a dead letter."""

    OPEN = "open"
    REPLAYED = "replayed"
    """Sent again, and dead again: reason, message and output are the last replay's."""
    RESOLVED = "resolved"
    """Sent again with success: the results have it."""


SCHEMA = pa.schema(
    [
        pa.field("job", pa.string()),
        pa.field("run_id", pa.string()),
        pa.field("row_id", pa.int64()),
        pa.field("custom_id", pa.string()),
        pa.field("outcome", pa.string()),
        pa.field("reason", pa.string()),
        pa.field("message", pa.string()),
        pa.field("attempts", pa.int32()),
        pa.field("input", pa.string()),
        pa.field("last_output", pa.string()),
        pa.field("fingerprint", pa.string()),
        pa.field("at", pa.timestamp("us", tz="UTC")),
        pa.field("status", pa.string()),
        pa.field("replays", pa.int32()),
        pa.field("last_run", pa.string()),
    ]
)
"""Columns of the table. `input` is JSON text of the columns the prompt reads. `attempts` counts over the
run and its replays; `replays` how often the row was sent again; `last_run` is the last run that ended
with it dead."""

PARTITION_BY = ("job", "run_id")


class LetterWriter:
    """Turns answered rows into letters. For one thread at a time."""

    def __init__(self, plan: Plan) -> None:
        """Letters of `plan`'s run, filed under the run that it repairs if it is a replay."""
        self._plan = plan
        self._run_id = plan.replay_of.run_id if plan.replay_of else plan.run_id
        self._converter = Converter()

    def letters(self, batch: AnsweredBatch) -> pa.RecordBatch | None:
        """Letters of a batch's dead rows, none if all succeeded."""
        dead = pc.not_equal(batch.answers.column("outcome"), Outcome.SUCCEEDED.value)
        count = pc.sum(dead).as_py() or 0
        if not count:
            return None
        answers = batch.answers.filter(dead)

        def same(value: str | int, kind: pa.DataType) -> pa.Array:
            return pa.repeat(pa.scalar(value, kind), count)

        columns = {
            "job": same(self._plan.job, pa.string()),
            "run_id": same(self._run_id, pa.string()),
            "row_id": batch.row_ids.filter(dead),
            "custom_id": batch.custom_ids.filter(dead),
            "outcome": answers.column("outcome"),
            "reason": answers.column("reason"),
            "message": answers.column("message"),
            "attempts": answers.column("attempts").cast(pa.int32()),
            "input": self._as_json(batch.input.filter(dead)),
            "last_output": answers.column("output"),
            "fingerprint": same(self._plan.fingerprint, pa.string()),
            "at": answers.column("finished_at").cast(pa.timestamp("us", tz="UTC")),
            "status": same(Status.OPEN.value, pa.string()),
            "replays": same(0, pa.int32()),
            "last_run": same(self._plan.run_id, pa.string()),
        }
        return pa.record_batch([columns[name] for name in SCHEMA.names], schema=SCHEMA)

    def _as_json(self, inputs: pa.StructArray) -> pa.Array:
        readable = inputs.cast(duck_type(inputs.type))
        return self._converter.convert(readable, "to_json(value)::VARCHAR")
