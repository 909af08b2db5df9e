"""Out-of-core shuffle of Arrow tables: rows in by arrival, out by partition.

Rows are buffered up to a fixed number of bytes, sorted by partition, and written as one *run*: an Arrow
IPC file with one record batch a partition. Reading a partition takes its batch of each run, in order of
arrival. Memory is one buffer and its sorted copy, whatever the number of rows; values and types go
through untouched, which no SQL engine's own types would allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

RUN_BYTES = 128 * 1024 * 1024
"""Size of the buffer."""

_OPTIONS = pa.ipc.IpcWriteOptions(compression=pa.Codec("lz4"))


class Shuffle:
    """Rows of one schema, regrouped by an integer partition number. Not thread-safe while adding."""

    def __init__(self, folder: Path, schema: pa.Schema, run_bytes: int = RUN_BYTES) -> None:
        """Runs go to `folder`, which must exist and hold no other shuffle's files."""
        self._folder = folder
        self.schema = schema
        self._run_bytes = run_bytes
        self._buffer: list[pa.RecordBatch] = []
        self._partitions: list[npt.NDArray[np.int64]] = []
        self._buffered = 0
        self._runs: list[Path] = []
        self._places: dict[int, list[tuple[int, int]]] = {}
        self._bytes: Counter[int] = Counter()

    def add(self, batch: pa.RecordBatch, partitions: npt.NDArray[np.int64]) -> None:
        """Take a batch; `partitions` has one number per row."""
        if batch.num_rows == 0:
            return
        self._buffer.append(batch)
        self._partitions.append(partitions)
        self._buffered += batch.nbytes
        if self._buffered >= self._run_bytes:
            self._flush()

    def finish(self) -> None:
        """Write what is still buffered; nothing may be added afterwards."""
        self._flush()

    def partitions(self) -> list[int]:
        """Numbers that have rows, sorted."""
        return sorted(self._places)

    def __contains__(self, partition: int) -> bool:
        """Whether the partition has rows."""
        return partition in self._places

    def bytes_of(self, partition: int) -> int:
        """What the partition's rows take in memory."""
        return self._bytes[partition]

    def read(self, partition: int) -> Iterator[pa.RecordBatch]:
        """The partition's rows in order of arrival, one batch a run."""
        for run, index in self._places.get(partition, ()):
            # A plain file and not a memory map: mapped pages would count as this process's memory.
            with pa.OSFile(str(self._runs[run])) as source:
                yield pa.ipc.open_file(source).get_batch(index)

    def table(self, partition: int) -> pa.Table:
        """The partition's rows in order of arrival."""
        return pa.Table.from_batches(self.read(partition), self.schema)

    def _flush(self) -> None:
        if not self._buffer:
            return
        numbers = np.concatenate(self._partitions)
        order = np.argsort(numbers, kind="stable")
        whole = pa.concat_batches(self._buffer)
        self._buffer, self._partitions, self._buffered = [], [], 0
        whole = whole.take(pa.array(order))
        present, starts = np.unique(numbers[order], return_index=True)
        ends = np.append(starts[1:], len(order))
        path = self._folder / f"run-{len(self._runs):06d}.arrow"
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, self.schema, options=_OPTIONS) as out:
            for index, (partition, start, end) in enumerate(zip(present, starts, ends, strict=True)):
                rows = whole.slice(start, end - start)
                out.write_batch(rows)
                self._bytes[int(partition)] += rows.nbytes
                self._places.setdefault(int(partition), []).append((len(self._runs), index))
        self._runs.append(path)
        # The allocator would keep what was freed, in pieces that the next buffer does not fit into.
        del whole
        pa.default_memory_pool().release_unused()
