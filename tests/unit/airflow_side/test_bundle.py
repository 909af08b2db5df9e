import pytest

from airflow_batchinfer.errors import WorkerLostError
from airflow_batchinfer.operators.bundle import LABEL_VARIABLE, bundles_of, label
from airflow_batchinfer.operators.task_label import labelled
from airflow_batchinfer.store import LocalStore
from tests.plans import job, plan_run

pytestmark = pytest.mark.airflow_env


def bundle(shards, rows, tokens):
    address = {"store": "/s", "storage_options": {}, "folder": "j/runs/r"}
    return {**address, "shards": shards, "rows": rows, "tokens": tokens}


@pytest.mark.parametrize(
    ("shards", "rows", "tokens", "text"),
    [
        ([3], 64, 38_000, "shard 0003 · 64 rows · 38k tokens"),
        ([0], 1, 950, "shard 0000 · 1 rows · 950 tokens"),
        ([1], 50_000, 1_234, "shard 0001 · 50,000 rows · 1.2k tokens"),
        ([4, 5, 6], 150_000, 19_900_000, "shards 0004-0006 · 150,000 rows · 20M tokens"),
    ],
)
def test_label(shards, rows, tokens, text):
    assert label(bundle(shards, rows, tokens)) == text


def test_a_pod_taken_up_that_has_ended_is_labelled_once():
    """It is judged at once, by the task's other entry, within the first."""
    context, work = {}, bundle([3], 64, 38_000)
    with pytest.raises(WorkerLostError), labelled(context, work), labelled(context, work):
        raise WorkerLostError("gone")
    assert context[LABEL_VARIABLE] == f"{label(work)} · worker lost"


def test_bundles_hold_every_shard_once(tmp_path):
    spec = job(tmp_path, sharding={"shards_per_task": 2})
    plan = plan_run(spec, [["a", "b"], ["c"], ["d", "e", "f"]])
    bundles = bundles_of(LocalStore(tmp_path), plan, max_tasks=1024)
    assert [(b["shards"], b["rows"]) for b in bundles] == [([0, 1], 3), ([2], 3)]
    assert all(b["store"] == str(tmp_path) and b["folder"] == plan.folder for b in bundles)


def test_never_more_bundles_than_airflow_maps(tmp_path):
    """Airflow fails split on a longer list, and an `all_done` leaf would end the run green (fact A6)."""
    plan = plan_run(job(tmp_path), [[str(i)] for i in range(25)])
    bundles = bundles_of(LocalStore(tmp_path), plan, max_tasks=10)
    assert len(bundles) <= 10
    assert [s for b in bundles for s in b["shards"]] == list(range(25))
