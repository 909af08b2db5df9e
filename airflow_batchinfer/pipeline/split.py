"""Split: check the input, freeze its rows into shards, and write the plan.

The plan is written last, so a split that dies leaves nothing that a reader would take for a run. It is
written once: a second call returns it, or says what has changed in the job since.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from airflow_batchinfer.errors import CorruptError, InputError, PlanChangedError, SpecError
from airflow_batchinfer.pipeline.expectations import check_expectations
from airflow_batchinfer.pipeline.freeze import Frozen, freeze
from airflow_batchinfer.pipeline.increment import Increment
from airflow_batchinfer.pipeline.judging import check_judge
from airflow_batchinfer.pipeline.readers import open_input
from airflow_batchinfer.pipeline.results import check_result_columns, published_fields
from airflow_batchinfer.pipeline.scratch import scratch_folder
from airflow_batchinfer.pipeline.tables import check_table_types
from airflow_batchinfer.run.epoch import new_epoch
from airflow_batchinfer.run.fingerprint import changed_fields, fingerprint, fingerprint_fields
from airflow_batchinfer.run.layout import RunLayout, results_table, run_dir
from airflow_batchinfer.run.plan import Plan, ReplayOf
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store

_NEUTRAL = {
    "input": frozenset({"storage_options"}),
    "sharding": frozenset({"max_parallel_shards", "shards_per_task"}),
    "output": frozenset[str](),
}
"""Sections of a spec that decide rows, shards or columns, and their fields that do not."""


def split(store: Store, spec: JobSpec, run_id: str) -> Plan:
    """Make the run's plan, or return the one that is there.

    Raises:
        InputError: the input cannot be used; names file, line, column or rows, and the remedy.
        SpecError: the prompt, the judge or an expectation cannot work, or another run has the same folder
            name.
        PlanChangedError: a plan is there and the job has changed since in a field that decides the
            results or the shards; see `on_changed_spec`.
        CorruptError: a plan is there and its shards' files are not; see `on_changed_spec`.
        StoreError: the store cannot be written, the disk is full, or the results table has columns of
            other types.
    """
    plan, generation = existing_plan(store, spec, run_id)
    if plan is not None:
        return plan
    check_expectations(spec)
    check_judge(spec)
    layout, epoch = RunLayout(run_dir(spec.name, run_id, generation)), new_epoch()
    check_result_columns(spec)
    check_writable(store, layout, epoch)
    with scratch_folder("split") as scratch:
        reader = open_input(spec.input, scratch)
        check_table_types(store, results_table(spec.name), published_fields(spec, reader.schema))
        increment = Increment.since_last_published(store, spec, run_id) if spec.incremental else None
        frozen = freeze(store, spec, layout, epoch, reader, scratch, increment)
    return write_plan(store, spec, run_id, generation, epoch, frozen)


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


def newest_plan(store: Store, job: str, run_id: str) -> Plan | None:
    """The plan of a run's newest generation; none if there is none. Raises `CorruptError`."""
    generation = 0
    while store.exists(RunLayout(run_dir(job, run_id, generation + 1)).plan):
        generation += 1
    return load_plan(store, run_dir(job, run_id, generation)) if generation else None


def write_plan(
    store: Store,
    spec: JobSpec,
    run_id: str,
    generation: int,
    epoch: str,
    frozen: Frozen,
    *,
    replay_of: ReplayOf | None = None,
    warnings: Sequence[str] = (),
    folder: str | None = None,
) -> Plan:
    """Write the plan of frozen rows, unless another attempt was first: then that one holds.

    Args:
        store: the run's.
        spec: the job.
        run_id: the run.
        generation: which generation of the run.
        epoch: the attempt that froze the rows.
        frozen: the shards.
        replay_of: the run whose dead letters they are, if it is a replay.
        warnings: more of them, after those of freezing.
        folder: where; default: the run's own folder.
    """
    folder = folder or run_dir(spec.name, run_id, generation)
    layout = RunLayout(folder)
    if store.exists(layout.plan):
        return load_plan(store, folder)
    plan = Plan(
        job=spec.name,
        run_id=run_id,
        generation=generation,
        folder=folder,
        created_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
        epoch=epoch,
        fingerprint=fingerprint(spec),
        spec=spec,
        input=frozen.snapshot,
        shards=frozen.shards,
        warnings=[*frozen.warnings, *warnings],
        kept=frozen.kept,
        changes=frozen.changes or {},
        replay_of=replay_of,
    )
    plan.write(store, layout.plan)
    return plan


