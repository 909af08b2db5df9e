"""`SplitOperator`: plan a run, and hand its shards to the mapped task."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.base import RUN_XCOM_KEY, BatchInferOperator
from airflow_batchinfer.operators.bundle import Bundle, address_of, bundles_of, max_mapped_tasks
from airflow_batchinfer.operators.job import SpecSource, load_job
from airflow_batchinfer.store import open_store

if TYPE_CHECKING:
    from airflow.sdk import Context

    from airflow_batchinfer.spec import JobSpec


class SplitOperator(BatchInferOperator):
    """Read the input once, write the run's plan and shards, return one bundle a mapped task.

    Clearing it gives the same plan again, or an error that names what changed in the spec.

    Args:
        spec: the job, see `SpecSource`.
        refuse_unknown_conf: fail on keys in the run's conf that are no params of the DAG. Airflow
            takes them silently, so a mistyped key would run with the default.
        pilot_first: return the pilot's bundle only (none if the plan has no pilot); `JudgePilotOperator`
            returns the others.
        judged: the DAG has the tasks of a judge.
        max_parallel_shards: how many infer tasks the DAG runs at once. It takes the place of the spec's
            `sharding.max_parallel_shards`, so that the plan says, and the forecast counts with, what is so.
            None leaves the spec's.
    """

    def __init__(
        self,
        *,
        spec: SpecSource,
        refuse_unknown_conf: bool = False,
        pilot_first: bool = False,
        judged: bool = False,
        max_parallel_shards: int | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.spec = spec
        self.pilot_first = pilot_first
        self.judged = judged
        self.max_parallel_shards = max_parallel_shards
        self.refuse_unknown_conf = refuse_unknown_conf

    def execute(self, context: Context) -> list[Bundle]:
        """Plan the run. Raises `SpecError`, `InputError`, `StoreError`."""
        from airflow_batchinfer.pipeline.split import split

        if self.refuse_unknown_conf:
            check_conf(context["dag_run"].conf or {}, context["dag"].params)
        job = load_job(self.spec, context)
        if job.pilot is not None and not self.pilot_first:
            raise SpecError(
                "pilot: the job asks for one, and this DAG has no task to judge it; build it with "
                "`batch_inference(..., pilot=True)`, or take `pilot` out of the spec"
            )
        if job.judge is not None and not self.judged:
            raise SpecError(
                "judge: the job asks for one, and this DAG has no task for it; build it with "
                "`batch_inference(..., judge=True)`, or take `judge` out of the spec"
            )
        self.use_store_connection()
        store = open_store(job.store, job.storage_options)
        plan = split(store, self._as_run_here(job), context["run_id"])
        for warning in plan.warnings:
            self.log.warning(warning)
        chosen = [s for s in plan.shards if s.pilot] if self.pilot_first else plan.shards
        bundles = bundles_of(store, plan, max_mapped_tasks(), chosen)
        self.log.info(
            "%s rows in %d shard(s)%s; plan: %s",
            f"{plan.rows:,}",
            len(plan.shards),
            f", the pilot's {chosen[0].rows:,} rows first" if self.pilot_first and chosen else "",
            store.uri_of(plan.folder),
        )
        context["ti"].xcom_push(key=RUN_XCOM_KEY, value=address_of(store, plan))
        return bundles

    def _as_run_here(self, job: JobSpec) -> JobSpec:
        """The job with the DAG's own `max_parallel_shards`, which was fixed when the DAG was parsed."""
        asked = job.sharding.max_parallel_shards
        if self.max_parallel_shards in (None, asked):
            return job
        if "max_parallel_shards" in job.sharding.model_fields_set:
            self.log.warning(
                "the spec's sharding.max_parallel_shards=%d does not count: the DAG runs %d at once, as "
                "`batch_inference(..., max_parallel_shards=%d)` says",
                asked,
                self.max_parallel_shards,
                self.max_parallel_shards,
            )
        sharding = job.sharding.model_copy(update={"max_parallel_shards": self.max_parallel_shards})
        return job.model_copy(update={"sharding": sharding})


def check_conf(run_conf: Mapping[str, Any], known: Collection[str]) -> None:
    """Refuse keys of a run's conf that are no params. Raises `SpecError` with the nearest names."""
    lines = []
    for key in run_conf:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            lines.append(f"conf: unknown key `{key}`" + (f"; did you mean `{close[0]}`?" if close else ""))
    if lines:
        raise SpecError("\n".join([*lines, f"known keys: {', '.join(sorted(known))}"]))
