import json
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.job import load_job
from airflow_batchinfer.operators.split import SplitOperator
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.store import LocalStore
from tests.plans import job

pytestmark = pytest.mark.airflow_env


def test_a_judge_that_the_dag_has_no_task_for_is_refused(tmp_path):
    judge = {
        "prompt": {"template": "{{ output }}?"},
        "task": {"type": "choice", "labels": ["yes", "no"]},
        "passing": ["yes"],
    }
    split = SplitOperator(task_id="split", spec=job(tmp_path, judge=judge))
    with pytest.raises(SpecError, match="judge=True"):
        split.execute({"params": {}, "run_id": "r", "ti": SimpleNamespace()})
    assert not any(tmp_path.iterdir()), "before anything is written"


def test_a_pilot_that_nobody_would_judge_is_refused(tmp_path):
    """Run as an ordinary shard it would let a broken job through unseen."""
    split = SplitOperator(task_id="split", spec=job(tmp_path, pilot={"rows": 5}))
    context = {"params": {}, "run_id": "r", "ti": SimpleNamespace()}
    with pytest.raises(SpecError, match="pilot=True"):
        split.execute(context)
    assert not any(tmp_path.iterdir()), "before anything is written"


def test_the_plan_has_the_dags_parallelism(tmp_path, capsys):
    """The spec's would be in the forecast, and count for nothing."""
    source = tmp_path / "rows.jsonl"
    source.write_text(json.dumps({"text": "a"}) + "\n", encoding="utf-8")
    store = tmp_path / "store"
    spec = job(store, input={"path": str(source)}, sharding={"max_parallel_shards": 2})
    pushed = {}
    ti = SimpleNamespace(xcom_push=lambda key, value: pushed.update({key: value}))
    context = {"params": {}, "run_id": "r", "ti": ti}
    SplitOperator(task_id="split", spec=spec, max_parallel_shards=16).execute(context)
    plan = load_plan(LocalStore(store), pushed["run"]["folder"])
    assert plan.spec.sharding.max_parallel_shards == 16
    assert "max_parallel_shards=2 does not count: the DAG runs 16 at once" in capsys.readouterr().out


class TestAFunctionAsSpec:
    DAY = datetime(2026, 3, 1, 2, tzinfo=UTC)

    def test_gets_the_params_and_what_it_names_of_the_context(self, tmp_path):
        def spec(params, logical_date, suffix="jsonl", *, run_id):
            path = f"{params['language']}/{logical_date:%Y-%m-%d}.{suffix}"
            return job(tmp_path, input={"path": path}, name=f"job-{run_id}")

        made = load_job(spec, {"params": {"language": "de"}, "logical_date": self.DAY, "run_id": "r"})
        assert (made.input.path, made.name) == ("de/2026-03-01.jsonl", "job-r")

    def test_without_a_date_says_what_is_missing(self, tmp_path):
        undated = {"params": {}, "run_id": "r"}
        with pytest.raises(SpecError, match=r"asks for logical_date, .* without a logical date"):
            load_job(lambda params, logical_date: job(tmp_path), undated)
        assert load_job(lambda params, logical_date=None: job(tmp_path), undated)
