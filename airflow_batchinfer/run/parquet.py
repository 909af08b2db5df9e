"""Parquet objects of a run: opened with page checksums verified, and one clear error for what is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.store import Store
from airflow_batchinfer.store.arrow_errors import arrow_reads

WRITE_OPTIONS: dict[str, Any] = {"compression": "zstd", "write_page_checksum": True}
"""For `pyarrow.parquet` when it writes what `open_parquet` reads: without checksums, a flipped byte may go
unnoticed."""

UNREADABLE = (OSError, pa.ArrowException, UnicodeDecodeError)
"""What Arrow raises on bytes that are not what they should be; names of columns may be no UTF-8.

An `OSError` may also come of the store: `arrow_reads` tells."""


_BATCH_BYTES = 8 * 1024 * 1024
"""Batches hold about so many bytes; one giant row makes a batch of its own."""

_BATCH_ROWS = 32_768


def batch_rows(metadata: pq.FileMetaData, most: int = _BATCH_ROWS) -> int:
    """How many rows to read at once of a file whose rows have this average size; at most `most`."""
    size = sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))
    return rows_at_once(size, metadata.num_rows, most)


def rows_at_once(size: int, rows: int, most: int) -> int:
    """How many rows to hold at once if `rows` of them take `size` bytes; at most `most`."""
    return max(1, min(most, _BATCH_BYTES * rows // max(1, size)))


@contextmanager
def open_parquet(store: Store, key: str, remedy: str = "") -> Iterator[pq.ParquetFile]:
    """A Parquet object of the store, read without holding more of it than a row group's column pages.

    Args:
        store: where.
        key: of the object.
        remedy: what to do if it is damaged, put at the message's end.

    Raises:
        CorruptError: it is missing or damaged, naming it; also where that shows only in the `with` block.
        StoreError: the store cannot be read; likewise.
    """
    filesystem, root = store.filesystem()
    try:
        with (
            arrow_reads(store.uri_of(key)),
            pq.ParquetFile(
                f"{root}/{key}",
                filesystem=filesystem,
                pre_buffer=False,
                buffer_size=1 << 20,
                page_checksum_verification=True,
            ) as file,
        ):
            yield file
    except UNREADABLE as error:
        hint = f": {remedy}" if remedy else ""
        raise CorruptError(f"{store.uri_of(key)} cannot be read: {error}{hint}") from error
