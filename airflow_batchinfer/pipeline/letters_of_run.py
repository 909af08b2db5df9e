"""A run's dead letters as they stand now: what the run left, overlaid by what its replays brought."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field

from airflow_batchinfer.pipeline.answered import AnsweredBatch
from airflow_batchinfer.pipeline.answers import positions
from airflow_batchinfer.pipeline.buckets import Buckets, side_by_side
from airflow_batchinfer.pipeline.dead_letters import SCHEMA, LetterWriter, Status
from airflow_batchinfer.run.document import Document, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


class ReplayNote(Document):
    """Stands in the repaired run's folder, once a replay's results are published."""

    run_id: str
    folder: str
    created_at: Timestamp = Field(description="When the replay was planned, ISO 8601.")


def replays_of(store: Store, layout: RunLayout) -> list[ReplayNote]:
    """Notes of a run's replays, oldest first."""
    notes = [ReplayNote.read(store, i.key) for i in store.list(layout.replays) if i.key.endswith(".json")]
    return sorted(notes, key=lambda note: (note.created_at, note.run_id))


def run_letters(plan: Plan, rows: Iterator[AnsweredBatch]) -> Iterator[pa.RecordBatch]:
    """Letters that a run itself leaves, filed under its id."""
    writer = LetterWriter(plan)
    for batch in rows:
        letters = writer.letters(batch)
        if letters is not None:
            yield letters


def overlaid(
    base: Iterator[pa.RecordBatch],
    replays: list[Iterator[pa.RecordBatch]],
    resolved: npt.NDArray[np.int64],
    scratch: Path,
) -> Iterator[pa.RecordBatch]:
    """The run's letters with the replays' outcome: `resolved` rows first of all, else the last letter.

    Args:
        base: letters of the run.
        replays: letters of its replays, oldest first.
        resolved: rows that a replay put into the results.
        scratch: folder for what does not fit in memory.
    """
    if not replays and not len(resolved):
        yield from base
        return
    layers = [_bucketed(layer, scratch) for layer in [base, *replays]]
    for letters, *laters in side_by_side(layers):
        for later in laters:
            if later.num_rows:
                letters = _laid_over(letters, later)
        yield from _with_resolved(letters, resolved).to_batches()


def _bucketed(letters: Iterator[pa.RecordBatch], scratch: Path) -> Buckets:
    buckets = Buckets(scratch, SCHEMA, "row_id")
    for batch in letters:
        buckets.add(batch)
    buckets.finish()
    return buckets


def _laid_over(letters: pa.Table, later: pa.Table) -> pa.Table:
    """Where `later` has the row, what it says; attempts and replays add up."""
    at, found = positions(later["row_id"].to_numpy(), letters["row_id"].to_numpy())
    again = pa.array(found)
    newer = later.take(pa.array(np.where(found, at, 0)))
    for name in ("outcome", "reason", "message", "last_output", "fingerprint", "at", "last_run"):
        letters = _set(letters, name, pc.if_else(again, newer[name], letters[name]))
    letters = _set(letters, "status", pc.if_else(again, Status.REPLAYED.value, letters["status"]))
    more = pc.if_else(again, newer["attempts"], pa.scalar(0, pa.int32()))
    letters = _set(letters, "attempts", pc.add(letters["attempts"], more))
    return _set(letters, "replays", pc.add(letters["replays"], again.cast(pa.int32())))


def _with_resolved(letters: pa.Table, resolved: npt.NDArray[np.int64]) -> pa.Table:
    done = pa.array(np.isin(letters["row_id"].to_numpy(), resolved))
    letters = _set(letters, "status", pc.if_else(done, Status.RESOLVED.value, letters["status"]))
    return _set(letters, "replays", pc.add(letters["replays"], done.cast(pa.int32())))


def _set(table: pa.Table, name: str, values: pa.ChunkedArray | pa.Array) -> pa.Table:
    field = table.schema.field(name)
    return table.set_column(table.schema.get_field_index(name), field, values.cast(field.type))
