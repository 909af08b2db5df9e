"""Split: check the input, freeze its rows into shards, and write the plan.

The plan is written last, so a split that dies leaves nothing that a reader would take for a run. It is
written once: a second call returns it, or says what has changed in the job since.
"""

from __future__ import annotations

import base64
import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from airflow_batchinfer.errors import InputError, PlanChangedError, SpecError, StoreError
from airflow_batchinfer.pipeline.duck import open_duckdb
from airflow_batchinfer.pipeline.expectations import check_expectations
from airflow_batchinfer.pipeline.inputs import check_columns
from airflow_batchinfer.pipeline.keys import build_keys
from airflow_batchinfer.pipeline.prediction import predict
from airflow_batchinfer.pipeline.readers import Reader, open_input
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.sharding import Placement, place_rows, placement_batches
from airflow_batchinfer.pipeline.shuffle import Shuffle
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.fingerprint import changed_fields, fingerprint, fingerprint_fields
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import InputSnapshot, Plan, PlannedShard
from airflow_batchinfer.run.shard import CARRY, COPIES, CUSTOM_ID, INPUT, ROW_ID, copies_schema, rows_schema
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

_PLACE = "place"
_ROW_GROUP_ROWS = 8_192
_NEUTRAL_SHARDING = ("max_parallel_shards", "shards_per_task")


def split(store: Store, spec: JobSpec, run_id: str) -> Plan:
    """Make the run's plan, or return the one that is there.

    Raises:
        InputError: the input cannot be used; names file, line, column or rows, and the remedy.
        SpecError: the prompt or an expectation cannot work, or another run has the same folder name.
        PlanChangedError: a plan is there and the job has changed since in a field that decides the
            results or the shards; see `on_changed_spec`.
        StoreError: the store cannot be written, or the disk is full.
    """
    check_expectations(spec)
    plan, generation = _existing_plan(store, spec, run_id)
    if plan is not None:
        return plan
    with scratch_folder("split") as scratch:
        return _Split(store, spec, run_id, generation, scratch).run()


def load_plan(store: Store, folder: str) -> Plan:
    """The plan of a run's folder.

    Raises:
        InputError: there is no plan.
        CorruptError: the plan is damaged.
    """
    try:
        return Plan.read(store, RunLayout(folder).plan)
    except FileNotFoundError as error:
        raise InputError(f"{store.uri_of(folder)} has no plan: run split first") from error


def deciding_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields on which a plan rests, by path: what decides outputs, and what decides shards."""
    data = spec.dump()
    fields = fingerprint_fields(spec)
    for section, neutral in (
        ("input", ("storage_options",)),
        ("sharding", _NEUTRAL_SHARDING),
        ("output", ()),
    ):
        fields |= {f"{section}.{k}": v for k, v in data[section].items() if k not in neutral}
    fields["pilot"] = data["pilot"]
    return fields


def _existing_plan(store: Store, spec: JobSpec, run_id: str) -> tuple[Plan | None, int]:
    """The newest generation's plan if it still holds; else the number of the generation to make."""
    generation, plan = 0, None
    while store.exists(RunLayout(run_dir(spec.name, run_id, generation + 1)).plan):
        generation += 1
    if generation:
        plan = load_plan(store, run_dir(spec.name, run_id, generation))
    if plan is None:
        return None, 1
    if plan.run_id != run_id:
        raise SpecError(
            f"the folder {store.uri_of(plan.folder)} belongs to the run {plan.run_id!r}, not {run_id!r}: "
            "their names are the same but for special characters; choose another run id"
        )
    changed = changed_fields(deciding_fields(plan.spec), deciding_fields(spec))
    if changed and spec.on_changed_spec == "restart":
        return None, generation + 1
    if changed:
        raise PlanChangedError(
            f"run {run_id!r} of job {spec.name!r} has a plan, and the job has changed since in "
            f"{', '.join(changed)}: start a new run, undo the change, or set `on_changed_spec: restart` to "
            "begin this run anew (the old generation stays on disk)"
        )
    if plan.spec != spec:
        # What does not decide rows, shards or outputs (tolerances, retries, checks, exports) is adopted.
        plan = plan.model_copy(update={"spec": spec})
        plan.write(store, RunLayout(plan.folder).plan)
    return plan, generation


