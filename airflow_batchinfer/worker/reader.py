"""Reads a shard's frozen rows in batches: whole before the first row is believed, flat in memory."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.run.plan import PlannedShard
from airflow_batchinfer.run.shard import COPIES, INPUT, ROW_ID
from airflow_batchinfer.store import Store

_CHUNK = 1 << 20


def read_rows(store: Store, planned: PlannedShard, batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Batches of the columns `row_id`, `copies` and `input`, in the file's order.

    Raises:
        InputError: the file is missing, or is not the one the plan froze.
    """
    with _verified(store, planned) as source:
        try:
            file = pq.ParquetFile(source, pre_buffer=False)
            if file.metadata.num_rows != planned.sent:
                raise InputError(
                    f"{store.uri_of(planned.rows_key)} has {file.metadata.num_rows} rows, and the plan "
                    f"{planned.sent}: {_REMEDY}"
                )
            yield from file.iter_batches(batch_rows, columns=[ROW_ID, COPIES, INPUT], use_threads=False)
        except (pa.ArrowException, OSError) as error:
            raise InputError(f"{store.uri_of(planned.rows_key)} cannot be read: {error}") from error


_REMEDY = "the plan and its rows no longer belong together; clear `split` to plan the run again"


@contextmanager
def _verified(store: Store, planned: PlannedShard) -> Iterator[Any]:
    """The rows file, its size and hash checked; a remote one is fetched to local disk once."""
    filesystem, root = store.filesystem()
    path = f"{root}/{planned.rows_key}"
    uri = store.uri_of(planned.rows_key)
    local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)
    try:
        stream = filesystem.open_input_stream(path)
    except OSError as error:
        raise InputError(f"{uri} cannot be opened: {error}; {_REMEDY}") from error
    with tempfile.TemporaryFile(prefix="batchinfer-rows-") as copy:
        with stream:
            size, digest = _hash(stream, None if local else copy)
        if (size, digest) != (planned.rows_bytes, planned.rows_sha256):
            raise InputError(
                f"{uri} is damaged: {size} bytes with SHA-256 {digest[:12]}…, and the plan says "
                f"{planned.rows_bytes} bytes with {planned.rows_sha256[:12]}…; {_REMEDY}"
            )
        copy.seek(0)
        yield path if local else copy


def _hash(stream: pa.NativeFile, copy: IO[bytes] | None) -> tuple[int, str]:
    digest = hashlib.sha256()
    size = 0
    while data := stream.read(_CHUNK):
        digest.update(data)
        size += len(data)
        if copy is not None:
            copy.write(data)
    return size, digest.hexdigest()
