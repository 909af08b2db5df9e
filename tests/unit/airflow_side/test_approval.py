"""What a person's answer to the pilot's request does to its task."""

from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from uuid import UUID

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
TI, TI_CLEARED = UUID(int=1), UUID(int=2)
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


class Supervisor:
    """Puts requests through the API server's own function, on a database in memory."""

    def __init__(self):
        from airflow.models import import_all_models
        from airflow.models.base import Base
        from sqlalchemy import create_engine
        from sqlalchemy.orm import Session

        import_all_models()
        engine = create_engine("sqlite://")
        Base.metadata.create_all(engine)
        self.session, self.requests = Session(engine), Base.metadata.tables["hitl_detail"]

    def send(self, msg):
        from airflow.api_fastapi.execution_api.routes.hitl import upsert_hitl_detail
        from airflow.sdk.execution_time.comms import HITLDetailRequestResult

        answer = upsert_hitl_detail(msg.ti_id, msg, self.session)
        return HITLDetailRequestResult.model_validate_json(answer.model_dump_json())

    def shown(self):
        return self.session.execute(self.requests.select()).all()

    def clear_task(self):
        """A cleared task instance has a new id, and its request goes with it (`ON UPDATE CASCADE`)."""
        self.session.flush()
        self.session.execute(self.requests.update().values(ti_id=TI_CLEARED))
        self.session.expunge_all()


@pytest.fixture
def supervisor(monkeypatch):
    from airflow.sdk.execution_time import task_runner

    supervisor = Supervisor()
    monkeypatch.setattr(task_runner, "SUPERVISOR_COMMS", supervisor, raising=False)
    return supervisor


def judge(run, ti_id=TI, **arguments):
    """Execute `judge_pilot` of a run."""
    from airflow_batchinfer.operators.bundle import address_of
    from airflow_batchinfer.operators.pilot import JudgePilotOperator

    address = address_of(run.store, run.plan)
    ti = SimpleNamespace(id=ti_id, xcom_pull=lambda **_: address)
    task = JudgePilotOperator(task_id="judge_pilot", split_task_id="split", **arguments)
    return task.execute({"ti": ti, "task_instance": ti})


@pytest.mark.parametrize(("uncommitted", "asked"), [([1, 2], True), ([2], True), ([], False)])
def test_nobody_is_asked_once_all_is_paid(tmp_path, supervisor, uncommitted, asked):
    """`split` is cleared to publish again: with no time limit the request would wait for ever."""
    from airflow.sdk.exceptions import TaskAwaitingInput

    spec = make_spec(tmp_path, pilot={"rows": 10}, gate={"approval": "required"})
    run = make_run(tmp_path, tickets(30), spec=spec, pilot=True, uncommitted=uncommitted)

    if asked:
        with pytest.raises(TaskAwaitingInput):
            judge(run)
    else:
        assert [bundle["shards"] for bundle in judge(run)] == [[1], [2]]
    assert len(supervisor.shown()) == asked


def test_nobody_approves_the_figures_of_an_earlier_pilot(tmp_path, supervisor):
    """Airflow keeps the first request of a cleared task: `on_changed_spec: restart` makes another pilot."""
    from airflow.sdk.exceptions import TaskAwaitingInput

    spec = make_spec(tmp_path, pilot={"rows": 10}, gate={"approval": "required"})
    first = make_run(tmp_path / "first", tickets(30), spec=spec, pilot=True, uncommitted=[1, 2])
    second = make_run(tmp_path / "second", tickets(90), spec=spec, pilot=True, uncommitted=[1, 2])
    told = []
    with pytest.raises(TaskAwaitingInput):
        judge(first)
    supervisor.clear_task()
    with pytest.raises(TaskAwaitingInput):
        judge(first, TI_CLEARED)

    with pytest.raises(GateError, match=r"an earlier request with other figures.*set `gate.approval: none`"):
        judge(second, TI_CLEARED, notifiers=[told.append])
    assert told == [], "nobody is called to look at it"


def test_a_pilot_that_is_all_of_the_input_is_asked_about(tmp_path):
    """No fleet is left to pay, but its answers are to be published."""
    from airflow_batchinfer.operators.pilot import JudgePilotOperator

    spec = make_spec(tmp_path, pilot={"rows": 30}, gate={"approval": "required"})
    run = make_run(tmp_path, tickets(30), spec=spec, pilot=True, shards=1)
    task = JudgePilotOperator(task_id="judge_pilot", split_task_id="split")

    assert [shard.pilot for shard in run.plan.shards] == [True]
    assert task._is_anything_left_to_pay(run.store, run.plan.folder)
