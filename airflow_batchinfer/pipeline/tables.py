"""Delta tables: one atomic commit a publication, and no lost update when two publish at once."""

from __future__ import annotations

import random
import re
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.fs
from deltalake import CommitProperties, DeltaTable, Transaction, WriterProperties, write_deltalake
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError

from airflow_batchinfer.errors import BatchInferError, StoreError
from airflow_batchinfer.pipeline.duck import sql_name, sql_text
from airflow_batchinfer.pipeline.streams import arrow_stream
from airflow_batchinfer.run.parquet import batch_rows
from airflow_batchinfer.store import Store

_ATTEMPTS = 8
"""Of one publication, when others commit to the same rows at the same time, or the network breaks off."""

_BROKEN_OFF = re.compile(r"error sending request|connection|timed? ?out", re.IGNORECASE)
"""delta-rs on a network that failed in the middle of a commit or an answer: worth another try."""

_NOT_GIVEN = re.compile(rf"{_BROKEN_OFF.pattern}|error performing (?!.*: 404 Not Found)", re.IGNORECASE)
"""delta-rs on a request that failed, or that the server refused: it says nothing about the table."""

DELTA_ERRORS = (DeltaError, OSError, ValueError)
"""What delta-rs raises while it opens a table."""

_TOKEN = "batchinferWrite"
"""Key in a commit's metadata by which its writer knows it again."""
_LOOKED_BACK = 20


_ROW_GROUP_ROWS = 128 * 1024
"""The writer holds a row group encoded in memory."""


@dataclass(frozen=True)
class Publication:
    """Rows that take the place of others.

    `replacement` is called once an attempt, after the table's state was read, and may look at the table. It
    gives partition columns with their values, which say what is replaced, and the rows to put there. Their
    iterator may not look at the table, since the table's writer runs it; an error that it raises stops the
    publication: nothing of it becomes visible.
    """

    schema: pa.Schema
    replacement: Callable[[DeltaTable], tuple[Mapping[str, str], Iterator[pa.RecordBatch]]]
    partition_by: Sequence[str]
    writer: str
    """Publications with the same writer never go through at once: the later one starts again."""


def open_table(store: Store, key: str) -> DeltaTable | None:
    """The Delta table at `key`; none if there is none yet.

    Raises:
        StoreError: it cannot be read.
    """
    uri = store.uri_of(key)
    try:
        return open_delta(store, uri)
    except TableNotFoundError:
        return None
    except DELTA_ERRORS as error:
        raise StoreError(f"cannot read the table {uri}: {delta_words(error)}") from error


def open_delta(store: Store, uri: str) -> DeltaTable:
    """The Delta table at `uri`, which is in the store.

    Raises:
        StoreError: the store does not give it now, which says nothing about the table.
        DELTA_ERRORS: what delta-rs says of it.
    """
    for attempt in range(1, _ATTEMPTS + 1):
        try:
            return DeltaTable(uri, storage_options=store.delta_options() or None)
        except TableNotFoundError:
            raise
        except DELTA_ERRORS as error:
            if not _NOT_GIVEN.search(_without_paths(error)):
                raise
            if attempt == _ATTEMPTS or not _BROKEN_OFF.search(_without_paths(error)):
                raise StoreError(f"cannot read the table {uri}: {delta_words(error)}") from error
            time.sleep(random.uniform(0.1, 0.5) * attempt)
    raise AssertionError("the last attempt returns or raises")


def table_dataset(store: Store, key: str) -> ds.Dataset:
    """The newest version of the table at `key`, for reading in a stream.

    Raises:
        StoreError: there is no such table, or it cannot be read.
    """
    table = open_table(store, key)
    if table is None:
        raise StoreError(f"there is no table at {store.uri_of(key)}")
    return dataset_of(store, key, table)


def dataset_of(store: Store, key: str, table: DeltaTable) -> ds.Dataset:
    """An opened table, for reading in a stream through the store's own file system."""
    filesystem, root = store.filesystem()
    return table.to_pyarrow_dataset(filesystem=pa.fs.SubTreeFileSystem(f"{root}/{key}", filesystem))


