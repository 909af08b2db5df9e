"""Quarantine: rows that validation takes out of a run's results, because they fail an expectation.

The worker called them `succeeded`, and its commit and the ledger go on to say so: those prove what was
answered, and never change. Validation writes the row ids of each shard into a file of its own, which its
verdict names by hash; readers lay them over the shard's answers. A file that no verdict names does not
exist for readers, as with parts.
"""

from __future__ import annotations

import hashlib
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import Field

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.store import Store

_A = TypeVar("_A", pa.Table, pa.RecordBatch)

SCHEMA = pa.schema(
    [pa.field(ROW_ID, pa.int64(), nullable=False), pa.field("message", pa.string(), nullable=False)]
)
"""One line an input row, by row id; `message` names the expectations that it fails."""

_REASON = Reason.EXPECTATION_FAILED


class QuarantinedShard(Document):
    """The rows of one shard that fail an expectation."""

    shard: int
    key: str
    sha256: str
    rows: int = Field(description="Input rows, copies included.")


class Quarantine(Document):
    """All of them, shard by shard; shards without such a row are left out."""

    shards: list[QuarantinedShard] = Field(default_factory=list)
    expectations: dict[str, int] = Field(
        default_factory=dict,
        description="Rows by the expectation that they fail; a row that fails two counts twice.",
    )

    @property
    def rows(self) -> int:
        """Input rows that are taken out of the results."""
        return sum(shard.rows for shard in self.shards)

    def of(self, shard: int) -> QuarantinedShard | None:
        """The shard's entry, if it has one."""
        return next((line for line in self.shards if line.shard == shard), None)


class QuarantineWriter:
    """Collects the failing rows of one shard, in memory of their number."""

    def __init__(self) -> None:
        self._messages: dict[int, str] = {}

    def add(self, row_id: int, message: str) -> None:
        """Add a row, or one more message to a row."""
        before = self._messages.get(row_id)
        self._messages[row_id] = f"{before}; {message}" if before else message

    def write(self, store: Store, layout: RunLayout, shard: int) -> QuarantinedShard | None:
        """Write the file; none if no row failed. The same rows give the same file under the same key."""
        if not self._messages:
            return None
        ids = sorted(self._messages)
        table = pa.table([pa.array(ids, pa.int64()), [self._messages[i] for i in ids]], schema=SCHEMA)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd")
        data = sink.getvalue().to_pybytes()
        sha256 = hashlib.sha256(data).hexdigest()
        key = layout.quarantine(shard, sha256)
        store.write_bytes(key, data)
        return QuarantinedShard(shard=shard, key=key, sha256=sha256, rows=len(ids))


def quarantined_rows(store: Store, line: QuarantinedShard) -> pa.Table:
    """A shard's quarantined rows, of `SCHEMA`. Raises `CorruptError` if the file is not the verdict's."""
    try:
        data = store.read_bytes(line.key)
    except FileNotFoundError as error:
        raise CorruptError(f"{store.uri_of(line.key)} is gone: clear validate with downstream") from error
    if hashlib.sha256(data).hexdigest() != line.sha256:
        raise CorruptError(
            f"{store.uri_of(line.key)} is not what validate wrote: clear validate with downstream"
        )
    return pq.read_table(pa.BufferReader(data))


def take_out(answers: _A, row_ids: pa.Array | pa.ChunkedArray, quarantined: pa.Table) -> _A:
    """The answers, with outcome, reason and message of the quarantined rows instead of the worker's.

    Args:
        answers: some columns of `PART_SCHEMA`; other columns than those three stay as they are.
        row_ids: the input row of each line.
        quarantined: from `quarantined_rows`.
    """
    at = pc.index_in(row_ids, value_set=quarantined[ROW_ID])
    found = pc.is_valid(at)
    for name, value in (
        ("outcome", pa.scalar(outcome_of(_REASON).value)),
        ("reason", pa.scalar(_REASON.value)),
        ("message", quarantined["message"].combine_chunks().take(at)),
    ):
        if name in answers.schema.names:
            column = pc.if_else(found, value, answers.column(name))
            index = answers.schema.get_field_index(name)
            answers = answers.set_column(index, answers.schema.field(index), column)
    return answers
