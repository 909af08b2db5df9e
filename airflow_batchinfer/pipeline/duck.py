"""DuckDB, set up for flat memory: bounded, spilling to scratch, on a few cores."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from airflow_batchinfer.errors import StoreError

MEMORY_LIMIT = "400MB"
"""DuckDB's buffers in one step. Enough to sort ten million keys in a few spilled runs; small enough that
Arrow's own buffers, which do not grow with the rows either, decide the step's peak."""

THREADS = min(4, os.cpu_count() or 1)
"""Of a step. Each holds buffers, or a shard, of its own: memory must not grow with the cores of a node."""


def connect_duckdb(database: Path | str, config: Mapping[str, Any]) -> duckdb.DuckDBPyConnection:
    """A connection that writes a time as text in UTC, whichever zone the machine is in: rows are known again
    by such texts."""
    connection = duckdb.connect(database, config=dict(config))
    connection.execute("SET TimeZone = 'UTC'")
    return connection


@contextmanager
def open_duckdb(scratch: Path, *, keep_order: bool = False) -> Iterator[duckdb.DuckDBPyConnection]:
    """A database in `scratch`, closed at the end.

    Args:
        scratch: an existing folder for the database and what it spills.
        keep_order: whether a scan without ORDER BY returns rows in their stored order. Costs memory;
            off wherever the query orders or does not care.

    Raises:
        StoreError: it ran out of memory or disk.
    """
    connection = connect_duckdb(
        scratch / "keys.duckdb",
        {
            "memory_limit": MEMORY_LIMIT,
            "threads": THREADS,
            "temp_directory": str(scratch / "spill"),
            "preserve_insertion_order": keep_order,
            "autoinstall_known_extensions": False,
            "python_enable_replacements": False,
            # Freed memory goes back to the system at once; it would stand beside Arrow's buffers.
            "allocator_flush_threshold": "16MB",
            "allocator_bulk_deallocation_flush_threshold": "16MB",
            "allocator_background_threads": True,
        },
    )
    try:
        yield connection
    except duckdb.OutOfMemoryException as error:
        raise StoreError(f"out of memory or scratch disk in {scratch.parent}: {error}") from error
    finally:
        connection.close()
        for path in scratch.glob("keys.duckdb*"):
            path.unlink(missing_ok=True)


class Converter:
    """Sends columns through SQL expressions, row by row, in the calling thread; for one thread at a time."""

    def __init__(self) -> None:
        # No threads of its own: nothing is left running when the process ends.
        self._connection = connect_duckdb(":memory:", {"threads": 1, "async_threads": 0})

    def convert(self, column: pa.Array, expression: str) -> pa.Array:
        """The values of an expression over `value`, which stands for the column's values."""
        self._connection.register("input", pa.table({"value": column}))
        table = self._connection.sql(f"SELECT {expression} AS value FROM input").to_arrow_table()
        self._connection.unregister("input")
        return table["value"].combine_chunks()


def scalar(connection: duckdb.DuckDBPyConnection, query: str) -> Any:
    """The one value that a query gives. Fetches the result to its end: an open one blocks the connection."""
    ((value,),) = connection.execute(query).fetchall()
    return value


def sql_name(name: str) -> str:
    """A column name as a quoted SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def sql_text(text: str) -> str:
    """A text as an SQL literal."""
    return "'" + text.replace("'", "''") + "'"


def duck_type(kind: pa.DataType, *, exact: bool = False) -> pa.DataType:
    """A type that DuckDB reads in a type's place.

    Args:
        kind: any Arrow type.
        exact: keep every bit, so that values can be told apart; else times stay readable as times, though
            nanoseconds may be lost.
    """
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return duck_type(kind.value_type, exact=exact)
    if types.is_duration(kind) or (exact and types.is_time64(kind)):
        return pa.int64()
    if exact and types.is_timestamp(kind) and kind.unit == "ns":
        return pa.int64()
    if types.is_decimal256(kind):
        return pa.string()
    if types.is_float16(kind):
        return pa.float32()
    if types.is_struct(kind):
        return pa.struct([f.with_type(duck_type(f.type, exact=exact)) for f in kind.fields])
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.large_list(kind.value_field.with_type(duck_type(kind.value_type, exact=exact)))
    return kind