def check_writable(store: Store, layout: RunLayout, epoch: str) -> None:
    """Fail before hours of reading if nothing can be written. Raises `StoreError`."""
    key = f"{layout.folder}/.writable-{epoch}"
    store.write_bytes(key, b"")
    store.delete(key)


def deciding_fields(spec: JobSpec) -> dict[str, Any]:
    """The fields on which a plan rests, by path: what decides outputs, rows, shards and columns."""
    data = spec.dump()
    fields = fingerprint_fields(spec)
    for section, neutral in _NEUTRAL.items():
        fields |= {f"{section}.{k}": v for k, v in data[section].items() if k not in neutral}
    return fields | {"incremental": spec.incremental, "pilot": data["pilot"]}


def existing_plan(
    store: Store, spec: JobSpec, run_id: str, replay_of: ReplayOf | None = None
) -> tuple[Plan | None, int]:
    """The newest generation's plan if it still holds; else none, and the generation to make.

    Args:
        store: the run's.
        spec: the job.
        run_id: the run.
        replay_of: the dead letters that the run is to send; none: the job's input.

    Raises:
        SpecError, PlanChangedError, CorruptError: as `split`.
    """
    plan = newest_plan(store, spec.name, run_id)
    if plan is None:
        return None, 1
    if plan.run_id != run_id:
        raise SpecError(
            f"the folder {store.uri_of(plan.folder)} belongs to the run {plan.run_id!r}, not {run_id!r}: "
            "their names are the same but for special characters; choose another run id"
        )
    if (plan.replay_of is None) != (replay_of is None):
        there, wanted = ("run", "replay") if replay_of else ("replay", "run")
        raise PlanChangedError(
            f"{run_id!r} is a {there} of job {spec.name!r}, and a {wanted} cannot have the same id: choose "
            "another one (DAGs with the same schedule have the same run ids: move one of them by a minute)"
        )
    restart = spec.on_changed_spec == "restart"
    changed = changed_fields(deciding_fields(plan.spec), deciding_fields(spec))
    damage = _missing_file(store, plan)
    if restart and (changed or damage):
        return None, plan.generation + 1
    if changed:
        raise PlanChangedError(
            f"run {run_id!r} of job {spec.name!r} has a plan, and the job has changed since in "
            f"{', '.join(changed)}: start a new run, undo the change, or set `on_changed_spec: restart` to "
            "begin this run anew (the old generation stays on disk)"
        )
    if damage:
        raise CorruptError(
            f"{damage}: put it back, start a new run, or set `on_changed_spec: restart` to begin this run "
            "anew"
        )
    if plan.replay_of != replay_of:
        raise PlanChangedError(
            f"run {run_id!r} of job {spec.name!r} has a plan for other rows: start a new replay"
        )
    if plan.spec != spec:
        # What decides neither rows nor outputs (tolerances, retries, checks, exports) is adopted.
        plan = plan.model_copy(update={"spec": spec})
        plan.write(store, RunLayout(plan.folder).plan)
    return plan, plan.generation


def _missing_file(store: Store, plan: Plan) -> str | None:
    """The first of the shards' files that is gone or has another size, with what is wrong."""
    sizes = {info.key: info.size for info in store.list(f"{plan.folder}/shards") if "-" in info.key}
    for shard in plan.shards:
        size = sizes.get(shard.rows_key)
        if size is None or (shard.copies_key and shard.copies_key not in sizes):
            return f"{store.uri_of(shard.rows_key if size is None else shard.copies_key or '')} is missing"
        if size != shard.rows_bytes:
            return f"{store.uri_of(shard.rows_key)} has {size} bytes, the plan says {shard.rows_bytes}"
    return None
