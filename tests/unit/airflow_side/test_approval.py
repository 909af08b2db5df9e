"""What a person's answer to the pilot's request does to its task."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import GateError
from tests.unit.quality.runs import make_run, make_spec, tickets

pytestmark = pytest.mark.airflow_env

REJECTED = {
    "chosen_options": ["Reject"],
    "params_input": {},
    "responded_at": datetime(2026, 1, 1, tzinfo=UTC),
    "responded_by_user": {"id": "7", "name": "Ada"},
}
UNANSWERED = {"error": "no response", "error_type": "timeout"}


@pytest.mark.parametrize(
    ("event", "message"),
    [
        (REJECTED, "Ada rejected the pilot"),
        (REJECTED | {"responded_by_user": None}, "somebody rejected the pilot"),
        (UNANSWERED, r"nobody answered within `response_timeout` \(2:00:00\)"),
    ],
)
def test_a_no_is_final(event, message):
    """A retry would ask again, and wait for an answer that has been given."""
    from airflow.sdk import RetryAction

    from airflow_batchinfer.operators.pilot import JudgePilotOperator

    task = JudgePilotOperator(
        task_id="judge_pilot", split_task_id="split", retries=2, response_timeout=timedelta(hours=2)
    )

    with pytest.raises(GateError, match=message) as refused:
        task.execute_complete({}, event)

    assert task.retry_policy.evaluate(refused.value, 1, 3).action == RetryAction.FAIL


@pytest.mark.parametrize(("uncommitted", "asked"), [([1, 2], True), ([2], True), ([], False)])
def test_nobody_is_asked_once_all_is_paid(tmp_path, monkeypatch, uncommitted, asked):
    """`split` is cleared to publish again: with no time limit the request would wait for ever."""
    from airflow.providers.standard.operators import hitl
    from airflow.sdk.exceptions import TaskAwaitingInput

    from airflow_batchinfer.operators.bundle import address_of
    from airflow_batchinfer.operators.pilot import JudgePilotOperator

    spec = make_spec(tmp_path, pilot={"rows": 10}, gate={"approval": "required"})
    run = make_run(tmp_path, tickets(30), spec=spec, pilot=True, uncommitted=uncommitted)
    address = address_of(run.store, run.plan)
    context = {
        "ti": SimpleNamespace(xcom_pull=lambda **_: address),
        "task_instance": SimpleNamespace(id="0"),
    }
    requests = []
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **request: requests.append(request))
    task = JudgePilotOperator(task_id="judge_pilot", split_task_id="split")

    if asked:
        with pytest.raises(TaskAwaitingInput):
            task.execute(context)
    else:
        assert [bundle["shards"] for bundle in task.execute(context)] == [[1], [2]]
    assert len(requests) == asked


def test_a_pilot_that_is_all_of_the_input_is_asked_about(tmp_path):
    """No fleet is left to pay, but its answers are to be published."""
    from airflow_batchinfer.operators.pilot import JudgePilotOperator

    spec = make_spec(tmp_path, pilot={"rows": 30}, gate={"approval": "required"})
    run = make_run(tmp_path, tickets(30), spec=spec, pilot=True, shards=1)
    task = JudgePilotOperator(task_id="judge_pilot", split_task_id="split")

    assert [shard.pilot for shard in run.plan.shards] == [True]
    assert task._is_anything_left_to_pay(run.store, run.plan.folder)
