"""Arrow streams for other engines: an error of ours comes out of them as it went in."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pyarrow as pa

from airflow_batchinfer.errors import BatchInferError


@contextmanager
def arrow_stream(schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatchReader]:
    """A reader over `batches` to hand to DuckDB or delta-rs inside the `with` block.

    An engine turns what the iterator raises into an error of its own, with our traceback as text. If the
    block fails after the iterator did, the iterator's error is raised in its place.
    """
    source = _Source(batches)
    try:
        yield pa.RecordBatchReader.from_batches(schema, source)
    except Exception as error:
        if source.error is not None and error is not source.error:
            raise source.error from error
        raise


class _Source:
    def __init__(self, batches: Iterator[pa.RecordBatch]) -> None:
        self._batches = batches
        self.error: BatchInferError | OSError | None = None

    def __iter__(self) -> Iterator[pa.RecordBatch]:
        try:
            yield from self._batches
        except (BatchInferError, OSError) as error:
            self.error = error
            raise
