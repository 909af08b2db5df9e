import datetime
import subprocess
import sys

import pytest

from airflow_batchinfer.errors import (
    GateError,
    IncompleteRunError,
    SpecError,
    StaleLedgerError,
    StoreError,
)

pytestmark = pytest.mark.airflow_env

JUDGE = {
    "prompt": {"template": "Is {{ output }} right for {{ text }}?"},
    "task": {"type": "choice", "labels": ["yes", "no"]},
    "passing": ["yes"],
}
HOUR = datetime.timedelta(hours=1)
FIELDS = {
    "name": "tickets",
    "input": {"path": "t.jsonl"},
    "prompt": {"template": "{{ text }}"},
    "model": {"name": "m"},
    "sharding": {"max_parallel_shards": 3},
    "store": "/s",
}


@pytest.fixture
def build():
    from airflow_batchinfer.dag import batch_inference

    return batch_inference


def test_order_and_trigger_rules(build):
    """A red pipeline must not end green: the leaf runs whatever happened, and fails (facts A1, A2, A6)."""
    dag = build(FIELDS)
    assert dag.dag_id == "tickets"
    assert [
        (t.task_id, sorted(t.upstream_task_ids), t.trigger_rule.value) for t in dag.topological_sort()
    ] == [
        ("split", [], "all_success"),
        ("infer", ["split"], "all_success"),
        ("reconcile", ["infer"], "all_done"),
        ("validate", ["reconcile"], "all_success"),
        ("merge", ["validate"], "all_success"),
        ("report", ["merge"], "all_done"),
        ("gate", ["report"], "all_done"),
    ]
    assert [t.task_id for t in dag.leaves] == ["gate"]


def test_the_pilot_comes_before_the_fleet(build):
    for dag in (build({**FIELDS, "pilot": {"rows": 20}}), build(FIELDS, dag_id="d", pilot=True)):
        tasks = {t.task_id: (sorted(t.upstream_task_ids), t.trigger_rule.value) for t in dag.tasks}
        assert tasks["pilot"] == (["split"], "all_success")
        # A plan may turn out to have no pilot: then `pilot` maps over nothing and is skipped.
        assert tasks["judge_pilot"] == (["pilot"], "none_failed")
        assert tasks["infer"] == (["judge_pilot"], "all_success")


def test_the_judge_comes_before_validation(build):
    for dag in (build({**FIELDS, "judge": JUDGE}), build(FIELDS, dag_id="d", judge=True)):
        tasks = {t.task_id: (sorted(t.upstream_task_ids), t.trigger_rule.value) for t in dag.tasks}
        assert tasks["prepare_judge"] == (["reconcile"], "all_success")
        assert tasks["judge"] == (["prepare_judge"], "all_success")
        # A job may turn out to have no judge: then `judge` maps over nothing and is skipped.
        assert tasks["validate"] == (["judge"], "none_failed")
    assert not {"judge", "prepare_judge"} & {t.task_id for t in build(FIELDS).tasks}


def test_nothing_of_ours_is_templated(build):
    """Airflow renders XCom values that reach a templated field (fact A9)."""
    for task in build({**FIELDS, "pilot": {"rows": 20}, "judge": JUDGE}).tasks:
        assert tuple(task.template_fields) == (), task.task_id


def test_parallelism_pool_and_retries_reach_the_infer_task(build):
    infer = build(FIELDS, pool="gpus", pool_slots=2, retries=5).get_task("infer")
    assert infer.partial_kwargs["max_active_tis_per_dagrun"] == 3
    assert (infer.partial_kwargs["pool"], infer.partial_kwargs["pool_slots"]) == ("gpus", 2)
    assert infer.partial_kwargs["retries"] == 5
    assert (
        build(FIELDS, max_parallel_shards=7).get_task("infer").partial_kwargs["max_active_tis_per_dagrun"]
        == 7
    )


