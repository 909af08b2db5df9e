"""Pruning: take old runs out of the results table and the dead-letter table.

Each published run stands in the results with all its rows, an incremental one with those that it kept as
well, so the table grows by a copy of the input a night. A pruned run is as one that was never published: its
folder stays, its merge may be run again, and until then no replay of it can be planned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any

import pyarrow as pa
import pyarrow.dataset as ds
from pydantic import Field

from airflow_batchinfer.errors import CorruptError, SpecError
from airflow_batchinfer.pipeline.results import runs_in
from airflow_batchinfer.pipeline.tables import dataset_of, delete_rows, open_table
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.status import plan_objects
from airflow_batchinfer.store import Store

_FIELDS = ("run_id", "kept", "replay_of")
"""Of a plan, all that pruning looks at: its shards, of each run of a job, would be a lot of memory."""


class Pruned(Document):
    """What was taken out of the tables, or would be."""

    runs: list[str] = Field(default_factory=list, description="Run ids, oldest first.")
    results: int = Field(0, description="Rows of the results table.")
    dead_letters: int = Field(0, description="Rows of the dead-letter table.")
    held: dict[str, str] = Field(
        default_factory=dict, description="By run id, the run that still needs an old run's rows."
    )


def prune_tables(store: Store, job: str, keep_runs: int, *, dry_run: bool = False) -> Pruned:
    """Delete a job's runs, but the `keep_runs` that were planned last, from both tables.

    An old run stays as long as another needs its rows: an incremental one that keeps them, until it is old
    and published itself, as it may be merged again, or a replay that is not published yet. Files go when the
    tables are vacuumed. Killed half-way, it goes on when called again.

    Raises:
        SpecError: `keep_runs` is less than 1: the next night and drift need the newest run.
        StoreError: a table cannot be read or written.
    """
    if keep_runs < 1:
        raise SpecError(f"keep_runs: keep at least 1 run, the newest (got {keep_runs})")
    table = open_table(store, results_table(job))
    if table is None:
        return Pruned()
    plans = dict(_plans(store, job))
    published = list(runs_in(table))
    old = published[:-keep_runs]
    needed = _needed(store, plans, staying=published[-keep_runs:])
    runs = [run_id for run_id in old if run_id not in needed]
    theirs = ds.field("run_id").isin(pa.array(runs, pa.string()))
    pruned = Pruned(
        runs=runs,
        results=_count(store, results_table(job), theirs),
        dead_letters=_count(store, DEAD_LETTERS, (ds.field("job") == job) & theirs),
        held={run_id: needed[run_id] for run_id in old if run_id in needed},
    )
    if runs and not dry_run:
        _withdraw(store, plans, runs)
        delete_rows(store, DEAD_LETTERS, {"job": [job], "run_id": runs})
        delete_rows(store, results_table(job), {"run_id": runs})  # last: it says what is left to do
    return pruned


def _plans(store: Store, job: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Folders and parts of the plans of a job's runs, whichever release wrote them.

    Nobody can merge a damaged one.
    """
    for info in plan_objects(store, job):
        with suppress(FileNotFoundError, CorruptError):
            plan = Plan.read_fields(store, info.key)
            yield info.key.removesuffix("/plan.json"), {name: plan.get(name) for name in _FIELDS}


def _needed(store: Store, plans: dict[str, dict[str, Any]], staying: Sequence[str]) -> dict[str, str]:
    """Ids of runs whose rows another one may ask for, and that one's folder."""
    needed = {}
    for folder, plan in plans.items():
        kept, replay_of = plan.get("kept"), plan.get("replay_of")
        run_id = kept["prior_run_id"] if kept else replay_of["run_id"] if replay_of else None
        layout = RunLayout(folder)
        may_ask = plan["run_id"] in staying or not (store.exists(layout.merge) or store.exists(layout.pruned))
        if run_id and may_ask:
            needed[run_id] = folder
    return needed


def _withdraw(store: Store, plans: dict[str, dict[str, Any]], runs: list[str]) -> None:
    """Note of runs and their replays that they are published no more; what merge said stays for people."""
    for folder, plan in plans.items():
        layout = RunLayout(folder)
        home = plan.get("replay_of") or plan
        with suppress(FileNotFoundError):
            if home.get("run_id") in runs:
                store.write_bytes(layout.pruned, store.read_bytes(layout.merge))
                store.delete(layout.merge)


def _count(store: Store, key: str, where: ds.Expression) -> int:
    table = open_table(store, key)
    return 0 if table is None else int(dataset_of(store, key, table).count_rows(filter=where))
