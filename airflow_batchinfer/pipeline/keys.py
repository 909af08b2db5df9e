"""Keys: a narrow row per input row, all that is needed to find copies, order rows and cut shards."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import duckdb
import numpy as np
import pyarrow as pa

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.pipeline.duck import duck_type, scalar
from airflow_batchinfer.pipeline.prediction import BYTES_PER_TOKEN, Prediction
from airflow_batchinfer.pipeline.readers import Reader
from airflow_batchinfer.pipeline.streams import arrow_stream

PREFIX_LEVELS = 3
"""Sort levels for shared prefixes, the broadest first."""

HEAD_CHARACTERS = 512
"""Rows whose first column starts alike for so long share enough of a prompt to be worth sorting by."""

SQL_DIGEST = "lpad(to_hex(digest_high), 16, '0') || lpad(to_hex(digest_low), 16, '0')"
"""The digest as 32 hex digits."""

_EXAMPLES = 3


def build_keys(
    connection: duckdb.DuckDBPyConnection,
    reader: Reader,
    prompt_columns: Sequence[str],
    id_column: str | None,
    prediction: Prediction,
    *,
    keep_ids: bool = False,
    strata: Sequence[str] = (),
) -> int:
    """Read the input once and fill the table `keys`; returns the number of rows.

    Columns: `row_id`; `digest_high`, `digest_low` (SHA-256 of the prompt columns' values, cut to 128
    bits: made from content that others may choose, so a weaker hash would let them merge rows);
    `tokens`, predicted; `overlong`; `prefix_0` to `prefix_2`, hashes of ever longer starts of the
    prompt; `id_hash`; `change`, null here; with `keep_ids` also `id_text`; with
    `strata`, input columns, also `stratum`, a hash of their values.

    Raises:
        InputError: no rows, or an id that is null or stands twice, with examples.
    """
    columns = list(dict.fromkeys([*prompt_columns, *([id_column] if id_column else []), *strata]))
    counted = _Numbered(reader, columns)
    names = [f"c{i}" for i in range(len(columns))]
    texts = [_text(name, field.type) for name, field in zip(names, counted.fields, strict=True)]
    prompt = texts[: len(prompt_columns)]
    id_text = texts[columns.index(id_column)] if id_column else None
    framed = " || ".join(f"coalesce(strlen({t})::VARCHAR || ':' || {t}, '-')" for t in prompt)
    size = " + ".join(f"coalesce(strlen({t}), 0)" for t in prompt)
    prompt_tokens = f"({prediction.constant} + ({size}) // {BYTES_PER_TOKEN})"
    over = (
        "false"
        if prediction.limit is None
        else f"{prompt_tokens} + {prediction.longest_output} > {prediction.limit}"
    )
    levels = _prefixes(prompt)
    stratum = f", hash({', '.join(texts[columns.index(c)] for c in strata)}) AS stratum" if strata else ""
    kept_id = f", {id_text} AS id_text" if keep_ids and id_text else ""
    query = f"""
        CREATE TABLE keys AS
        SELECT row_id,
            ('0x' || digest[1:16])::UBIGINT AS digest_high,
            ('0x' || digest[17:32])::UBIGINT AS digest_low,
            * EXCLUDE (row_id, digest)
        FROM (
            SELECT row_id, sha256({framed}) AS digest,
                ({prompt_tokens} + {prediction.output})::INTEGER AS tokens, {over} AS overlong,
                {", ".join(f"{level} AS prefix_{i}" for i, level in enumerate(levels))},
                {f"hash({id_text})" if id_text else "0::UBIGINT"} AS id_hash,
                {f"{id_text} IS NULL" if id_text else "false"} AS id_null{kept_id}{stratum},
                NULL::VARCHAR AS change
            FROM input_stream
        )
        """
    with arrow_stream(counted.schema(names), counted.batches(names)) as stream:
        connection.register("input_stream", stream)
        connection.execute(query)
    connection.unregister("input_stream")
    if counted.rows == 0 and reader.row_ids is None:
        raise InputError(f"the input has no rows ({len(reader.files)} files, first {reader.files[0].uri})")
    if id_column:
        _check_ids(connection, reader, id_column)
    return counted.rows


class _Numbered:
    """The input's batches with the rows' ids, for DuckDB, under plain names."""

    def __init__(self, reader: Reader, columns: list[str]) -> None:
        self._reader = reader
        self._columns = columns
        self.fields = [f.with_type(duck_type(f.type, exact=True)) for f in map(reader.schema.field, columns)]
        self.rows = 0

    def schema(self, names: list[str]) -> pa.Schema:
        return pa.schema(
            [pa.field("row_id", pa.int64())]
            + [pa.field(n, f.type) for n, f in zip(names, self.fields, strict=True)]
        )

    def batches(self, names: list[str]) -> Iterator[pa.RecordBatch]:
        schema = self.schema(names)
        for batch in self._reader.batches(self._columns):
            ids = pa.array(np.arange(self.rows, self.rows + batch.num_rows, dtype=np.int64))
            self.rows += batch.num_rows
            values = [c.cast(f.type) for c, f in zip(batch.columns, self.fields, strict=True)]
            yield pa.record_batch([ids, *values], schema=schema)


def _text(name: str, kind: pa.DataType) -> str:
    """An SQL expression that writes a value as text, differently for different values of its type."""
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return name
    if pa.types.is_nested(kind):
        return f"to_json({name})::VARCHAR"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind):
        return f"base64({name})"
    return f"{name}::VARCHAR"


def _prefixes(prompt: list[str]) -> list[str]:
    """Hashes of the prompt's start: the first column's head, the first column, the first two, ..."""
    starts = [f"left({prompt[0]}, {HEAD_CHARACTERS})"]
    starts += [", ".join(prompt[:n]) for n in range(1, len(prompt))]
    starts = starts[:PREFIX_LEVELS] + starts[-1:] * (PREFIX_LEVELS - len(starts))
    return [f"hash({start})" for start in starts]


def _check_ids(connection: duckdb.DuckDBPyConnection, reader: Reader, id_column: str) -> None:
    nulls = connection.execute(
        f"SELECT row_id FROM keys WHERE id_null ORDER BY row_id LIMIT {_EXAMPLES}"
    ).fetchall()
    if nulls:
        count = scalar(connection, "SELECT count(*) FROM keys WHERE id_null")
        raise InputError(
            f"input.id_column: `{id_column}` is null in {count} rows, the first of them number "
            f"{', '.join(str(n) for (n,) in nulls)} (counted from 0); fill it, or leave id_column out"
        )
    connection.execute(
        "CREATE TEMP TABLE repeated AS SELECT id_hash FROM keys GROUP BY id_hash HAVING count(*) > 1"
    )
    repeated = scalar(connection, "SELECT count(*) FROM repeated")
    if not repeated:
        return
    # Equal hashes are only a hint: read the ids again, those of these hashes alone, and compare.
    counted = _Numbered(reader, [id_column])
    text = _text("id", counted.fields[0].type)
    query = f"""
        CREATE TEMP TABLE twice AS
        SELECT id, count(*) AS times, min(row_id) AS first, max(row_id) AS last
        FROM (SELECT {text} AS id, row_id FROM id_stream)
        WHERE hash(id) IN (SELECT id_hash FROM repeated)
        GROUP BY id HAVING count(*) > 1
        """
    with arrow_stream(counted.schema(["id"]), counted.batches(["id"])) as stream:
        connection.register("id_stream", stream)
        connection.execute(query)
    connection.unregister("id_stream")
    ids = scalar(connection, "SELECT count(*) FROM twice")
    if ids:
        found = connection.execute(f"SELECT * FROM twice ORDER BY first LIMIT {_EXAMPLES}").fetchall()
        examples = "; ".join(f"{i!r} {n} times (rows {a} and {b})" for i, n, a, b in found)
        raise InputError(
            f"input.id_column: {ids} values of `{id_column}` stand more than once: {examples}; "
            "make them unique, or leave id_column out"
        )