def test_the_plan_says_how_many_shards_the_dag_runs_at_once(build):
    """The forecast counts with the plan's number."""
    for dag in (build(FIELDS, max_parallel_shards=7), build(lambda params: None, dag_id="d")):
        at_once = dag.get_task("infer").partial_kwargs["max_active_tis_per_dagrun"]
        assert dag.get_task("split").max_parallel_shards == at_once


def test_a_cleared_run_takes_the_mended_dag(build):
    """From a Git bundle Airflow would run it as it was, and "mend the spec, clear split" would do nothing."""
    from airflow_batchinfer.dag import replay_dead_letters

    assert build(FIELDS).rerun_with_latest_version is True
    assert build(FIELDS, rerun_with_latest_version=False).rerun_with_latest_version is False
    assert replay_dead_letters().rerun_with_latest_version is True


def test_how_a_person_is_asked(build):
    wait = datetime.timedelta(hours=4)
    dag = build({**FIELDS, "pilot": {"rows": 20}}, approval_arguments={"response_timeout": wait})
    assert dag.get_task("judge_pilot").response_timeout == wait
    with pytest.raises(ValueError, match="there is no pilot to approve"):
        build(FIELDS, approval_arguments={"response_timeout": wait})


def test_a_persons_time_is_not_that_of_a_task(build):
    dag = build({**FIELDS, "pilot": {"rows": 20}}, default_args={"execution_timeout": HOUR})
    assert dag.get_task("judge_pilot").response_timeout is None
    assert dag.get_task("merge").execution_timeout == HOUR


def test_a_replays_form_names_the_store():
    from airflow_batchinfer.dag import replay_dead_letters

    options = {"region": "eu-central-1"}
    params = replay_dead_letters(job="tickets", store="s3://bucket/batch", storage_options=options).params
    assert (params["store"], params["storage_options"]) == ("s3://bucket/batch", options)


def test_every_task_survives_an_outage_and_none_repeats_a_verdict(build):
    """A store that is away for a minute, or a lost worker of Airflow's, must not end a complete run red."""
    from airflow.sdk import RetryAction

    dag = build({**FIELDS, "pilot": {"rows": 20}, "judge": JUDGE}, retries=4)
    for task in dag.tasks:
        settings = getattr(task, "partial_kwargs", None) or vars(task)
        assert settings["retries"] == 4, task.task_id
        decide = settings["retry_policy"].evaluate
        assert decide(StoreError("throttled"), 1, 5).action == RetryAction.RETRY, task.task_id
        for verdict in (IncompleteRunError, StaleLedgerError, GateError):
            assert decide(verdict("no"), 1, 5).action == RetryAction.FAIL, task.task_id


def test_task_group_in_somebodys_dag(build):
    from airflow.sdk import DAG

    with DAG("mine") as dag:
        group = build(FIELDS, group_id="llm")
    assert group.group_id == "llm"
    assert {t.task_id for t in dag.tasks} >= {"llm.split", "llm.infer", "llm.gate"}
    assert dag.get_task("llm.gate").split_task_id == "llm.split"


def test_two_jobs_in_one_dag(build):
    from airflow.sdk import DAG, TaskGroup

    with DAG("mine") as dag:
        first = build(FIELDS, group_id="first")
        with TaskGroup("outer"):
            first >> build({**FIELDS, "name": "other"}, group_id="second")
    assert dag.get_task("first.gate").downstream_task_ids == {"outer.second.split"}
    for group in ("first", "outer.second"):
        assert dag.get_task(f"{group}.gate").split_task_id == f"{group}.split"
        assert dag.get_task(f"{group}.infer").upstream_task_ids == {f"{group}.split"}


def test_default_args_place_the_tasks_and_leave_the_trigger_rules(build):
    """A DAG's default rule `all_done` would have merge publish, and infer run, what did not pass."""
    from airflow.sdk import DAG

    job = {**FIELDS, "pilot": {"rows": 20}, "judge": JUDGE}
    defaults = {"pool": "cpu", "queue": "batch", "owner": "ada", "trigger_rule": "all_done"}
    with DAG("mine", default_args=defaults) as dag:
        build(job, group_id="llm", pool="gpus")
    plain = build(job)
    for task in dag.tasks:
        name = task.task_id.removeprefix("llm.")
        assert (task.queue, task.owner) == ("batch", "ada"), name
        assert task.pool == ("gpus" if name in ("pilot", "infer", "judge") else "cpu"), name
        if name != "split":
            assert task.trigger_rule == plain.get_task(name).trigger_rule, name


