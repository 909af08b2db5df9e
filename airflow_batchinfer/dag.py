"""`batch_inference()`: the whole pipeline from a job spec, as a DAG or as a task group in yours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, overload

from airflow.sdk import DAG, BaseOperator, TaskGroup, TriggerRule, chain

from airflow_batchinfer.operators.bundle import LABEL_VARIABLE
from airflow_batchinfer.operators.gate import GateOperator
from airflow_batchinfer.operators.job import SpecSource, load_job
from airflow_batchinfer.operators.judge import PrepareJudgeOperator
from airflow_batchinfer.operators.merge import MergeOperator
from airflow_batchinfer.operators.pilot import JudgePilotOperator
from airflow_batchinfer.operators.reconcile import ReconcileOperator
from airflow_batchinfer.operators.replay import PrepareReplayOperator, replay_params
from airflow_batchinfer.operators.report import ReportOperator
from airflow_batchinfer.operators.retry import FailureRetryPolicy
from airflow_batchinfer.operators.split import SplitOperator
from airflow_batchinfer.operators.validate import ValidateOperator
from airflow_batchinfer.spec import JobSpec, ShardingSpec

Runtime = Literal["local", "kubernetes"]
"""Where workers run: a process beside Airflow's task, or a pod each."""

_CLEARED_AS_MENDED: dict[str, Any] = {"rerun_with_latest_version": True}
"""A cleared run keeps its version of the DAG's bundle (Git), unless the DAG says otherwise: mending the spec
and clearing `split` would do nothing. That old and new do not mix is the plan's to see, not the bundle's."""

_NAME_THE_IMAGE = frozenset({"image", "pod_template_file", "pod_template_dict", "full_pod_spec"})


@dataclass(frozen=True, kw_only=True)
class PipelineOptions:
    """How Airflow runs a pipeline, whatever the job."""

    runtime: Runtime = "local"
    max_parallel_shards: int | None = None
    """Infer tasks at once in one run, whatever the spec says; default: its `sharding.max_parallel_shards`."""
    pool: str | None = None
    """Airflow pool of the infer tasks, for instance with one slot a GPU. It must exist."""
    pool_slots: int = 1
    """Slots that one infer task takes in the pool."""
    retries: int = 2
    """Retries of each task, after a failure that may pass; whatever the DAG's `default_args` say."""
    retry_delay: timedelta = timedelta(seconds=30)
    """Wait before the first retry; each next wait is twice as long."""
    store_conn_id: str | None = None
    """AWS connection to reach an `s3://` store with; default: boto3's own chain."""
    pilot: bool | None = None
    """Run the job's pilot before the fleet, and judge it; default: if the spec has one."""
    judge: bool | None = None
    """Run the job's judge before validation; default: if the spec has one."""
    approval_arguments: Mapping[str, Any] = field(default_factory=dict)
    """Of the request for a person's approval: `response_timeout`, `notifiers`, `assigned_users`."""
    infer_arguments: Mapping[str, Any] = field(default_factory=dict)
    """More arguments of the infer operator: `worker_env`, `queue`, `execution_timeout` and so on. They win
    over `pool`, `retries` and the like."""

    def parallel_shards(self, job: JobSpec | None) -> int:
        """Infer tasks at once in one run of a job, which is none if it is known only when the run starts."""
        return self.max_parallel_shards or (job.sharding if job else ShardingSpec()).max_parallel_shards


