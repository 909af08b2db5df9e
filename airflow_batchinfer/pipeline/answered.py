"""Answered rows: a shard's input rows, copies included, each beside its answer, as a stream.

Only the shard's answers are held whole; rows and copies go by in batches. A shard's copies may be many
times its sent rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.pipeline.answers import positions, struct_field
from airflow_batchinfer.pipeline.quarantine import take_out
from airflow_batchinfer.run.commit import Commit
from airflow_batchinfer.run.parquet import batch_rows, open_parquet
from airflow_batchinfer.run.plan import Plan, PlannedShard
from airflow_batchinfer.run.shard import CARRY, COPIES, CUSTOM_ID, INPUT, PART_SCHEMA, ROW_ID, TRACKED_FIELDS
from airflow_batchinfer.store import Store

_BATCH_ROWS = 8_192

STRETCH_BYTES = 8 * 1024 * 1024
"""Prompts that stand beside their copies at once, about."""


@dataclass(frozen=True)
class AnsweredBatch:
    """Some input rows and their answers, line by line.

    Attributes:
        row_ids: int64.
        custom_ids: text, or null.
        carried: by the names of the carried columns.
        input: the columns that the prompt reads, as a struct.
        answers: columns of `PART_SCHEMA` without `row_id`.
        tracked: `input_digest` and `change` of incremental jobs' rows; nulls for others.
        copy_of: row id of the sent row that was paid for; null for a row that was sent itself.
    """

    row_ids: pa.Array
    custom_ids: pa.Array
    carried: dict[str, pa.Array]
    input: pa.StructArray
    answers: pa.RecordBatch
    tracked: dict[str, pa.Array]
    copy_of: pa.Array

    def without(self, quarantined: pa.Table) -> AnsweredBatch:
        """The batch with quarantined rows as dead; see `quarantine.take_out`."""
        return replace(self, answers=take_out(self.answers, self.row_ids, quarantined))


def answered_rows(
    store: Store, shard: PlannedShard, commit: Commit, carried: Sequence[str]
) -> Iterator[AnsweredBatch]:
    """All input rows of a shard, sent rows first.

    Raises:
        CorruptError: a file is missing or damaged, or a row has no answer.
    """
    answers = _answers(store, commit)
    weights = 0
    for rows in _batches(store, shard.rows_key):
        weights += pc.sum(rows.column(COPIES)).as_py() or 0
        yield _beside(store, shard, rows, rows, rows.column(ROW_ID), answers, carried)
    if shard.copies_key is None:
        if weights:
            raise CorruptError(
                f"{store.uri_of(shard.rows_key)} counts copies, and the plan names no copies file"
            )
        return
    sent = _Inputs(store, shard.rows_key)
    for copies in _batches(store, shard.copies_key):
        for some, inputs in sent.beside(copies):
            yield _beside(store, shard, some, inputs, some.column("copy_of"), answers, carried)


def planned_row_ids(store: Store, plan: Plan) -> npt.NDArray[np.int64]:
    """Row ids of all the plan's shards, copies included: for replays, since all are held."""
    keys = [key for shard in plan.shards for key in (shard.rows_key, shard.copies_key) if key]
    batches = (batch for key in keys for batch in _batches(store, key, [ROW_ID]))
    return np.concatenate([np.empty(0, np.int64), *(b.column(ROW_ID).to_numpy() for b in batches)])


class _Inputs:
    """The `input` of sent rows by row id: only the rows that have copies are held."""

    def __init__(self, store: Store, key: str) -> None:
        self._rows = pa.Table.from_batches(
            [
                batch.filter(pc.greater(batch.column(COPIES), 0))
                for batch in _batches(store, key, [ROW_ID, COPIES, INPUT])
            ]
        )
        self._ids = self._rows[ROW_ID].to_numpy()
        sizes = [_sizes(inputs) for inputs in self._rows[INPUT].chunks]
        self._sizes = np.concatenate([np.empty(0, np.int64), *sizes])

    def beside(self, copies: pa.RecordBatch) -> Iterator[tuple[pa.RecordBatch, pa.RecordBatch]]:
        """Stretches of the copies, and line by line the rows that they copy.

        A copy is narrow, but a long prompt may have thousands: a stretch ends where the prompts get too big.
        """
        at, found = positions(self._ids, copies.column("copy_of").to_numpy())
        if not found.all():
            raise CorruptError("a copy points to a row that its shard does not have")
        _, starts = np.unique(np.cumsum(self._sizes[at]) // STRETCH_BYTES, return_index=True)
        for start, end in pairwise([*starts.tolist(), len(at)]):
            rows = self._rows.take(pa.array(at[start:end])).combine_chunks()
            yield copies.slice(start, end - start), rows.to_batches()[0]


def _sizes(inputs: pa.StructArray) -> npt.NDArray[np.int64]:
    """About how many bytes each line takes: texts as they are, all else as on average."""
    sizes = np.zeros(len(inputs), np.int64)
    for values in inputs.flatten():
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            sizes += pc.fill_null(pc.binary_length(values), 0).to_numpy().astype(np.int64)
        else:
            sizes += values.nbytes // max(1, len(values))
    return sizes


def _beside(
    store: Store,
    shard: PlannedShard,
    own: pa.RecordBatch,
    sent: pa.RecordBatch,
    answered_by: pa.Array,
    answers: pa.Table,
    carried: Sequence[str],
) -> AnsweredBatch:
    at, found = positions(answers[ROW_ID].to_numpy(), answered_by.to_numpy())
    if not found.all():
        missing = answered_by.filter(pa.array(~found))
        raise CorruptError(f"shard {shard.shard}: row_id {missing[0]} has no answer: clear reconcile")
    inputs = sent.column(INPUT)
    names = {f.name for f in own.schema.field(CARRY).type} if CARRY in own.schema.names else set()
    columns = {name: struct_field(own.column(CARRY) if name in names else inputs, name) for name in carried}
    taken = answers.drop_columns(ROW_ID).take(pa.array(at)).combine_chunks().to_batches()
    return AnsweredBatch(
        row_ids=own.column(ROW_ID),
        custom_ids=own.column(CUSTOM_ID),
        carried=columns,
        input=inputs,
        answers=taken[0],
        tracked={
            f.name: own.column(f.name) if f.name in own.schema.names else pa.nulls(own.num_rows, f.type)
            for f in TRACKED_FIELDS
        },
        copy_of=answered_by if own is not sent else pa.nulls(own.num_rows, pa.int64()),
    )


def _answers(store: Store, commit: Commit) -> pa.Table:
    """The commit's answers, each row once: from the first part in its list that has the row."""
    tables: list[pa.Table] = []
    seen: pa.Array | None = None
    for part in commit.parts:
        with open_parquet(store, part.key, "clear reconcile") as file:
            table = file.read(PART_SCHEMA.names).cast(PART_SCHEMA)
        ids = table[ROW_ID].combine_chunks()
        if seen is not None and commit.overlapping_rows:
            table = table.filter(pc.invert(pc.is_in(ids, seen)))
        seen = ids if seen is None else pa.concat_arrays([seen, ids])
        tables.append(table)
    return pa.concat_tables(tables) if tables else PART_SCHEMA.empty_table()


def _batches(store: Store, key: str, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    with open_parquet(store, key) as file:
        for batch in file.iter_batches(
            batch_rows(file.metadata, _BATCH_ROWS), columns=columns and list(columns)
        ):
            if batch.num_rows:
                yield batch
