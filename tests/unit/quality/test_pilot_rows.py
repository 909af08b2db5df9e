"""The pilot's rows, as split draws them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from airflow_batchinfer.errors import InputError, PlanChangedError, SpecError
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import LocalStore

pytestmark = pytest.mark.airflow_env


@pytest.fixture
def job(tmp_path: Path) -> dict[str, Any]:
    draw = random.Random(0)
    texts = ["word " * int(draw.lognormvariate(3, 1)) + str(i % 800) for i in range(1000)]
    pq.write_table(pa.table({"text": sorted(texts)}), tmp_path / "in.parquet")
    return {
        "name": "job",
        "input": {"path": str(tmp_path / "in.parquet")},
        "prompt": {"template": "{{ text }}"},
        "model": {"name": "m"},
        "store": str(tmp_path / "store"),
        "pilot": {"rows": 50},
        "sharding": {"max_rows": 200},
    }


def plan_of(job: dict[str, Any], run_id: str = "r") -> Plan:
    return split(LocalStore(job["store"]), JobSpec.parse(job), run_id)


@pytest.mark.parametrize("dedup", [True, False])
def test_pilot_is_shard_0_and_nothing_is_lost(job: dict[str, Any], dedup: bool) -> None:
    plan = plan_of({**job, "sharding": {"max_rows": 200, "dedup": dedup}})
    assert [s.pilot for s in plan.shards] == [True] + [False] * (len(plan.shards) - 1)
    assert plan.shards[0].sent == 50
    assert plan.rows == 1000
    store = Path(job["store"])
    ids: list[int] = []
    for shard in plan.shards:
        for key in filter(None, (shard.rows_key, shard.copies_key)):
            ids += pq.read_table(store / key)["row_id"].to_pylist()
    assert sorted(ids) == list(range(1000))


def test_pilot_represents_the_lengths(job: dict[str, Any]) -> None:
    plan = plan_of(job)
    pilot, whole = plan.shards[0], sum(s.predicted_tokens for s in plan.shards)
    share = pilot.sent / sum(s.sent for s in plan.shards)
    assert pilot.predicted_tokens == pytest.approx(whole * share, rel=0.05)


def test_draw_is_seeded(job: dict[str, Any]) -> None:
    def pilot_rows(plan: Plan) -> list[int]:
        rows: list[int] = pq.read_table(Path(job["store"]) / plan.shards[0].rows_key)["row_id"].to_pylist()
        return rows

    first = pilot_rows(plan_of(job, "one"))
    assert pilot_rows(plan_of(job, "two")) == first
    assert pilot_rows(plan_of({**job, "pilot": {"rows": 50, "seed": 1}}, "three")) != first


def test_small_input_has_no_pilot_and_says_so(job: dict[str, Any]) -> None:
    plan = plan_of({**job, "pilot": {"rows": 1000}})
    assert not any(s.pilot for s in plan.shards)
    assert "the pilot would be the whole run" in plan.warnings[0]


def test_pilot_counts_as_one_of_the_shards(job: dict[str, Any]) -> None:
    plan = plan_of({**job, "sharding": {"max_rows": 10, "max_shards": 4}})
    assert len(plan.shards) == 4


def test_a_pilot_added_later_changes_the_plan(job: dict[str, Any]) -> None:
    plan_of({**job, "pilot": None})
    with pytest.raises(PlanChangedError, match="pilot"):
        plan_of(job)


def test_split_refuses_wrong_expectations(job: dict[str, Any]) -> None:
    with pytest.raises(SpecError, match=r"validation\.expectations\.0\.type"):
        plan_of({**job, "validation": {"expectations": [{"type": "expect_wonders", "kwargs": {}}]}})
    assert not Path(job["store"]).exists()


@pytest.mark.parametrize("dedup", [True, False])
def test_strata_get_their_share(job: dict[str, Any], tmp_path: Path, dedup: bool) -> None:
    # One language in ten rows, and only among the shortest: lengths alone would miss it now and then.
    languages = ["de" if i % 10 == 0 else "en" for i in range(1000)]
    texts = [f"kurz {i}" if language == "de" else f"long {i} " * 20 for i, language in enumerate(languages)]
    pq.write_table(pa.table({"text": texts, "language": languages}), tmp_path / "in.parquet")
    plan = plan_of({**job, "pilot": {"rows": 50, "stratify": ["language"]}, "sharding": {"dedup": dedup}})
    rows = pq.read_table(Path(job["store"]) / plan.shards[0].rows_key)["row_id"].to_pylist()
    assert sum(languages[row] == "de" for row in rows) == 5
    assert plan.rows == 1000


def test_unknown_stratum_is_refused(job: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=r"pilot\.stratify.*nowhere"):
        plan_of({**job, "pilot": {"rows": 50, "stratify": ["nowhere"]}})
