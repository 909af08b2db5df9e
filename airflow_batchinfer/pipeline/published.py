"""Which runs of a job were published last: what the next run is compared with."""

from __future__ import annotations

import logging

from pydantic import Field

from airflow_batchinfer.errors import UnreadableError
from airflow_batchinfer.run.document import Document, Timestamp
from airflow_batchinfer.run.layout import published_runs
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store

log = logging.getLogger(__name__)

_KEPT = 20


class PublishedRun(Document):
    """One run that was merged into the results table."""

    folder: str
    run_id: str
    created_at: Timestamp = Field(description="When its plan was made, ISO 8601.")


class PublishedRuns(Document):
    """The last published runs of a job, by the time of their plans."""

    runs: list[PublishedRun] = Field(default_factory=list)


def remember_published(store: Store, plan: Plan) -> None:
    """Note that a run was published; noting it again changes nothing. Raises `StoreError`.

    A run that answered only a part of its input, what changed since the last one or what died, is no measure
    for others, and is not noted.
    Two runs of one job that publish at the same moment may lose one note; only drift reads them.
    """
    if not plan.answers_whole_input:
        return
    own = PublishedRun(folder=plan.folder, run_id=plan.run_id, created_at=plan.created_at)
    others = [run for run in _read(store, plan.job).runs if run.folder != plan.folder]
    runs = sorted([*others, own], key=lambda run: run.created_at)[-_KEPT:]
    PublishedRuns(runs=runs).write(store, published_runs(plan.job))


def last_published(store: Store, plan: Plan) -> PublishedRun | None:
    """The newest published run of the same job that was planned before this one, or none."""
    before = [
        run
        for run in _read(store, plan.job).runs
        if run.folder != plan.folder and run.created_at <= plan.created_at
    ]
    return before[-1] if before else None


def _read(store: Store, job: str) -> PublishedRuns:
    try:
        return PublishedRuns.find(store, published_runs(job)) or PublishedRuns()
    except UnreadableError as error:  # only a comparison depends on it
        log.warning("drift starts anew: %s", error)
        return PublishedRuns()
