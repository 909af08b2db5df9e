"""Increments: which rows of a new input need no engine, because the last published run answered them.

A row is known again by its id. It keeps its result if the content of the columns that the prompt reads
and the job's fingerprint are those of the last published run; the columns it carries along are always
today's. Everything else runs, and the plan says how many rows run for which reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from airflow_batchinfer.errors import CorruptError, SpecError, UnreadableError
from airflow_batchinfer.pipeline.duck import sql_text
from airflow_batchinfer.pipeline.keys import SQL_DIGEST
from airflow_batchinfer.pipeline.outputs import OutputColumns
from airflow_batchinfer.pipeline.results import PublishedRows, newest_published
from airflow_batchinfer.pipeline.tables import open_table, table_dataset
from airflow_batchinfer.run.fingerprint import (
    changed_fields,
    fields_of_dump,
    fingerprint,
    fingerprint_fields,
    given_fields,
)
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table, run_dir
from airflow_batchinfer.run.parquet import WRITE_OPTIONS
from airflow_batchinfer.run.plan import KeptRows, Plan
from airflow_batchinfer.run.shard import DIGEST
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

UNCHANGED = "unchanged"
REMOVED = "removed"

PRIOR_ROW_ID = "prior_row_id"


def kept_schema(carried: pa.Schema) -> pa.Schema:
    """Columns of the file of kept rows. `row_id` is negative for a row that is gone from the input."""
    fields = [
        pa.field("row_id", pa.int64()),
        pa.field("custom_id", pa.string()),
        pa.field(PRIOR_ROW_ID, pa.int64()),
    ]
    if len(carried):
        fields.append(pa.field("carry", pa.struct(list(carried))))
    return pa.schema(fields)


@dataclass
class Increment:
    """What the last published run of a job leaves to be done.

    `decide` finds it out; the rest is there afterwards.
    """

    store: Store
    spec: JobSpec
    prior: PublishedRows | None
    changes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    kept_path: Path | None = None
    """Parquet: `row_id`, `prior_row_id` of rows that keep their result, by `row_id`."""
    removed_path: Path | None = None
    """Parquet: `custom_id`, `prior_row_id` of rows that are gone."""
    removed: int = 0

    @classmethod
    def since_last_published(cls, store: Store, spec: JobSpec, run_id: str) -> Increment:
        """The increment since the newest run that stands in the results table, but `run_id` itself."""
        return cls(store, spec, newest_published(store, spec.name, other_than=run_id))

    def decide(self, connection: duckdb.DuckDBPyConnection, scratch: Path) -> None:
        """Say of each line of the table `keys` why it runs (`change`); take out those that do not run.

        Raises:
            SpecError: rows that are gone from the input cannot be kept, or answers that are to be kept do not
                stand where this run looks for them.
        """
        self._load_prior(connection)
        label, stale = self._job_change()
        connection.execute(
            f"""
            CREATE TABLE judged AS
            SELECT k.* REPLACE (CASE
                    WHEN p.custom_id IS NULL AND d.custom_id IS NULL THEN 'new'
                    WHEN p.custom_id IS NULL THEN 'failed before'
                    WHEN p.digest IS DISTINCT FROM {SQL_DIGEST} THEN 'changed'
                    WHEN {stale} THEN '{label}'
                    WHEN p.outdated THEN 'job changed'
                    ELSE '{UNCHANGED}' END AS change),
                p.{PRIOR_ROW_ID}
            FROM keys k LEFT JOIN prior p ON p.custom_id = k.id_text
                LEFT JOIN prior_dead d ON d.custom_id = k.id_text
            """
        )
        self.changes = dict(
            connection.execute(
                "SELECT change, count(*) FROM judged GROUP BY change ORDER BY change"
            ).fetchall()
        )
        self.kept_path, self.removed_path = scratch / "kept.parquet", scratch / "removed.parquet"
        connection.execute(
            f"COPY (SELECT row_id, {PRIOR_ROW_ID} FROM judged WHERE change = '{UNCHANGED}' ORDER BY row_id) "
            f"TO {sql_text(str(self.kept_path))} (FORMAT parquet)"
        )
        connection.execute(
            f"COPY (SELECT custom_id, {PRIOR_ROW_ID} FROM prior ANTI JOIN keys ON custom_id = id_text "
            f"WHERE NOT tombstone ORDER BY {PRIOR_ROW_ID}) "
            f"TO {sql_text(str(self.removed_path))} (FORMAT parquet)"
        )
        self.removed = pq.read_metadata(self.removed_path).num_rows
        self._check_removed()
        self._check_answers()
        connection.execute(f"DELETE FROM judged WHERE change = '{UNCHANGED}'")
        connection.execute(f"ALTER TABLE judged DROP COLUMN {PRIOR_ROW_ID}")
        connection.execute("DROP TABLE keys")
        connection.execute("ALTER TABLE judged RENAME TO keys")
        if stale == "true":
            self._warn(label)

    def _load_prior(self, connection: duckdb.DuckDBPyConnection) -> None:
        """Tables `prior` (rows with a result) and `prior_dead` (ids of dead letters)."""
        connection.execute(
            "CREATE TABLE prior "
            f"(custom_id VARCHAR, digest VARCHAR, {PRIOR_ROW_ID} BIGINT, tombstone BOOLEAN, outdated BOOLEAN)"
        )
        connection.execute("CREATE TABLE prior_dead (custom_id VARCHAR)")
        if self.prior is None:
            return
        here = ds.field("run_id") == self.prior.run_id
        _copy_into(
            connection,
            table_dataset(self.store, results_table(self.spec.name)),
            here & ds.field("custom_id").is_valid(),
            ["custom_id", DIGEST, "row_id", "change", "fingerprint"],
            f"INSERT INTO prior SELECT custom_id, {DIGEST}, row_id, "
            f"coalesce(change = '{REMOVED}' AND {DIGEST} IS NULL, false), "
            # The run has taken such a row along as it was, whatever had become of the job.
            f"coalesce(change = '{REMOVED}' AND fingerprint != '{fingerprint(self.spec)}', false)",
        )
        if open_table(self.store, DEAD_LETTERS) is not None:
            _copy_into(
                connection,
                table_dataset(self.store, DEAD_LETTERS),
                here & (ds.field("job") == self.spec.name) & (ds.field("status") != "resolved"),
                ["custom_id"],
                "INSERT INTO prior_dead SELECT DISTINCT custom_id",
            )

    def _job_change(self) -> tuple[str, str]:
        """A word for what changed in the job, and SQL for whether it did."""
        if self.prior is None:
            return "new", "false"
        if self.prior.fingerprint == fingerprint(self.spec):
            return UNCHANGED, "false"
        return f"{self._changed_part()} changed", "true"

    @cached_property
    def prior_plan(self) -> Plan | None:
        """The prior run's plan, if it is still there."""
        if self._prior_key is None:
            return None
        with suppress(FileNotFoundError, UnreadableError):
            return Plan.read(self.store, self._prior_key)
        return None

    @property
    def _prior_key(self) -> str | None:
        """Where the prior run's plan stands, or stood."""
        if self.prior is None:
            return None
        return RunLayout(run_dir(self.spec.name, self.prior.run_id, self.prior.generation)).plan

    @cached_property
    def _changed_fields(self) -> list[str]:
        """Fields in which the job differs from the prior run's; empty if its plan does not tell.

        The prior plan is taken as it was written: a release that dropped a field, or has given it another
        default, would not find the difference in its own reading of it.
        """
        if self._prior_key is None:
            return []
        with suppress(FileNotFoundError, CorruptError, KeyError):
            theirs = fields_of_dump(Plan.read_fields(self.store, self._prior_key)["spec"])
            given = given_fields(self.spec)
            ours = {k: v for k, v in fingerprint_fields(self.spec).items() if k in theirs or k in given}
            return changed_fields(theirs, ours) or ["the way in which fingerprints are made"]
        return []

    def _check_removed(self) -> None:
        """Fail if rows that are gone cannot keep what they have in the columns that this run writes."""
        if self.prior_plan is None or not self.removed or self.spec.removed_rows != "keep":
            return
        ours, theirs = OutputColumns(self.spec).fields, OutputColumns(self.prior_plan.spec).fields
        if [f.type for f in ours] != [f.type for f in theirs]:
            raise SpecError(
                f"removed_rows: `keep`, but the {self.removed} rows that are gone from the input have "
                f"{theirs[0].type} in `{theirs[0].name}`, and this run writes {ours[0].type} into "
                f"`{ours[0].name}`: set `removed_rows: tombstone`, or choose another job name"
            )

    def _check_answers(self) -> None:
        """Fail if answers are kept that stand in a column whose name only the prior plan would tell."""
        if self.prior is None or self.prior_plan is not None:
            return
        if not self.changes.get(UNCHANGED) and not (self.removed and self.spec.removed_rows == "keep"):
            return
        answer = OutputColumns(self.spec).fields[-1].name
        table = table_dataset(self.store, results_table(self.spec.name))
        if answer in table.schema.names:
            here = (ds.field("run_id") == self.prior.run_id) & ds.field(answer).is_valid()
            if table.head(1, columns=["row_id"], filter=here).num_rows:
                return
        raise SpecError(
            f"output.column: run {self.prior.run_id!r}, whose answers are to be kept, has none in "
            f"`{answer}`, and its plan, which would tell their column, is gone or cannot be read: set the "
            "`output.column` of that run, or choose another job name"
        )

    def _changed_part(self) -> str:
        sections = {name.split(".")[0] for name in self._changed_fields if "." in name}
        if sections == {"prompt"}:
            return "template"
        return sections.pop() if len(sections) == 1 else "job"

    def _warn(self, label: str) -> None:
        assert self.prior is not None
        fields = self._changed_fields
        self.warnings.append(
            f"the job has changed since run {self.prior.run_id!r}"
            + (f" in {', '.join(fields)}" if fields else "")
            + f": {self.changes.get(label, 0)} rows that had a result run again"
        )