def test_infer_arguments_win(build):
    arguments = {"retries": 9, "pool": "large", "queue": "gpu"}
    infer = build(FIELDS, pool="gpus", infer_arguments=arguments).get_task("infer").partial_kwargs
    assert {name: infer[name] for name in arguments} == arguments


def test_a_mapped_task_group_is_refused(build):
    """Airflow maps no task within a mapped group; the file's import error says so."""
    from airflow.sdk import DAG, task_group

    @task_group
    def each(name):
        build(FIELDS, group_id="llm")

    with DAG("mine"), pytest.raises(NotImplementedError, match="expansion in an expanded task group"):
        each.expand(name=["a", "b"])


def test_arguments_that_do_not_fit(build):
    from airflow.sdk import DAG

    with DAG("mine"), pytest.raises(ValueError, match="no DAG arguments: schedule"):
        build(FIELDS, group_id="llm", schedule="@daily")
    with pytest.raises(ValueError, match="give `dag_id`"):
        build(lambda params: None)
    with pytest.raises(ValueError, match="unknown runtime 'slurm'"):
        build(FIELDS, runtime="slurm")
    with pytest.raises(SpecError, match="did you mean `prompt`"):
        build(FIELDS | {"promt": {}})


def test_a_spec_file_beside_the_dag_is_not_where_airflow_runs(build, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError, match=r"write Path\(__file__\).parent / 'tickets.yaml'"):
        build("tickets.yaml")


def test_pods_need_an_image(build):
    """Kubernetes refuses a pod without one only when split has read all input."""
    from airflow.sdk import DAG

    with pytest.raises(ValueError, match="the pods have no image"):
        build(FIELDS, runtime="kubernetes")
    build(FIELDS, runtime="kubernetes", infer_arguments={"image": "worker"})
    build(FIELDS, runtime="kubernetes", infer_arguments={"pod_template_file": "/pod.yaml"})
    build(FIELDS, runtime="kubernetes", default_args={"image": "worker"})
    with DAG("mine", default_args={"image": "worker"}):
        build(FIELDS, runtime="kubernetes", group_id="llm")


def test_default_args_reach_the_pods(build):
    """The operator's own defaults do not hide them."""
    from airflow.sdk import DAG

    defaults = {"image": "worker", "startup_timeout_seconds": 7200, "deferrable": False}
    with DAG("mine", default_args=defaults) as dag:
        build(FIELDS, runtime="kubernetes", group_id="llm", infer_arguments={"poll_interval": 3})
    pod = dag.get_task("llm.infer").unmap({"bundle": {}})
    assert (pod.image, pod.startup_timeout_seconds, pod.deferrable) == ("worker", 7200, False)
    assert (pod.poll_interval, pod.schedule_timeout_seconds, pod.do_xcom_push) == (3, 6 * 3600, False)


def test_conf_keys_are_checked():
    from airflow_batchinfer.operators.split import check_conf

    check_conf({"input": 1}, ["input", "model"])
    with pytest.raises(SpecError, match="unknown key `modle`; did you mean `model`") as caught:
        check_conf({"modle": "x", "input": 1}, ["input", "model"])
    assert "known keys: input, model" in str(caught.value)


def test_parsing_is_light():
    """The dag-processor parses the file every few seconds: no data or model library may come along."""
    code = (
        "import sys, airflow_batchinfer.dag as d, airflow_batchinfer.form\n"
        f"d.batch_inference({FIELDS!r})\n"
        "heavy = 'duckdb great_expectations deltalake pyarrow pandas vllm torch kubernetes boto3'.split()\n"
        "print(*[m for m in heavy if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1].strip() == ""
