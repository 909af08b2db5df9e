"""A shard's files: frozen rows in, parts out. Column names and types are fixed here."""

from __future__ import annotations

import pyarrow as pa

ROW_ID = "row_id"
CUSTOM_ID = "custom_id"
COPIES = "copies"
INPUT = "input"
CARRY = "carry"
DIGEST = "input_digest"
CHANGE = "change"

TRACKED_FIELDS = (pa.field(DIGEST, pa.string()), pa.field(CHANGE, pa.string()))


def rows_schema(
    input_columns: pa.StructType, carry_columns: pa.StructType | None, *, tracked: bool = False
) -> pa.Schema:
    """Schema of `rows.parquet`, in the order to be sent to the engine.

    `custom_id` is text, or null without an id column. `copies` counts the other input rows that take
    this row's answer. `input` holds the columns the prompt reads: as a dict it is the template's whole
    world. `carry` holds the carried columns that are not already in `input`; absent if there are none.
    User columns live inside the structs, so no name of theirs can collide with ours. In `tracked` rows,
    those of incremental jobs, `input_digest` tells contents apart and `change` says why the row runs.
    """
    fields = [
        pa.field(ROW_ID, pa.int64(), nullable=False),
        pa.field(CUSTOM_ID, pa.string()),
        pa.field(COPIES, pa.int32(), nullable=False),
        pa.field(INPUT, input_columns),
    ]
    if carry_columns is not None:
        fields.append(pa.field(CARRY, carry_columns))
    return pa.schema([*fields, *(TRACKED_FIELDS if tracked else ())])


def copies_schema(carry_columns: pa.StructType | None, *, tracked: bool = False) -> pa.Schema:
    """Schema of `copies.parquet`: each row, the sent row it is identical to, and its own carry.

    `carry` here also lacks the columns that are in `input`: those equal the sent row's.
    """
    fields = [
        pa.field(ROW_ID, pa.int64(), nullable=False),
        pa.field("copy_of", pa.int64(), nullable=False),
        pa.field(CUSTOM_ID, pa.string()),
    ]
    if carry_columns is not None:
        fields.append(pa.field(CARRY, carry_columns))
    return pa.schema([*fields, *(TRACKED_FIELDS if tracked else ())])


PART_SCHEMA = pa.schema(
    [
        pa.field(ROW_ID, pa.int64(), nullable=False),
        pa.field("outcome", pa.string(), nullable=False),
        pa.field("reason", pa.string()),
        pa.field("message", pa.string()),
        pa.field("output", pa.string()),
        pa.field("vector", pa.list_(pa.float32())),
        pa.field("finish_reason", pa.string()),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("attempts", pa.int16(), nullable=False),
        pa.field("finished_at", pa.timestamp("ms", tz="UTC"), nullable=False),
    ]
)
"""Schema of a part. `output` is the answer as text (JSON text for `json`), or the last raw output of a
row that did not succeed. Tokens are summed over all attempts at the row: they are what was paid.
Its Parquet metadata holds `batchinfer.fingerprint`, `batchinfer.epoch`, `batchinfer.shard`,
`batchinfer.rows_sha256`, `batchinfer.rows`, the number of its rows, and `batchinfer.written_by`, the release
of this package."""

PART_METADATA_PREFIX = "batchinfer."