class KeptWriter:
    """Writes the kept rows, with what they carry today, while the input goes by."""

    def __init__(self, increment: Increment, scratch: Path, carried: pa.Schema) -> None:
        assert increment.kept_path is not None
        assert increment.removed_path is not None
        self._increment = increment
        self._path = scratch / "kept-rows.parquet"
        self._carried = carried
        self._schema = kept_schema(carried)
        self._writer = pq.ParquetWriter(self._path, self._schema, **WRITE_OPTIONS)
        self._lines = _lines(increment.kept_path)
        self._rest: pa.Table | None = None
        self._rows = 0

    def add(self, ordinals: npt.NDArray[np.int64], ids: pa.Array, batch: pa.RecordBatch) -> None:
        """Take a batch of the input; only its kept rows are written."""
        kept = self._take(int(ordinals[-1]) + 1) if len(ordinals) else None
        if kept is None or not kept.num_rows:
            return
        at = pa.array(kept["row_id"].to_numpy() - ordinals[0])
        columns = [kept["row_id"].combine_chunks(), ids.take(at), kept[PRIOR_ROW_ID].combine_chunks()]
        if len(self._carried):
            values = [batch.column(name).take(at) for name in self._carried.names]
            columns.append(pa.StructArray.from_arrays(values, fields=list(self._carried)))
        self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        self._rows += kept.num_rows

    def close(self, store: Store, key: str) -> KeptRows | None:
        """Add the rows that are gone, and put the file into the store; none if there is no prior run."""
        increment = self._increment
        assert increment.removed_path is not None
        first = -1
        for lines in _lines(increment.removed_path):
            count = lines.num_rows
            columns: list[Any] = [
                pa.array(np.arange(first, first - count, -1, dtype=np.int64)),
                lines["custom_id"],
                lines[PRIOR_ROW_ID],
            ]
            if len(self._carried):
                columns.append(pa.nulls(count, self._schema.field("carry").type))
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
            first -= count
        self._writer.close()
        if increment.prior is None:
            return None
        store.put_file(self._path, key)
        return KeptRows(
            key=key,
            rows=self._rows,
            removed=increment.removed,
            prior_run_id=increment.prior.run_id,
            prior_created_at=increment.prior.created_at.isoformat(),
            prior_output=increment.prior_plan and increment.prior_plan.spec.output.column,
        )

    def _take(self, end: int) -> pa.Table | None:
        have = [self._rest] if self._rest is not None and self._rest.num_rows else []
        while not have or have[-1]["row_id"][-1].as_py() < end - 1:
            batch = next(self._lines, None)
            if batch is None:
                break
            if batch.num_rows:
                have.append(pa.Table.from_batches([batch]))
        if not have:
            return None
        table = pa.concat_tables(have).combine_chunks()
        count = int(np.searchsorted(table["row_id"].to_numpy(), end))
        self._rest = table.slice(count)
        return table.slice(0, count)


def _lines(path: Path) -> Iterator[pa.RecordBatch]:
    with pq.ParquetFile(path, pre_buffer=False) as file:
        yield from file.iter_batches(65_536)


def _copy_into(
    connection: duckdb.DuckDBPyConnection,
    dataset: ds.Dataset,
    where: ds.Expression,
    columns: list[str],
    statement: str,
) -> None:
    scanner = dataset.scanner(columns=columns, filter=where, batch_readahead=2, fragment_readahead=1)
    connection.register("prior_stream", scanner.to_reader())
    connection.execute(f"{statement} FROM prior_stream")
    connection.unregister("prior_stream")