@dataclass(frozen=True)
class _Columns:
    """Which input columns go where, and the files' schemas."""

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


class _Split:
    """One attempt at a split."""

    def __init__(self, store: Store, spec: JobSpec, run_id: str, generation: int, scratch: Path) -> None:
        self._store = store
        self._spec = spec
        self._run_id = run_id
        self._layout = RunLayout(run_dir(spec.name, run_id, generation))
        self._generation = generation
        self._scratch = scratch
        self._epoch = new_epoch()

    def run(self) -> Plan:
        """See `split`."""
        self._check_store()
        columns = _Columns(
            PromptTemplate(self._spec.prompt).columns, self._spec.carried, self._spec.input.id_column
        )
        reader = open_input(self._spec.input, self._scratch)
        self._check_columns(reader, columns)
        with open_duckdb(self._scratch) as connection:
            rows = build_keys(connection, reader, columns.prompt, columns.id, predict(self._spec))
            placement = place_rows(connection, self._spec.sharding, self._scratch, self._spec.pilot)
        shards = self._write_shards(reader, columns, placement)
        if not reader.unchanged():
            raise InputError(
                f"the input changed while it was being split ({reader.files[0].uri} or another file): run "
                "split again when nothing writes to it"
            )
        return self._write_plan(reader, columns, placement, shards, rows)

    def _check_store(self) -> None:
        """Fail before hours of reading if nothing can be written."""
        key = f"{self._layout.folder}/.writable-{self._epoch}"
        self._store.write_bytes(key, b"")
        self._store.delete(key)

    def _check_columns(self, reader: Reader, columns: _Columns) -> None:
        have = reader.schema.names
        check_columns(columns.prompt, have, "prompt")
        check_columns([columns.id] if columns.id else [], have, "input.id_column")
        check_columns(self._spec.input.carry, have, "input.carry")
        check_columns([self._spec.input.truth] if self._spec.input.truth else [], have, "input.truth")
        if self._spec.overlong.column:
            check_columns(
                [self._spec.overlong.column], columns.prompt, "overlong.column (of the prompt's columns)"
            )
        if columns.id and pa.types.is_nested(reader.schema.field(columns.id).type):
            raise InputError(
                f"input.id_column: `{columns.id}` is {reader.schema.field(columns.id).type}; an id is text "
                "or a number"
            )

    def _write_shards(self, reader: Reader, columns: _Columns, placement: Placement) -> list[PlannedShard]:
        sent, copies = self._regroup(reader, columns, placement)
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            files = list(pool.map(lambda s: self._write_shard(s.shard, sent, copies), placement.shards))
        return [
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

    def _regroup(self, reader: Reader, columns: _Columns, placement: Placement) -> tuple[Shuffle, Shuffle]:
        """Read the input a second time and regroup its rows by shard: sent rows, and copies."""
        schema = pa.schema([(f.name, storable(f.type)) for f in map(reader.schema.field, columns.all)])
        carry = _struct(schema, columns.own_carry)
        sent_schema = rows_schema(_struct(schema, columns.prompt), carry)
        sent_schema = sent_schema.append(pa.field(_PLACE, pa.int64()))
        sent = Shuffle(_folder(self._scratch, "sent"), sent_schema)
        copies = Shuffle(_folder(self._scratch, "copies"), copies_schema(carry))
        places = _Places(placement)
        for batch in reader.batches(columns.all):
            batch = batch.cast(schema)
            placed = places.take(batch.num_rows)
            shard = placed["shard"].to_numpy().astype(np.int64)
            is_copy = placed["copy_of"].is_valid()
            ids = (
                batch.column(columns.id).cast(pa.string())
                if columns.id
                else pa.nulls(batch.num_rows, pa.string())
            )
            arrays = {
                ROW_ID: placed[ROW_ID],
                CUSTOM_ID: ids,
                COPIES: placed[COPIES],
                INPUT: _struct_array(batch, columns.prompt),
                CARRY: _struct_array(batch, columns.own_carry),
                _PLACE: placed[_PLACE],
                "copy_of": placed["copy_of"],
            }
            for shuffle, schema_, mask in (
                (sent, sent_schema, pa.compute.invert(is_copy)),
                (copies, copies.schema, is_copy),
            ):
                chosen = pa.record_batch([arrays[n] for n in schema_.names], schema=schema_).filter(mask)
                shuffle.add(chosen, shard[mask.to_numpy(zero_copy_only=False)])
        places.must_be_used_up()
        sent.finish()
        copies.finish()
        return sent, copies

    def _write_shard(self, shard: int, sent: Shuffle, copies: Shuffle) -> _ShardFiles:
        table = sent.table(shard)
        table = table.take(pa.compute.sort_indices(table[_PLACE])).drop_columns(_PLACE)
        path = self._scratch / f"rows-{shard:05d}.parquet"
        pq.write_table(table, path, row_group_size=_ROW_GROUP_ROWS, compression="zstd")
        size, digest = path.stat().st_size, file_sha256(path)
        key = self._layout.rows(shard, self._epoch)
        self._store.put_file(path, key)
        copies_key = None
        if shard in copies:
            copies_key = self._layout.copies(shard, self._epoch)
            with pq.ParquetWriter(path, copies.schema, compression="zstd") as writer:
                for batch in copies.read(shard):
                    writer.write_batch(batch, row_group_size=_ROW_GROUP_ROWS)
            self._store.put_file(path, copies_key)
        return _ShardFiles(key, size, digest, copies_key)

    def _write_plan(
        self, reader: Reader, columns: _Columns, placement: Placement, shards: list[PlannedShard], rows: int
    ) -> Plan:
        carried = pa.schema([reader.schema.field(c) for c in columns.carried])
        plan = Plan(
            job=self._spec.name,
            run_id=self._run_id,
            generation=self._generation,
            folder=self._layout.folder,
            created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            epoch=self._epoch,
            fingerprint=fingerprint(self._spec),
            spec=self._spec,
            input=InputSnapshot(
                files=reader.files,
                rows=rows,
                columns={f.name: str(f.type) for f in reader.schema},
                carry_schema=base64.b64encode(carried.serialize()).decode() if columns.carried else None,
            ),
            shards=shards,
            warnings=[*reader.warnings, *placement.warnings],
        )
        if plan.rows != rows:
            raise StoreError(f"split lost rows: {rows} read, {plan.rows} planned; this is a defect")
        if self._store.exists(self._layout.plan):
            return load_plan(self._store, self._layout.folder)  # another attempt was first
        plan.write(self._store, self._layout.plan)
        return plan


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

    def take(self, rows: int) -> pa.RecordBatch:
        """The next `rows` lines."""
        have = [self._rest] if self._rest is not None else []
        count = sum(t.num_rows for t in have)
        while count < rows:
            batch = next(self._batches, None)
            if batch is None:
                raise InputError("the input grew while it was being split: run split again")
            have.append(pa.Table.from_batches([batch]))
            count += batch.num_rows
        table = pa.concat_tables(have)
        self._rest = table.slice(rows)
        taken = table.slice(0, rows).combine_chunks()
        return taken.to_batches()[0] if rows else pa.RecordBatch.from_pylist([], table.schema)

    def must_be_used_up(self) -> None:
        """Fail if the input ended before the placement did."""
        if (self._rest is not None and self._rest.num_rows) or next(self._batches, None) is not None:
            raise InputError("the input shrank while it was being split: run split again")


def storable(kind: pa.DataType) -> pa.DataType:
    """The type in which a column stands in a shard's files: dictionaries are spelled out."""
    if pa.types.is_dictionary(kind) or pa.types.is_run_end_encoded(kind):
        return storable(kind.value_type)
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


def _struct(schema: pa.Schema, columns: list[str]) -> pa.StructType | None:
    return pa.struct([schema.field(c) for c in columns]) if columns else None


def _struct_array(batch: pa.RecordBatch, columns: list[str]) -> pa.StructArray | None:
    if not columns:
        return None
    return pa.StructArray.from_arrays(
        [batch.column(c) for c in columns], fields=[batch.schema.field(c) for c in columns]
    )


def _folder(scratch: Path, name: str) -> Path:
    folder = scratch / name
    folder.mkdir()
    return folder
