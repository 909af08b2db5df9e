"""Standing: what has become of a run's rows by now, replays included; it adds up to the run's input."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

import numpy as np
import numpy.typing as npt
import pyarrow.dataset as ds
from pydantic import Field

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.pipeline.accounting import account_of
from airflow_batchinfer.pipeline.dead_letters import Status
from airflow_batchinfer.pipeline.results import planned_at
from airflow_batchinfer.pipeline.split import newest_plan
from airflow_batchinfer.pipeline.tables import dataset_of, open_table
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


class Standing(Document):
    """A published run's rows, counted in the tables. `succeeded + resolved + dead == rows`."""

    rows: int
    succeeded: int = Field(description="In the results by the run itself.")
    resolved: int = Field(description="In the results by replays.")
    dead: int = Field(description="Dead letters that are still open or were replayed in vain.")
    letters: dict[str, int] = Field(description="Dead letters by status.")


def standing_of(store: Store, plan: Plan) -> Standing:
    """Count a published run's rows in the tables, and hold the sums against its account.

    Raises:
        CorruptError: the tables and the account do not add up; says which sums differ. Or the run is
            published by another plan.
        FileNotFoundError: the run has no ledger.
    """
    ledger = Ledger.read(store, RunLayout(plan.folder).ledger)
    own, resolved = 0, 0
    key = results_table(plan.job)
    table = open_table(store, key)
    if table is not None:
        dataset = dataset_of(store, key, table)
        other = planned_otherwise(store, plan, dataset)
        if other is not None:
            raise CorruptError(
                f"run {plan.run_id!r} is published by another plan, made {other.isoformat()}, not by "
                f"{plan.folder}: {other_plan_remedy(plan, other, 'count')}"
            )
        here = (ds.field("run_id") == plan.run_id) & (ds.field("row_id") >= 0)
        by_run = ds.field("merged_by") == plan.run_id
        own = dataset.count_rows(filter=here & by_run) - (plan.kept.rows if plan.kept else 0)
        resolved = dataset.count_rows(filter=here & ~by_run)
    letters = _letters(store, plan)
    standing = Standing(
        rows=ledger.rows,
        succeeded=own,
        resolved=resolved,
        dead=sum(letters.values()) - letters.get(Status.RESOLVED, 0),
        letters=letters,
    )
    if standing.succeeded + standing.resolved + standing.dead != standing.rows:
        raise CorruptError(
            f"run {plan.run_id!r}: {standing.succeeded} succeeded, {standing.resolved} resolved and "
            f"{standing.dead} dead do not add up to {standing.rows} rows: clear merge"
        )
    # Not `succeeded`: a run that answers more when it runs again leaves the results what replays resolved.
    left = ledger.rows - account_of(store, plan.folder, ledger).succeeded
    if sum(letters.values()) != left:
        raise CorruptError(
            f"run {plan.run_id!r}: the dead-letter table has {sum(letters.values())} letters of the run, its "
            f"account {left}: clear merge"
        )
    return standing


def other_plan_remedy(plan: Plan, other: datetime, action: str) -> str:
    """What to do instead of the action on a run that is published by another plan, made at `other`."""
    if other > datetime.fromisoformat(plan.created_at):
        return f"{action} the run's newest generation"
    return f"it is not published yet: run its merge, then {action} it"


def planned_otherwise(store: Store, plan: Plan, dataset: ds.Dataset) -> datetime | None:
    """When the other plan was made by which a run is published; none if it is not, or by this plan.

    Args:
        store: the run's.
        plan: one generation's. Each generation has a plan of its own, and so has a run whose folder was
            deleted and which was split again.
        dataset: the results table.
    """
    other = ds.field("run_created_at") != planned_at(plan.created_at)
    rows = dataset.head(1, columns=["run_created_at"], filter=(ds.field("run_id") == plan.run_id) & other)
    if rows.num_rows:
        found: datetime = rows["run_created_at"][0].as_py()
        return found
    # A generation whose rows are all dead has none in the table.
    newest = newest_plan(store, plan.job, plan.run_id)
    if newest is None or newest.generation <= plan.generation:
        return None
    published = store.exists(RunLayout(newest.folder).merge)
    return datetime.fromisoformat(newest.created_at) if published else None


def merged_rows(
    dataset: ds.Dataset, run_id: str, *, but_by: Collection[str], among: npt.NDArray[np.int64] | None = None
) -> npt.NDArray[np.int64]:
    """Row ids of a run that are in the results.

    Args:
        dataset: the results table.
        run_id: the run.
        but_by: leave out what these runs merged: the run itself, or replays of it.
        among: only these rows; all by default.

    Returns:
        Sorted, each once: memory of their number.
    """
    where = (ds.field("run_id") == run_id) & ~ds.field("merged_by").isin(list(but_by))
    found = [np.empty(0, np.int64)]
    for batch in dataset.to_batches(columns=["row_id"], filter=where):
        ids = batch.column("row_id").to_numpy()
        found.append(ids if among is None else ids[np.isin(ids, among)])
    return np.unique(np.concatenate(found))


def _letters(store: Store, plan: Plan) -> dict[str, int]:
    table = open_table(store, DEAD_LETTERS)
    if table is None:
        return {}
    dataset = dataset_of(store, DEAD_LETTERS, table)
    here = (ds.field("job") == plan.job) & (ds.field("run_id") == plan.run_id)
    counts = {s.value: dataset.count_rows(filter=here & (ds.field("status") == s.value)) for s in Status}
    return {status: count for status, count in counts.items() if count}
