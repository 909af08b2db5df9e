"""Freeze: an opened input's rows, checked, placed and written as a run's shards.

The input is read twice: once for keys, from which DuckDB decides where each row goes, and once to
move the rows there through an out-of-core shuffle. What is written is not a run until a plan names it.
"""

from __future__ import annotations

import base64
import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_batchinfer.errors import InputError, StoreError
from airflow_batchinfer.pipeline.duck import THREADS, open_duckdb
from airflow_batchinfer.pipeline.increment import Increment, KeptWriter
from airflow_batchinfer.pipeline.inputs import check_columns
from airflow_batchinfer.pipeline.keys import build_keys
from airflow_batchinfer.pipeline.prediction import predict
from airflow_batchinfer.pipeline.readers import Reader
from airflow_batchinfer.pipeline.sharding import Placement, place_rows, placement_batches
from airflow_batchinfer.pipeline.shuffle import RUN_BYTES, Shuffle
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.parquet import WRITE_OPTIONS
from airflow_batchinfer.run.plan import InputSnapshot, KeptRows, PlannedShard
from airflow_batchinfer.run.shard import (
    CARRY,
    CHANGE,
    COPIES,
    CUSTOM_ID,
    DIGEST,
    INPUT,
    ROW_ID,
    copies_schema,
    rows_schema,
)
from airflow_batchinfer.spec import ChoiceTask, JobSpec, PilotSpec
from airflow_batchinfer.store import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

_PLACE = "place"
_COPY_OF = "copy_of"
_ROW_GROUP_ROWS = 8_192


@dataclass(frozen=True)
class Frozen:
    """What a plan needs to know of the rows that were frozen for it."""

    shards: list[PlannedShard]
    snapshot: InputSnapshot
    warnings: list[str]
    kept: KeptRows | None = None
    changes: dict[str, int] | None = None


def freeze(
    store: Store,
    spec: JobSpec,
    layout: RunLayout,
    epoch: str,
    reader: Reader,
    scratch: Path,
    increment: Increment | None = None,
) -> Frozen:
    """Check, place and write all rows of an input.

    Args:
        store: where the shards go.
        spec: the job.
        layout: the run's folder.
        epoch: the split attempt's, part of the files' names.
        reader: the input.
        scratch: an empty folder on local disk, with room for about the input's size.
        increment: what to leave out because an earlier run answered it; none for all rows.

    Raises:
        InputError: a column is missing, an id is null or stands twice, there are no rows, or the input
            changed meanwhile.
        StoreError: the store cannot be written.
    """
    return _Freezer(store, spec, layout, epoch, reader, scratch, increment).run()


@dataclass(frozen=True)
class _Columns:
    """Which input columns go where."""

    prompt: list[str]
    carried: list[str]
    id: str | None

    @property
    def all(self) -> list[str]:
        """Every column that is read, each once."""
        return list(dict.fromkeys([*self.prompt, *self.carried, *([self.id] if self.id else [])]))

    @property
    def own_carry(self) -> list[str]:
        """Carried columns that are not in the prompt: those stand in the rows' `carry`."""
        return [c for c in self.carried if c not in self.prompt]


