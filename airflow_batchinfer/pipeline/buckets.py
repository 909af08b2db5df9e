"""Buckets: rows brought together by ranges of a row id, out of core, each range small enough to hold."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from airflow_batchinfer.pipeline.shuffle import Shuffle

BUCKET_BYTES = 128 * 1024 * 1024
"""What a bucket may hold, of all sides together; one giant row makes a bucket of its own."""

_BUCKET_ROWS = 65_536
"""Ids in a bucket, unless so many rows are too big: narrower buckets are written in very small batches."""


class Buckets:
    """Rows of one schema in buckets of the int64 column `by`. First all are added, then all are read."""

    def __init__(self, scratch: Path, schema: pa.Schema, by: str, width: int = _BUCKET_ROWS) -> None:
        """Files go to a new folder in `scratch`."""
        self.folder = Path(tempfile.mkdtemp(prefix="buckets-", dir=scratch))
        self.schema = schema
        self._by = by
        self._shuffle = Shuffle(self.folder, schema)
        self.width = width

    def add(self, batch: pa.RecordBatch) -> None:
        """Take rows, in any order."""
        self._shuffle.add(batch, (batch.column(self._by).to_numpy() // self.width).astype(np.int64))

    def finish(self) -> None:
        """Write what is still buffered; nothing may be added afterwards."""
        self._shuffle.finish()

    def numbers(self) -> list[int]:
        """Numbers of the buckets that have rows, in the order of the ids."""
        return self._shuffle.partitions()

    def bytes_of(self, number: int) -> int:
        """What a bucket takes in memory."""
        return self._shuffle.bytes_of(number)

    def table(self, number: int) -> pa.Table:
        """A bucket's rows in order of arrival."""
        return self._shuffle.table(number)

    def cut(self, number: int, width: int, scratch: Path) -> Buckets:
        """One bucket's rows in narrower buckets."""
        narrower = Buckets(scratch, self.schema, self._by, width)
        for batch in self._shuffle.read(number):
            narrower.add(batch)
        narrower.finish()
        return narrower


def side_by_side(sides: Sequence[Buckets]) -> Iterator[list[pa.Table]]:
    """Tables of the sides' rows, range by range in the order of the ids, where the first side has any.

    A range whose rows are too big to hold is cut into narrower ones, at the price of writing them again.

    Args:
        sides: finished, and of the same width.
    """
    width = sides[0].width
    for number in sides[0].numbers():
        size = sum(side.bytes_of(number) for side in sides)
        if size <= BUCKET_BYTES or width == 1:
            yield [side.table(number) for side in sides]
            continue
        narrower = max(1, width * BUCKET_BYTES // size)
        with tempfile.TemporaryDirectory(dir=sides[0].folder) as folder:
            yield from side_by_side([side.cut(number, narrower, Path(folder)) for side in sides])