@overload
def batch_inference(spec: SpecSource, *, group_id: str, **arguments: Any) -> TaskGroup: ...
@overload
def batch_inference(spec: SpecSource, *, group_id: None = None, **arguments: Any) -> DAG: ...
def batch_inference(
    spec: SpecSource,
    *,
    dag_id: str | None = None,
    group_id: str | None = None,
    runtime: Runtime = "local",
    max_parallel_shards: int | None = None,
    pool: str | None = None,
    pool_slots: int = 1,
    retries: int = 2,
    retry_delay: timedelta = timedelta(seconds=30),
    store_conn_id: str | None = None,
    pilot: bool | None = None,
    judge: bool | None = None,
    approval_arguments: Mapping[str, Any] | None = None,
    infer_arguments: Mapping[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG | TaskGroup:
    """Build split → infer (mapped) → reconcile → validate → merge → report → gate.

    With a pilot, split → pilot → judge_pilot come before infer. With a judge, prepare_judge → judge
    (mapped) come before validate.

    With `group_id` it is a task group in the DAG whose context is open; else a DAG of its own.

    Args:
        spec: a `JobSpec`, the path of a spec file, its fields, or a function that returns a `JobSpec`, of
            the run's params (for a form) and, by name, of Airflow's context (for a date).
        dag_id: default: the job's name. Needed if `spec` is a function.
        group_id: id of the task group.
        runtime: see `Runtime`.
        max_parallel_shards: see `PipelineOptions`; so are the next nine.
        pool: Airflow pool of the infer tasks.
        pool_slots: slots that one infer task takes.
        retries: retries of a task after a failure that may pass.
        retry_delay: wait before the first retry.
        store_conn_id: AWS connection of an `s3://` store.
        pilot: run a pilot first. Needed if `spec` is a function: a spec without a pilot then passes.
        judge: have a sample judged. Needed if `spec` is a function: a spec without a judge then passes.
        approval_arguments: arguments of the pilot's request for approval.
        infer_arguments: more arguments of the infer operator.
        dag_arguments: arguments of `airflow.sdk.DAG`: `schedule`, `params`, `tags` and so on.

    Raises:
        SpecError: the spec is not valid (Airflow shows it as the file's import error).
        ValueError: `dag_id` is missing, DAG arguments were given for a task group, arguments of an approval
            without a pilot, or the pods have no image.
    """
    options = PipelineOptions(
        runtime=runtime,
        max_parallel_shards=max_parallel_shards,
        pool=pool,
        pool_slots=pool_slots,
        retries=retries,
        retry_delay=retry_delay,
        store_conn_id=store_conn_id,
        pilot=pilot,
        judge=judge,
        approval_arguments=approval_arguments or {},
        infer_arguments=infer_arguments or {},
    )
    job = None if callable(spec) else load_job(spec, {})
    if group_id is not None:
        if dag_id is not None or dag_arguments:
            unfit = sorted([*dag_arguments, *(["dag_id"] if dag_id else [])])
            raise ValueError(f"a task group takes no DAG arguments: {', '.join(unfit)}")
        with TaskGroup(group_id=group_id) as group:
            _build_tasks(spec, job, options, refuse_unknown_conf=False)
        return group
    if dag_id is None:
        if job is None:
            raise ValueError("give `dag_id`: a function of the run's params names no job yet")
        dag_id = job.name
    with DAG(dag_id=dag_id, **_CLEARED_AS_MENDED | dag_arguments) as dag:
        _build_tasks(spec, job, options, refuse_unknown_conf=True)
    return dag


def replay_dead_letters(
    dag_id: str = "replay_dead_letters",
    *,
    job: str | None = None,
    store: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    runtime: Runtime = "local",
    max_parallel_shards: int | None = None,
    pool: str | None = None,
    pool_slots: int = 1,
    retries: int = 2,
    retry_delay: timedelta = timedelta(seconds=30),
    store_conn_id: str | None = None,
    infer_arguments: Mapping[str, Any] | None = None,
    **dag_arguments: Any,
) -> DAG:
    """Build prepare_replay → infer (mapped) → reconcile → validate → merge → report → gate.

    Its form names the run whose dead letters run again, and what to change, see `replay_params`.

    Args:
        dag_id: the DAG's id.
        job: the job's name, filled in.
        store: the store, filled in; default: `[batchinfer] store`.
        storage_options: of an `s3://` store, filled in.
        runtime: see `Runtime`.
        max_parallel_shards: see `PipelineOptions`; so are the next six.
        pool: Airflow pool of the infer tasks.
        pool_slots: slots that one infer task takes.
        retries: retries of a task after a failure that may pass.
        retry_delay: wait before the first retry.
        store_conn_id: AWS connection of an `s3://` store.
        infer_arguments: more arguments of the infer operator.
        dag_arguments: arguments of `airflow.sdk.DAG`.
    """
    options = PipelineOptions(
        runtime=runtime,
        max_parallel_shards=max_parallel_shards,
        pool=pool,
        pool_slots=pool_slots,
        retries=retries,
        retry_delay=retry_delay,
        store_conn_id=store_conn_id,
        infer_arguments=infer_arguments or {},
    )
    dag_arguments = {"schedule": None, **_CLEARED_AS_MENDED, **dag_arguments}
    with DAG(dag_id=dag_id, params=replay_params(job, store, storage_options), **dag_arguments) as dag:
        prepare = PrepareReplayOperator(task_id="prepare_replay", **_patient(options))
        _build_rest(prepare, prepare, None, options)
    return dag


def _build_tasks(
    spec: SpecSource, job: JobSpec | None, options: PipelineOptions, *, refuse_unknown_conf: bool
) -> None:
    """Make the tasks in the open DAG or task group. The trigger rules carry promise 5: each task after split
    names its own, as `default_args` may hold another."""
    patient = _patient(options)
    pilot_first = options.pilot if options.pilot is not None else bool(job and job.pilot)
    if options.approval_arguments and not pilot_first:
        raise ValueError("`approval_arguments`: there is no pilot to approve; give the spec a `pilot`")
    split = SplitOperator(
        task_id="split",
        spec=spec,
        refuse_unknown_conf=refuse_unknown_conf,
        pilot_first=pilot_first,
        judged=_is_judged(job, options),
        max_parallel_shards=options.parallel_shards(job),
        doc_yaml=job.to_yaml() if job else None,
        **patient,
    )
    fleet: BaseOperator = split
    if pilot_first:
        pilot = _infer(options, job, "pilot", split, patient)
        fleet = JudgePilotOperator(
            task_id="judge_pilot",
            trigger_rule=TriggerRule.NONE_FAILED,
            split_task_id=split.task_id,
            **patient,
            **options.approval_arguments,
        )
        chain(pilot, fleet)
    _build_rest(split, fleet, job, options)


def _is_judged(job: JobSpec | None, options: PipelineOptions) -> bool:
    return options.judge if options.judge is not None else bool(job and job.judge)


def _patient(options: PipelineOptions) -> dict[str, Any]:
    """Arguments of all tasks: who reaches the store, and how they are tried again."""
    return {
        "store_conn_id": options.store_conn_id,
        "retries": options.retries,
        "retry_delay": options.retry_delay,
        "retry_exponential_backoff": 2.0,
        "retry_policy": FailureRetryPolicy(),
    }


def _build_rest(
    planner: BaseOperator, fleet: BaseOperator, job: JobSpec | None, options: PipelineOptions
) -> None:
    """Make the tasks from infer on.

    Args:
        planner: the task that plans the run.
        fleet: the task that returns the bundles to infer.
        job: the job, if it is known yet.
        options: see `PipelineOptions`.
    """
    patient = _patient(options)
    on_run = {"split_task_id": planner.task_id, **patient}
    infer = _infer(options, job, "infer", fleet, patient)
    reconcile = ReconcileOperator(task_id="reconcile", trigger_rule=TriggerRule.ALL_DONE, **on_run)
    judge = _judge(planner, job, options)
    # The judge is skipped if the job turns out to have none.
    after_judge = TriggerRule.NONE_FAILED if judge else TriggerRule.ALL_SUCCESS
    validate = ValidateOperator(task_id="validate", trigger_rule=after_judge, **on_run)
    merge = MergeOperator(task_id="merge", trigger_rule=TriggerRule.ALL_SUCCESS, **on_run)
    report = ReportOperator(task_id="report", trigger_rule=TriggerRule.ALL_DONE, **on_run)
    gate = GateOperator(task_id="gate", trigger_rule=TriggerRule.ALL_DONE, **on_run)
    chain(infer, reconcile, *judge, validate, merge, report, gate)


def _judge(planner: BaseOperator, job: JobSpec | None, options: PipelineOptions) -> list[Any]:
    """The tasks of the judge, if there is one."""
    if not _is_judged(job, options):
        return []
    patient = _patient(options)
    prepare = PrepareJudgeOperator(
        task_id="prepare_judge",
        trigger_rule=TriggerRule.ALL_SUCCESS,
        split_task_id=planner.task_id,
        **patient,
    )
    return [prepare, _infer(options, job, "judge", prepare, patient)]


def _infer(
    options: PipelineOptions,
    job: JobSpec | None,
    task_id: str,
    bundles: BaseOperator,
    patient: Mapping[str, Any],
) -> Any:
    """The mapped infer task over the bundles that another task returns."""
    pool = {"pool": options.pool, "pool_slots": options.pool_slots} if options.pool else {}
    infer = (
        _infer_operator(options.runtime)
        .partial(
            task_id=task_id,
            map_index_template=f"{{{{ {LABEL_VARIABLE} }}}}",
            trigger_rule=TriggerRule.ALL_SUCCESS,
            max_active_tis_per_dagrun=options.parallel_shards(job),
            **{**patient, **pool, **options.infer_arguments},
        )
        .expand(bundle=bundles.output)
    )
    if options.runtime == "kubernetes":
        _check_image(options, infer)
    return infer


def _check_image(options: PipelineOptions, infer: Any) -> None:
    """Kubernetes would say the same, but only once split has read all input."""
    given = {*options.infer_arguments, *infer.dag.default_args, *infer.task_group.default_args}
    if not given & _NAME_THE_IMAGE:
        raise ValueError(
            "`infer_arguments`: the pods have no image. Give `image` (REGISTRY/batchinfer-worker:TAG, say) "
            "or a pod template that names it; docs/kubernetes.md shows how to build it"
        )


def _infer_operator(runtime: Runtime) -> type[BaseOperator]:
    """The infer operator's class. Imported when asked for: the Kubernetes one is heavy to parse."""
    if runtime == "local":
        from airflow_batchinfer.operators.infer_local import InferLocalOperator

        return InferLocalOperator
    if runtime == "kubernetes":
        from airflow_batchinfer.operators.infer_kubernetes import BatchInferPodOperator

        return BatchInferPodOperator
    raise ValueError(f"unknown runtime {runtime!r}; use `local` or `kubernetes`")
