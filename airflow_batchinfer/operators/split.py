"""`SplitOperator`: plan a run, and hand its shards to the mapped task."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import conf

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.base import RUN_XCOM_KEY, BatchInferOperator
from airflow_batchinfer.operators.bundle import Bundle, address_of, bundles_of
from airflow_batchinfer.operators.job import SpecSource, load_job
from airflow_batchinfer.spec import MAX_MAPPED_TASKS
from airflow_batchinfer.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import Context


class SplitOperator(BatchInferOperator):
    """Read the input once, write the run's plan and shards, return one bundle a mapped task.

    Clearing it gives the same plan again, or an error that names what changed in the spec.

    Args:
        spec: the job, see `SpecSource`.
        refuse_unknown_conf: fail on keys in the run's conf that are no params of the DAG. Airflow
            takes them silently, so a mistyped key would run with the default.
    """

    def __init__(self, *, spec: SpecSource, refuse_unknown_conf: bool = False, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.refuse_unknown_conf = refuse_unknown_conf

    def execute(self, context: Context) -> list[Bundle]:
        """Plan the run. Raises `SpecError`, `InputError`, `StoreError`."""
        from airflow_batchinfer.pipeline.split import split

        if self.refuse_unknown_conf:
            check_conf(context["dag_run"].conf or {}, context["dag"].params)
        job = load_job(self.spec, context["params"])
        self.use_store_connection()
        store = open_store(job.store, job.storage_options)
        plan = split(store, job, context["run_id"])
        for warning in plan.warnings:
            self.log.warning(warning)
        bundles = bundles_of(store, plan, _max_mapped_tasks())
        self.log.info(
            "%s rows in %d shards, %d mapped tasks; plan: %s",
            f"{plan.rows:,}",
            len(plan.shards),
            len(bundles),
            store.uri_of(plan.folder),
        )
        context["ti"].xcom_push(key=RUN_XCOM_KEY, value=address_of(store, plan))
        return bundles


def check_conf(run_conf: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys of a run's conf that are no params. Raises `SpecError` with the nearest names."""
    lines = []
    for key in run_conf:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            lines.append(f"conf: unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else ""))
    if lines:
        raise SpecError("\n".join([*lines, f"known keys: {', '.join(sorted(known))}"]))


def _max_mapped_tasks() -> int:
    """Airflow fails a task that returns a longer list to map over."""
    return min(MAX_MAPPED_TASKS, conf.getint("core", "max_map_length", fallback=MAX_MAPPED_TASKS))
