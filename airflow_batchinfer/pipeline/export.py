"""Exports: the results as one plain Parquet, JSONL or CSV file, in input order."""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_batchinfer.pipeline.buckets import Buckets, side_by_side
from airflow_batchinfer.pipeline.duck import MEMORY_LIMIT, connect_duckdb, duck_type, sql_name, sql_text
from airflow_batchinfer.pipeline.streams import arrow_stream
from airflow_batchinfer.run.layout import safe_run_id
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import ExportSpec
from airflow_batchinfer.store import open_store


class OrderedRows:
    """Results collected in any order and given back by `row_id`, out of core."""

    def __init__(self, scratch: Path, schema: pa.Schema) -> None:
        self.schema = schema
        self._buckets = Buckets(scratch, schema, "row_id")

    def add(self, batch: pa.RecordBatch) -> None:
        """Take results."""
        self._buckets.add(batch)

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        self._buckets.finish()
        for (table,) in side_by_side([self._buckets]):
            yield from table.take(pc.sort_indices(table["row_id"])).to_batches()


def write_exports(plan: Plan, rows: OrderedRows, scratch: Path) -> list[str]:
    """Write each of the spec's exports; an existing file is replaced whole. Returns their addresses.

    Raises:
        StoreError: a file cannot be written.
    """
    return [_write(plan, export, rows, scratch) for export in plan.spec.export]


def export_path(plan: Plan, export: ExportSpec) -> str:
    """The export's path with the run and the job filled in."""
    return export.path.replace("{run_id}", safe_run_id(plan.run_id)).replace("{job}", plan.job)


def _write(plan: Plan, export: ExportSpec, rows: OrderedRows, scratch: Path) -> str:
    path = export_path(plan, export)
    local = scratch / f"export.{export.format}"
    if export.format == "parquet":
        with pq.ParquetWriter(local, rows.schema, compression="zstd") as writer:
            for batch in rows:
                writer.write_batch(batch)
    else:
        _write_text(export.format, rows, local)
    folder, name = posixpath.split(path)
    store = open_store(folder or ".", plan.spec.storage_options if folder.startswith("s3://") else None)
    store.put_file(local, name)
    return store.uri_of(name)


def _write_text(format_: str, rows: OrderedRows, local: Path) -> None:
    options = "FORMAT json" if format_ == "jsonl" else "FORMAT csv, HEADER"
    columns = ", ".join(_column(f, format_) for f in rows.schema)
    schema = pa.schema([f.with_type(duck_type(f.type)) for f in rows.schema])
    with (
        connect_duckdb(":memory:", {"threads": 1, "memory_limit": MEMORY_LIMIT}) as connection,
        arrow_stream(schema, (batch.cast(schema) for batch in rows)) as reader,
    ):
        connection.register("results", reader)
        connection.execute(f"COPY (SELECT {columns} FROM results) TO {sql_text(str(local))} ({options})")


def _column(field: pa.Field, format_: str) -> str:
    """CSV has no nested values: there they are JSON text."""
    name = sql_name(field.name)
    if format_ == "csv" and pa.types.is_nested(field.type):
        return f"to_json({name}) AS {name}"
    return name
