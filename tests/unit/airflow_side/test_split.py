from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.split import SplitOperator
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
