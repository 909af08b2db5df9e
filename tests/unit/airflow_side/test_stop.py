from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import InputError, SpecError
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.stop import read_stop
from airflow_batchinfer.store import LocalStore

pytestmark = pytest.mark.airflow_env

FOLDER = "job/runs/r"
CONTEXT = {"ti": SimpleNamespace(task_id="brake", dag_id="watch")}


def test_brake_is_pulled_and_released(tmp_path):
    from airflow_batchinfer.operators.stop import ResumeRunOperator, StopRunOperator

    where = {"store": str(tmp_path), "folder": FOLDER}
    store = LocalStore(tmp_path)
    pull = StopRunOperator(task_id="stop", reason="the price doubled", **where)
    with pytest.raises(InputError, match="is no run"):
        pull.execute(CONTEXT)
    store.write_bytes(RunLayout(FOLDER).plan, b"{}")
    pull.execute(CONTEXT)
    stop = read_stop(store, FOLDER)
    assert (stop.by, stop.reason) == ("task brake of DAG watch", "the price doubled")
    release = ResumeRunOperator(task_id="resume", **where)
    assert release.execute(CONTEXT) is True
    assert release.execute(CONTEXT) is False
    assert read_stop(store, FOLDER) is None


def test_the_store_is_the_configured_one_unless_named(tmp_path, monkeypatch):
    from airflow_batchinfer.operators.stop import StopRunOperator

    pull = StopRunOperator(task_id="stop", reason="x", folder=FOLDER)
    with pytest.raises(SpecError, match=r"name it, or set `\[batchinfer\] store`"):
        pull.execute(CONTEXT)
    LocalStore(tmp_path).write_bytes(RunLayout(FOLDER).plan, b"{}")
    monkeypatch.setenv("AIRFLOW__BATCHINFER__STORE", str(tmp_path))
    pull.execute(CONTEXT)
    assert read_stop(LocalStore(tmp_path), FOLDER) is not None


def test_the_run_may_be_found_at_run_time(tmp_path):
    from airflow_batchinfer.operators.stop import StopRunOperator

    pull = StopRunOperator(
        task_id="stop", store=str(tmp_path), folder="{{ params.folder }}", reason="{{ not rendered }}"
    )
    pull.render_template_fields({"params": {"folder": FOLDER}})
    assert (pull.folder, pull.reason) == (FOLDER, "{{ not rendered }}")