def rows_where(dataset: ds.Dataset, where: ds.Expression) -> Iterator[pa.RecordBatch]:
    """Rows of a table that match, in its schema, batch by batch of bounded size; no batch is empty."""
    schema = dataset.schema
    for fragment in dataset.get_fragments(where):
        for batch in fragment.to_batches(
            schema=schema,
            filter=where,
            batch_size=batch_rows(fragment.metadata),
            batch_readahead=1,
            fragment_readahead=0,
        ):
            if batch.num_rows:
                yield batch.select(schema.names).cast(schema)


def publish(store: Store, key: str, publication: Publication) -> int:
    """Write a publication as one commit; returns the table's version with it.

    Raises:
        StoreError: the table cannot be written, its columns have other types, or others kept
            committing to the same rows.
        BatchInferError: whatever the batches raised.
    """
    uri = store.uri_of(key)
    for attempt in range(1, _ATTEMPTS + 1):
        token = uuid.uuid4().hex
        try:
            table = open_table(store, key) or _create(store, key, publication)
            _check_types(table, publication.schema, uri)
            where, batches = publication.replacement(table)
            with arrow_stream(publication.schema, batches) as rows:
                _write(table, publication.writer, where, rows, token)
        except CommitFailedError as error:
            if attempt == _ATTEMPTS:
                raise StoreError(
                    f"cannot commit to {uri}: others kept writing the same rows ({delta_words(error)}); "
                    "run it again"
                ) from error
            time.sleep(random.uniform(0.1, 0.5) * attempt)
        except BatchInferError:
            raise
        except Exception as error:  # delta-rs has no common base for what it raises
            landed = _version_with(store, key, token)
            if landed is not None:
                return landed
            if attempt == _ATTEMPTS or not _BROKEN_OFF.search(_without_paths(error)):
                raise StoreError(f"cannot write the table {uri}: {delta_words(error)}") from error
            time.sleep(random.uniform(0.1, 0.5) * attempt)
        else:
            written = open_table(store, key)
            assert written is not None
            return int(written.version())
    raise AssertionError("the last attempt returns or raises")


def delete_rows(store: Store, key: str, where: Mapping[str, Sequence[str]]) -> None:
    """Delete, in one commit, the rows that have one of the values in each column; no table is fine.

    Raises:
        StoreError: the table cannot be written, or others kept committing to the same rows.
    """
    predicate = " AND ".join(f"{sql_name(c)} IN ({', '.join(map(sql_text, v))})" for c, v in where.items())
    for attempt in range(1, _ATTEMPTS + 1):
        table = open_table(store, key)
        if table is None:
            return
        try:
            table.delete(predicate)
        except Exception as error:  # delta-rs has no common base for what it raises
            passing = isinstance(error, CommitFailedError) or _BROKEN_OFF.search(_without_paths(error))
            if attempt == _ATTEMPTS or not passing:
                raise StoreError(f"cannot delete from {store.uri_of(key)}: {delta_words(error)}") from error
            time.sleep(random.uniform(0.1, 0.5) * attempt)
        else:
            return


def _create(store: Store, key: str, publication: Publication) -> DeltaTable:
    """The empty table. Rows come in a commit of their own: of two writers that create a table with rows
    at once, Delta would let the second append its rows to the first one's."""
    uri = store.uri_of(key)
    failure: Exception | None = None
    try:
        DeltaTable.create(
            uri,
            schema=publication.schema,
            mode="error",
            partition_by=list(publication.partition_by),
            storage_options=store.delta_options() or None,
        )
    except Exception as error:  # it may be that another writer was first
        failure = error
    table = open_table(store, key)
    if table is None:
        if failure is not None and _BROKEN_OFF.search(_without_paths(failure)):
            raise failure
        raise StoreError(f"cannot create the table {uri}: {delta_words(failure)}") from failure
    return table


def _version_with(store: Store, key: str, token: str) -> int | None:
    """The version that a write with this token made; none if it made none.

    A connection that breaks off may do so after the server has acted, and delta-rs does not ask.
    """
    table = open_table(store, key)
    newest = -1 if table is None else int(table.version())
    for version in range(newest, max(-1, newest - _LOOKED_BACK), -1):
        try:
            commit = store.read_bytes(f"{key}/_delta_log/{version:020d}.json")
        except FileNotFoundError:  # gone into a checkpoint
            return None
        if token.encode() in commit:
            return version
    return None


