"""Replay: send a published run's dead letters again, with another template, model or policy.

A replay is a run of its own, with a folder, shards, commits and a ledger; its rows have the row ids of
the run that it repairs. Its merge puts what succeeded into that run's results and updates that run's
dead letters; it publishes nothing under its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_batchinfer.errors import (
    InputError,
    SpecError,
    StaleLedgerError,
    UnreadableError,
)
from airflow_batchinfer.outcome import Outcome, Reason
from airflow_batchinfer.pipeline.accounting import answered_of_run, current_account
from airflow_batchinfer.pipeline.answered import AnsweredBatch
from airflow_batchinfer.pipeline.answers import struct_field
from airflow_batchinfer.pipeline.freeze import freeze, storable
from airflow_batchinfer.pipeline.letters_of_run import replays_of
from airflow_batchinfer.pipeline.outputs import OutputColumns
from airflow_batchinfer.pipeline.results import carried_schema, newest_published
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.split import (
    check_writable,
    existing_plan,
    load_plan,
    newest_plan,
    write_plan,
)
from airflow_batchinfer.pipeline.standing import merged_rows, other_plan_remedy, planned_otherwise
from airflow_batchinfer.pipeline.tables import check_table_types, dataset_of, open_table
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.layout import RunLayout, results_table, run_dir, runs_dir
from airflow_batchinfer.run.plan import InputFile, Plan, ReplayOf
from airflow_batchinfer.run.shard import TRACKED_FIELDS
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_overrides import merged
from airflow_batchinfer.store import Store

log = logging.getLogger(__name__)

_CLOCKS_APART = timedelta(hours=1)
"""How much the clocks of the store and of who plans runs may differ."""

FIXED_FIELDS = frozenset(
    {
        "name",
        "input",
        "store",
        "storage_options",
        "output",
        "incremental",
        "removed_rows",
        "export",
        "pilot",
        "judge",
    }
)
"""Fields of the job that a replay cannot override: they decide which rows and columns there are, or are
for whole runs."""


def prepare_replay(
    store: Store,
    folder: str,
    run_id: str,
    *,
    reasons: Sequence[str] = (),
    overrides: Mapping[str, Any] | None = None,
) -> Plan:
    """Plan a run of the dead letters of the run at `folder` that no replay has resolved yet.

    The plan has no shards if nothing is left to be done. A second call with the same `run_id` returns the
    plan that is there.

    Args:
        store: the run's.
        folder: the run to repair; it must be complete.
        run_id: the replay's own.
        reasons: only letters with these reasons; none for all.
        overrides: fields of the job spec to change, nested as in YAML, e.g. `{"prompt": {"template": ...}}`.

    Raises:
        SpecError: an override that cannot be, or an unknown reason.
        PlanChangedError: the run id has a plan for other rows or another job.
        StaleLedgerError: the run is not complete, is published by another plan, or was pruned.
        InputError: the new template reads a column that the run did not freeze.
    """
    home = load_plan(store, folder)
    if home.replay_of is not None:
        raise SpecError(f"{folder} is itself a replay of {home.replay_of.folder}: replay that run")
    known = [reason.value for reason in Reason]
    for reason in reasons:
        if reason not in known:
            raise SpecError(f"unknown reason `{reason}` (allowed: {', '.join(known)})")
    spec = _overridden(home.spec, overrides or {})
    of = ReplayOf(
        run_id=home.run_id,
        folder=home.folder,
        generation=home.generation,
        created_at=home.created_at,
        fingerprint=home.fingerprint,
        reasons=sorted(set(reasons)),
    )
    plan, generation = existing_plan(store, spec, run_id, of)
    if plan is not None:
        return plan
    if pruned := _pruned(store, home):
        raise StaleLedgerError(
            f"run {home.run_id!r} was pruned from the tables: clear the merge of "
            f"{', then of '.join(pruned)}, which publishes again what they answered, then replay it"
        )
    layout, epoch = RunLayout(run_dir(spec.name, run_id, generation)), new_epoch()
    check_writable(store, layout, epoch)
    check_table_types(store, results_table(spec.name), OutputColumns(spec).fields)
    with scratch_folder("replay") as scratch:
        reader = LetterReader(store, home, run_id, of.reasons, scratch)
        frozen = freeze(store, spec, layout, epoch, reader, scratch)
    nothing_left = [] if frozen.shards else [f"run {home.run_id!r} has no dead letter left to replay"]
    return write_plan(store, spec, run_id, generation, epoch, frozen, replay_of=of, warnings=nothing_left)


def published_folder(store: Store, job: str, run_id: str | None) -> str:
    """Folder of a run to replay: the one named, or the job's newest published one.

    Raises:
        InputError: there is no such run.
    """
    if run_id is None:
        run_id = _newest_run(store, job)
        if run_id is None:
            raise InputError(f"job {job!r} has no published run in {store.uri}")
    plan = newest_plan(store, job, run_id)
    if plan is None:
        raise InputError(f"{store.uri} holds no run {run_id!r} of job {job!r}: list them with `runs {job}`")
    return plan.folder


def _newest_run(store: Store, job: str) -> str | None:
    """Id of the published run that was planned last.

    A run whose rows are all dead stands in no results, and a run whose folder was deleted stands nowhere
    else: that one is to be missed, and not an older one repaired in its stead.
    """
    in_results = newest_published(store, job)
    newest = (in_results.created_at, in_results.run_id) if in_results else None
    for folder in store.folders(runs_dir(job)):
        merged = store.info(RunLayout(folder).merge)
        if merged is None or (newest and merged.modified < (newest[0] - _CLOCKS_APART).timestamp()):
            continue  # it was published, or rather planned, before the newest one was planned
        try:
            plan = Plan.read(store, RunLayout(folder).plan)
        except (FileNotFoundError, UnreadableError) as error:
            log.warning("%s is not thought of: %s", folder, error)
            continue
        planned = (datetime.fromisoformat(plan.created_at), plan.run_id)
        if plan.replay_of is None and (newest is None or planned > newest):
            newest = planned
    return newest[1] if newest else None


class LetterReader:
    """A `Reader` of the rows behind a run's open dead letters, copies included."""

    files: list[InputFile]
    schema: pa.Schema
    warnings: list[str]
    row_ids: npt.NDArray[np.int64] | None
    tracked: tuple[str, ...]

    def __init__(self, store: Store, home: Plan, run_id: str, reasons: Sequence[str], scratch: Path) -> None:
        """Collect the rows that the replay `run_id` sends into a file in `scratch`.

        Raises `StaleLedgerError`, `CorruptError`.
        """
        self.warnings = []
        tracked = TRACKED_FIELDS if home.spec.incremental else ()
        self.tracked = tuple(_unused(f.name, home.input.columns) for f in tracked)
        self._home = home
        self._path = scratch / "letters.parquet"
        self._carried = carried_schema(home)
        self.schema = pa.schema([])
        done = _resolved(store, home, run_id)
        account = current_account(store, home)
        ids: list[pa.Array] = []
        writer: pq.ParquetWriter | None = None
        for batch in answered_of_run(store, home, account, dead_only=True):
            mask = _wanted(batch, reasons, done)
            rows = self._rows(batch)
            if writer is None:
                self.schema = self._exact(rows.schema)
                writer = pq.ParquetWriter(self._path, rows.schema, compression="zstd")
            writer.write_batch(rows.filter(mask))
            ids.append(batch.row_ids.filter(mask))
        if writer is None:
            self.schema = self._planned_schema()
            writer = pq.ParquetWriter(self._path, self._stored(self.schema))
        writer.close()
        self.row_ids = np.concatenate([np.empty(0, np.int64), *(i.to_numpy() for i in ids)])
        source = f"{store.uri_of(home.folder)}#dead-letters"
        self.files = [InputFile(uri=source, size=self._path.stat().st_size, version=account.ledger.digest())]

    def batches(self, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
        """See `Reader.batches`."""
        tracked = [f.with_name(name) for f, name in zip(TRACKED_FIELDS, self.tracked, strict=False)]
        fields = [*self.schema, *tracked]
        wanted = pa.schema([next(f for f in fields if f.name == name) for name in columns])
        with pq.ParquetFile(self._path, pre_buffer=False) as file:
            for batch in file.iter_batches(8_192, columns=list(columns)):
                yield batch.select(list(columns)).cast(wanted)

    def unchanged(self) -> bool:
        """A run's rows and commits never change."""
        return True

    def _rows(self, batch: AnsweredBatch) -> pa.RecordBatch:
        columns = {f.name: struct_field(batch.input, f.name) for f in batch.input.type.fields}
        columns |= {name: values for name, values in batch.carried.items() if name not in columns}
        id_column = self._home.spec.input.id_column
        if id_column and id_column not in columns:
            columns[id_column] = batch.custom_ids
        columns |= {own: batch.tracked[f.name] for own, f in zip(self.tracked, TRACKED_FIELDS, strict=False)}
        return pa.record_batch(columns)

    def _exact(self, stored: pa.Schema) -> pa.Schema:
        """The input's own types for carried columns; tracking columns are no input."""
        carried = {f.name: f for f in self._carried}
        return pa.schema([carried.get(f.name, f) for f in stored if f.name not in self.tracked])

    def _planned_schema(self) -> pa.Schema:
        """For a run without a dead row: column names alone matter."""
        names = self._home.input.columns
        carried = {f.name: f for f in self._carried}
        return pa.schema([carried.get(name, pa.field(name, pa.string())) for name in names])

    def _stored(self, schema: pa.Schema) -> pa.Schema:
        return pa.schema([f.with_type(storable(f.type)) for f in schema])


def _unused(name: str, taken: Collection[str]) -> str:
    """The name, or one made from it that no column of the input has."""
    while name in taken:
        name = f"_{name}"
    return name


def _wanted(batch: AnsweredBatch, reasons: Sequence[str], done: npt.NDArray[np.int64]) -> pa.Array:
    mask = pc.not_equal(batch.answers.column("outcome"), Outcome.SUCCEEDED.value)
    if reasons:
        mask = pc.and_(mask, pc.is_in(batch.answers.column("reason"), pa.array(list(reasons))))
    return pc.and_(mask, pa.array(~np.isin(batch.row_ids.to_numpy(), done)))


def _resolved(store: Store, home: Plan, run_id: str) -> npt.NDArray[np.int64]:
    """Rows that replays have resolved, but for an earlier generation of the replay `run_id`: a restarted one
    takes the place of all that."""
    key = results_table(home.job)
    table = open_table(store, key)
    if table is None:
        return np.empty(0, np.int64)
    dataset = dataset_of(store, key, table)
    other = planned_otherwise(store, home, dataset)
    if other is not None:
        raise StaleLedgerError(
            f"run {home.run_id!r} is published by another plan, made {other.isoformat()}, not by "
            f"{home.folder}: {other_plan_remedy(home, other, 'replay')}"
        )
    return merged_rows(dataset, home.run_id, but_by=[home.run_id, run_id])


def _pruned(store: Store, home: Plan) -> list[str]:
    """Folders of the run and its replays, in this order, that were pruned and not published since."""
    folders = [home.folder, *(note.folder for note in replays_of(store, RunLayout(home.folder)))]
    layouts = map(RunLayout, folders)
    return [x.folder for x in layouts if store.exists(x.pruned) and not store.exists(x.merge)]


def _overridden(spec: JobSpec, overrides: Mapping[str, Any]) -> JobSpec:
    """The job with some fields changed. Raises `SpecError`.

    Unchanged, it is what the run was planned with: new refusals would strand a replay that is half paid.
    """
    for name in overrides:
        if name in FIXED_FIELDS:
            raise SpecError(f"{name}: a replay cannot change it, the run's rows and tables rest on it")
    data = spec.dump() | {"pilot": None, "gate": {}, "judge": None, "export": [], "incremental": False}
    return JobSpec.parse(merged(data, overrides), stored=not overrides)
