"""DuckDB, set up for flat memory: bounded, spilling to scratch, all cores."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import duckdb

from airflow_batchinfer.errors import StoreError

MEMORY_LIMIT = "400MB"
"""DuckDB's buffers in one step. Enough to sort ten million keys in a few spilled runs; small enough that
Arrow's own buffers, which do not grow with the rows either, decide the step's peak."""


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
    connection = duckdb.connect(
        scratch / "keys.duckdb",
        config={
            "memory_limit": MEMORY_LIMIT,
            "threads": os.cpu_count() or 1,
            "temp_directory": str(scratch / "spill"),
            "preserve_insertion_order": keep_order,
            "autoinstall_known_extensions": False,
            "python_enable_replacements": False,
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