def _write(
    table: DeltaTable, writer: str, where: Mapping[str, str], rows: pa.RecordBatchReader, token: str
) -> None:
    version = (table.transaction_version(writer) or 0) + 1
    write_deltalake(
        table,
        rows,
        mode="overwrite",
        schema_mode="merge",
        predicate=" AND ".join(f"{sql_name(k)} = {sql_text(v)}" for k, v in where.items()),
        commit_properties=CommitProperties(
            custom_metadata={_TOKEN: token}, app_transactions=[Transaction(writer, version)]
        ),
        writer_properties=WriterProperties(compression="ZSTD", max_row_group_size=_ROW_GROUP_ROWS),
    )


def check_table_types(store: Store, key: str, fields: Iterable[pa.Field]) -> None:
    """Fail if columns `fields` cannot be published to the table at `key`.

    Raises:
        StoreError: names the column, both types and the remedy.
    """
    table = open_table(store, key)
    if table is not None:
        _check_types(table, fields, store.uri_of(key))


def _check_types(table: DeltaTable, fields: Iterable[pa.Field], uri: str) -> None:
    have = table_schema(table)
    alike = {name.lower(): name for name in have.names}
    for field in fields:
        there = alike.get(field.name.lower())
        if there is None:
            continue
        if there != field.name:
            raise StoreError(
                f"{uri}: the table has a column `{there}`, and this run's is `{field.name}`, which Delta "
                "does not tell apart: write it as the table does, or choose another `output.column` or "
                "`output.carry_prefix`, or another job name"
            )
        kind = have.field(field.name).type
        if not _same(kind, field.type):
            raise StoreError(
                f"{uri}: column `{field.name}` of the table is {kind}, and this run's is {field.type}: "
                "give it the table's type, or choose another `output.column` or `output.carry_prefix`, or "
                "another job name"
            )


def table_schema(table: DeltaTable) -> pa.Schema:
    """The table's schema in Arrow's types."""
    return pa.schema(table.schema().to_arrow())


def _same(one: pa.DataType, other: pa.DataType) -> bool:
    """Equal but for nullability and names inside lists, which Delta does not keep."""
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        names = [f.name for f in one.fields]
        return names == [f.name for f in other.fields] and all(
            _same(one.field(n).type, other.field(n).type) for n in names
        )
    if pa.types.is_list(one) and pa.types.is_list(other):
        return _same(one.value_type, other.value_type)
    if pa.types.is_map(one) and pa.types.is_map(other):
        return _same(one.key_type, other.key_type) and _same(one.item_type, other.item_type)
    return bool(one == other)


def delta_words(error: BaseException | None) -> str:
    """delta-rs's message in one line: it draws trees of causes and of frames, in a terminal's colours."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", str(error)).replace("↳", ":")
    plain = re.split(r"\n\s*0: ", plain, maxsplit=1)[0]
    return re.sub(r"\s*:?\s*\n\s*:?\s*", ": ", plain.strip())


def _without_paths(error: BaseException) -> str:
    """delta-rs's message without addresses: a port may be 34043, and a table may be called `connections`."""
    return re.sub(r"\S*/\S*", "", str(error))


def delta_type(kind: pa.DataType) -> pa.DataType:
    """The type in which Delta keeps a column: the nearest that holds all its values.

    Only nanoseconds are lost (Delta has microseconds); exports keep them.
    """
    types = pa.types
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return delta_type(kind.value_type)
    if types.is_large_string(kind) or types.is_string_view(kind):
        return pa.string()
    if types.is_large_binary(kind) or types.is_fixed_size_binary(kind) or types.is_binary_view(kind):
        return pa.binary()
    if types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if types.is_date64(kind):
        return pa.date32()
    if types.is_unsigned_integer(kind):
        return {8: pa.int16(), 16: pa.int32(), 32: pa.int64()}.get(kind.bit_width, pa.decimal128(20, 0))
    if types.is_float16(kind):
        return pa.float32()
    if types.is_duration(kind):
        return pa.int64()
    if types.is_time(kind) or types.is_decimal256(kind) or types.is_null(kind):
        return pa.string()
    if types.is_decimal(kind):
        return pa.decimal128(kind.precision, kind.scale)
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, delta_type(f.type)) for f in kind.fields])
    if types.is_map(kind):
        return pa.map_(delta_type(kind.key_type), delta_type(kind.item_type))
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return pa.list_(delta_type(kind.value_type))
    return kind
