"""Reads a shard's frozen rows in batches: whole before the first row is believed, flat in memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from typing import IO

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.run.parquet import UNREADABLE
from airflow_batchinfer.run.plan import PlannedShard
from airflow_batchinfer.run.shard import COPIES, INPUT, ROW_ID
from airflow_batchinfer.store import Store
from airflow_batchinfer.store.arrow_errors import arrow_reads

_CHUNK = 1 << 20


def read_rows(store: Store, planned: PlannedShard, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of the columns `row_id`, `copies` and `input`, in the file's order.

    Raises:
        InputError: the file is missing, or is not the one the plan froze.
        StoreError: the store cannot be read, which says nothing about the file.
    """
    uri = store.uri_of(planned.rows_key)
    with tempfile.TemporaryFile(prefix="batchinfer-rows-") as copy:
        try:
            with arrow_reads(uri):
                file = pq.ParquetFile(_verified(store, planned, copy), pre_buffer=False)
                if file.metadata.num_rows != planned.sent:
                    raise InputError(
                        f"{uri} has {file.metadata.num_rows} rows, and the plan {planned.sent}: {_REMEDY}"
                    )
                yield from file.iter_batches(batch_rows, columns=[ROW_ID, COPIES, INPUT], use_threads=False)
        except UNREADABLE as error:
            raise InputError(f"{uri} cannot be read: {error}; {_REMEDY}") from error


_REMEDY = "the plan and its rows no longer belong together; clear `split` to plan the run again"


def _verified(store: Store, planned: PlannedShard, copy: IO[bytes]) -> str | IO[bytes]:
    """The rows file, its size and hash checked; a remote one is fetched into `copy`, once."""
    filesystem, root = store.filesystem()
    path = f"{root}/{planned.rows_key}"
    local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    with filesystem.open_input_stream(path) as stream:
        size, digest = _hash(stream, None if local else copy)
    if (size, digest) != (planned.rows_bytes, planned.rows_sha256):
        raise InputError(
            f"{store.uri_of(planned.rows_key)} is damaged: {size} bytes with SHA-256 {digest[:12]}…, and the "
            f"plan says {planned.rows_bytes} bytes with {planned.rows_sha256[:12]}…; {_REMEDY}"
        )
    copy.seek(0)
    return path if local else copy


def _hash(stream: pa.NativeFile, copy: IO[bytes] | None) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while data := stream.read(_CHUNK):
        digest.update(data)
        size += len(data)
        if copy is not None:
            copy.write(data)
    return size, digest.hexdigest()