class _Freezer:
    def __init__(
        self,
        store: Store,
        spec: JobSpec,
        layout: RunLayout,
        epoch: str,
        reader: Reader,
        scratch: Path,
        increment: Increment | None,
    ) -> None:
        self._store = store
        self._spec = spec
        self._layout = layout
        self._epoch = epoch
        self._reader = reader
        self._scratch = scratch
        self._increment = increment
        self._columns = _Columns(PromptTemplate(spec.prompt).columns, spec.carried, spec.input.id_column)
        self._tracked = bool(reader.tracked) or spec.incremental
        self._check_columns()
        columns = self._columns
        self._schema = pa.schema([(f.name, storable(f.type)) for f in map(reader.schema.field, columns.all)])
        carry = _struct(self._schema, columns.own_carry)
        inputs = _struct(self._schema, columns.prompt)
        assert inputs is not None
        self._rows_schema = rows_schema(inputs, carry, tracked=self._tracked)
        self._copies_schema = copies_schema(carry, tracked=self._tracked)

    @property
    def _pilot(self) -> PilotSpec | None:
        """The pilot to draw; a replay has none."""
        return None if self._reader.row_ids is not None else self._spec.pilot

    def run(self) -> Frozen:
        """See `freeze`."""
        columns, increment = self._columns, self._increment
        with open_duckdb(self._scratch) as connection:
            rows = build_keys(
                connection,
                self._reader,
                columns.prompt,
                columns.id,
                predict(self._spec),
                keep_ids=increment is not None,
                strata=self._pilot.stratify if self._pilot else (),
            )
            if increment is not None:
                increment.decide(connection, self._scratch)
            placement = place_rows(connection, self._spec.sharding, self._scratch, self._pilot)
        sent, copies, kept = self._regroup(placement, rows)
        with ThreadPoolExecutor(THREADS) as pool:
            files = list(pool.map(lambda s: self._write_shard(s.shard, sent, copies), placement.shards))
        if not self._reader.unchanged():
            raise InputError(
                f"the input changed while it was being split ({self._reader.files[0].uri} or another file): "
                "run split again when nothing writes to it"
            )
        shards = [
            PlannedShard(
                shard=s.shard,
                rows=s.rows,
                sent=s.sent,
                predicted_tokens=s.tokens,
                rows_key=file.key,
                rows_bytes=file.bytes,
                rows_sha256=file.sha256,
                copies_key=file.copies_key,
                pilot=placement.pilot and s.shard == 0,
            )
            for s, file in zip(placement.shards, files, strict=True)
        ]
        planned = sum(s.rows for s in shards) + (kept.rows if kept else 0)
        if planned != rows:
            raise StoreError(f"split lost rows: {rows} read, {planned} planned; this is a defect")
        warnings = [*self._reader.warnings, *placement.warnings]
        if increment is not None:
            warnings += increment.warnings
        return Frozen(
            shards=shards,
            snapshot=self._snapshot(rows),
            warnings=warnings,
            kept=kept,
            changes=increment.changes if increment else None,
        )

    def _check_columns(self) -> None:
        columns, spec = self._columns, self._spec
        schema = self._reader.schema
        have = schema.names
        check_columns(columns.prompt, have, "prompt")
        check_columns([columns.id] if columns.id else [], have, "input.id_column")
        check_columns(spec.input.carry, have, "input.carry")
        check_columns([spec.input.truth] if spec.input.truth else [], have, "input.truth")
        check_columns(spec.pilot.stratify if spec.pilot else [], have, "pilot.stratify")
        if spec.overlong.column and spec.overlong.column not in columns.prompt:
            raise InputError(
                f"overlong.column: `{spec.overlong.column}` is no column that the prompt reads; those are: "
                f"{', '.join(columns.prompt)}"
            )
        if columns.id and not _can_be_id(schema.field(columns.id).type):
            raise InputError(
                f"input.id_column: `{columns.id}` is {schema.field(columns.id).type}; an id is text or "
                "a whole number: write it as text"
            )
        truth = spec.input.truth
        if truth and isinstance(spec.task, ChoiceTask) and not _can_be_label(schema.field(truth).type):
            raise InputError(
                f"input.truth: `{truth}` is {schema.field(truth).type}; a true label is text, or a number or "
                "boolean that reads like the label: write it as text"
            )

    def _regroup(self, placement: Placement, rows: int) -> tuple[Shuffle, Shuffle, KeptRows | None]:
        """Read the input a second time and regroup its rows by shard: sent rows, copies, and kept rows."""
        place_field = pa.field(_PLACE, pa.int64())
        sent = Shuffle(_folder(self._scratch, "sent"), self._rows_schema.append(place_field))
        # Copies are narrow: with a full-sized buffer, it would go on filling in large inputs only.
        copies = Shuffle(_folder(self._scratch, "copies"), self._copies_schema, RUN_BYTES // 8)
        places = _Places(placement)
        kept = None
        if self._increment is not None:
            carried = pa.schema([self._schema.field(c) for c in self._columns.carried])
            kept = KeptWriter(self._increment, self._scratch, carried)
        tracked_names = list(self._reader.tracked)
        first = 0
        for batch in self._reader.batches([*self._columns.all, *tracked_names]):
            ordinals = np.arange(first, first + batch.num_rows, dtype=np.int64)
            first += batch.num_rows
            tracked = batch.select(tracked_names).rename_columns([DIGEST, CHANGE]) if tracked_names else None
            batch = batch.select(self._columns.all).cast(self._schema)
            ids = self._custom_ids(batch)
            if kept is not None:
                kept.add(ordinals, ids, batch)
            placed = places.take(first)
            mask = np.isin(ordinals, placed[ROW_ID].to_numpy(), assume_unique=True)
            if not mask.all():
                batch, ids = batch.filter(pa.array(mask)), ids.filter(pa.array(mask))
                tracked = tracked and tracked.filter(pa.array(mask))
            self._deal(batch, ids, placed, tracked, sent, copies)
        if first != rows:
            raise InputError(
                f"the input had {rows} rows and then {first} while it was being split: run split again when "
                "nothing writes to it"
            )
        sent.finish()
        copies.finish()
        return sent, copies, kept.close(self._store, self._layout.kept(self._epoch)) if kept else None

    def _deal(
        self,
        batch: pa.RecordBatch,
        ids: pa.Array,
        placed: pa.RecordBatch,
        tracked: pa.RecordBatch | None,
        sent: Shuffle,
        copies: Shuffle,
    ) -> None:
        is_copy = placed[_COPY_OF].is_valid()
        arrays = {
            ROW_ID: self._row_ids(placed[ROW_ID]),
            CUSTOM_ID: ids,
            COPIES: placed[COPIES],
            INPUT: _struct_array(batch, self._columns.prompt),
            CARRY: _struct_array(batch, self._columns.own_carry),
            _PLACE: placed[_PLACE],
            _COPY_OF: self._row_ids(placed[_COPY_OF]),
        }
        if self._tracked:
            source = tracked if tracked is not None else placed
            arrays |= {DIGEST: source[DIGEST], CHANGE: source[CHANGE]}
        shard = placed["shard"].to_numpy().astype(np.int64)
        for shuffle, mask in ((sent, pc.invert(is_copy)), (copies, is_copy)):
            columns = [arrays[name] for name in shuffle.schema.names]
            chosen = pa.record_batch(columns, schema=shuffle.schema).filter(mask)
            shuffle.add(chosen, shard[mask.to_numpy(zero_copy_only=False)])

    def _custom_ids(self, batch: pa.RecordBatch) -> pa.Array:
        if self._columns.id is None:
            return pa.nulls(batch.num_rows, pa.string())
        return batch.column(self._columns.id).cast(pa.string())

    def _row_ids(self, ordinals: pa.Array) -> pa.Array:
        """Row ids of the rows with these ordinals in the reader."""
        if self._reader.row_ids is None:
            return ordinals
        return pa.array(self._reader.row_ids).take(ordinals)

    def _write_shard(self, shard: int, sent: Shuffle, copies: Shuffle) -> _ShardFiles:
        rows = sent.table(shard)
        rows = rows.take(pc.sort_indices(rows[_PLACE])).drop_columns(_PLACE)
        path = self._scratch / f"rows-{shard:05d}.parquet"
        pq.write_table(rows, path, row_group_size=_ROW_GROUP_ROWS, **WRITE_OPTIONS)
        size, digest = path.stat().st_size, file_sha256(path)
        key = self._layout.rows(shard, self._epoch)
        self._store.put_file(path, key)
        copies_key = None
        if shard in copies:
            copies_key = self._layout.copies(shard, self._epoch)
            with pq.ParquetWriter(path, copies.schema, **WRITE_OPTIONS) as writer:
                for batch in copies.read(shard):
                    writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
            self._store.put_file(path, copies_key)
        return _ShardFiles(key, size, digest, copies_key)

    def _snapshot(self, rows: int) -> InputSnapshot:
        schema = self._reader.schema
        carried = pa.schema([schema.field(c) for c in self._columns.carried])
        return InputSnapshot(
            files=self._reader.files,
            rows=rows,
            columns={f.name: str(f.type) for f in schema},
            carry_schema=base64.b64encode(carried.serialize()).decode() if self._columns.carried else None,
        )


@dataclass(frozen=True)
class _ShardFiles:
    key: str
    bytes: int
    sha256: str
    copies_key: str | None


class _Places:
    """The placement, handed out in pieces that follow the input's batches."""

    def __init__(self, placement: Placement) -> None:
        self._batches = placement_batches(placement)
        self._rest: pa.Table | None = None
        self._none = pa.RecordBatch.from_pylist([], pq.read_schema(placement.path))

    def take(self, end: int) -> pa.RecordBatch:
        """The next lines, of rows before ordinal `end`; rows that are not placed have no line."""
        have = [self._rest] if self._rest is not None else []
        while not have or not have[-1].num_rows or have[-1][ROW_ID][-1].as_py() < end - 1:
            batch = next(self._batches, None)
            if batch is None:
                break
            have.append(pa.Table.from_batches([batch]))
        if not have:
            return self._none
        table = pa.concat_tables(have).combine_chunks()
        count = int(np.searchsorted(table[ROW_ID].to_numpy(), end))
        self._rest = table.slice(count)
        taken = table.slice(0, count).to_batches()
        return taken[0] if taken else self._none


def storable(kind: pa.DataType) -> pa.DataType:
    """The type in which a column stands in a shard's files: dictionaries and views are spelled out."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return storable(kind.value_type)
    if pa.types.is_string_view(kind):
        return pa.large_string()
    if pa.types.is_binary_view(kind):
        return pa.large_binary()
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(storable(f.type)) for f in kind.fields])
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(storable(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(storable(kind.value_type)))
    return kind


def file_sha256(path: Path) -> str:
    """SHA-256 of a local file, hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _can_be_id(kind: pa.DataType) -> bool:
    """Whether Arrow, which writes `custom_id`, and DuckDB, which looks for it again, write it alike."""
    kind = storable(kind)
    types = pa.types
    return bool(
        types.is_integer(kind)
        or types.is_string(kind)
        or types.is_large_string(kind)
        or (types.is_decimal(kind) and kind.scale == 0)
    )


def _can_be_label(kind: pa.DataType) -> bool:
    """Whether it can be compared with a label once it is text: no list or struct, no bytes."""
    kind = storable(kind)
    types = pa.types
    return bool(
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_primitive(kind)
        or types.is_decimal(kind)
        or types.is_null(kind)
    )


def _struct(schema: pa.Schema, columns: Sequence[str]) -> pa.StructType | None:
    return pa.struct([schema.field(c) for c in columns]) if columns else None


def _struct_array(batch: pa.RecordBatch, columns: Sequence[str]) -> pa.StructArray | None:
    if not columns:
        return None
    return pa.StructArray.from_arrays(
        [batch.column(c) for c in columns], fields=[batch.schema.field(c) for c in columns]
    )


def _folder(scratch: Path, name: str) -> Path:
    folder = scratch / name
    folder.mkdir()
    return folder
