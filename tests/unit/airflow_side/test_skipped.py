"""A pipeline in a DAG of somebody's whose branch does not take it."""

import re
from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import IncompleteRunError

pytestmark = pytest.mark.airflow_env

FIELDS = {
    "name": "tickets",
    "input": {"path": "t.jsonl"},
    "prompt": {"template": "{{ text }}"},
    "model": {"name": "m"},
    "pilot": {"rows": 20},
    "store": "/s",
}
SKIPPED = {"before": "success", **dict.fromkeys(["llm.split", "llm.pilot", "llm.judge_pilot"], "skipped")}
SKIPPED["llm.infer"] = "skipped"


@pytest.fixture
def dag():
    from airflow.providers.standard.operators.empty import EmptyOperator
    from airflow.sdk import DAG

    from airflow_batchinfer.dag import batch_inference

    with DAG("mine") as mine:
        EmptyOperator(task_id="before") >> batch_inference(FIELDS, group_id="llm")
    return mine


def outcome(dag, task_id, states):
    """How the task ends when split left no plan and the tasks of the run have these states."""

    def get_task_states(dag_id, task_ids, run_ids):
        return {"r": {key: s for key, s in states.items() if re.sub(r"_\d+$", "", key) in task_ids}}

    ti = SimpleNamespace(
        dag_id="mine", run_id="r", xcom_pull=lambda **_: None, get_task_states=get_task_states
    )
    try:
        dag.get_task(task_id).execute({"ti": ti, "dag": dag})
    except Exception as error:
        return type(error).__name__
    return "success"


def test_it_is_skipped_whole(dag):
    states = dict(SKIPPED)
    for task in ("reconcile", "report", "gate"):  # those with the rule `all_done`
        assert outcome(dag, f"llm.{task}", states) == "AirflowSkipException"
        states |= dict.fromkeys([f"llm.{task}", "llm.validate", "llm.merge"], "skipped")
    assert outcome(dag, "llm.judge_pilot", SKIPPED) == "AirflowSkipException"  # `none_failed`


@pytest.mark.parametrize(
    "states",
    [
        {"llm.split": "upstream_failed"},
        {"llm.split": "failed"},
        {"llm.split": "success"},
        {"llm.pilot": "success"},
        {"llm.infer_3": "success"},
        {"llm.infer_3": "failed"},
    ],
    ids=str,
)
@pytest.mark.parametrize("task", ["reconcile", "report", "gate"])
def test_but_not_if_any_of_it_ran(dag, task, states):
    """Whoever forges split's state, or loses its XCom, does not make a run green that had work."""
    assert outcome(dag, f"llm.{task}", SKIPPED | states) == IncompleteRunError.__name__
