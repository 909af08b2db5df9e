"""What a person's answer to the pilot's request does to its task."""

from datetime import UTC, datetime, timedelta

import pytest

from airflow_batchinfer.errors import GateError

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
