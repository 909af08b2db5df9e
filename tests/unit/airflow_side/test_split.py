from types import SimpleNamespace

import pytest

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.operators.split import SplitOperator
from tests.plans import job

pytestmark = pytest.mark.airflow_env


def test_a_pilot_that_nobody_would_judge_is_refused(tmp_path):
    """Run as an ordinary shard it would let a broken job through unseen."""
    split = SplitOperator(task_id="split", spec=job(tmp_path, pilot={"rows": 5}))
    context = {"params": {}, "run_id": "r", "ti": SimpleNamespace()}
    with pytest.raises(SpecError, match="pilot=True"):
        split.execute(context)
    assert not any(tmp_path.iterdir()), "before anything is written"
