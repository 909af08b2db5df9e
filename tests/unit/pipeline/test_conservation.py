"""Every row has one outcome, its own columns and the right answer, against a plain oracle."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.store import LocalStore
from tests.unit.pipeline.runs import (
    commit_run,
    frozen_copies,
    frozen_rows,
    job,
    publish_run,
    table_rows,
    write_input,
)

pytestmark = pytest.mark.airflow_env

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
ROW = st.fixed_dictionaries(
    {
        "text": st.one_of(st.none(), st.sampled_from(["", "same", "x" * 600]), TEXT),
        "number": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "tags": st.one_of(st.none(), st.lists(st.one_of(st.none(), TEXT), max_size=3)),
        "carried": st.one_of(st.none(), TEXT),
    }
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("carried", pa.dictionary(pa.int32(), pa.string())),
    ]
)
REASONS = st.one_of(st.none(), st.none(), st.sampled_from(list(Reason)))
SLOW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def key_of(row: dict[str, Any]) -> str:
    return json.dumps([row["text"], row["number"], row["tags"]])


@SLOW
@given(
    rows=st.lists(ROW, min_size=1, max_size=40),
    files=st.integers(1, 3),
    max_rows=st.integers(1, 20),
    dedup=st.booleans(),
    overlap=st.integers(0, 2),
    reasons=st.lists(REASONS, min_size=40, max_size=40),
)
def test_whole_run(
    rows: list[dict[str, Any]],
    files: int,
    max_rows: int,
    dedup: bool,
    overlap: int,
    reasons: list[Reason | None],
) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        store = LocalStore(folder / "store")
        step = -(-len(rows) // files)
        for first in range(0, len(rows), step):
            table = pa.Table.from_pylist(rows[first : first + step], schema=SCHEMA)
            write_input(folder, table, f"{first:04d}.parquet")
        spec = job(
            folder,
            input={"path": str(folder / "in"), "carry": ["carried", "tags"]},
            prompt={"template": "{{ text }}{{ number }}{{ tags }}"},
            sharding={"max_rows": max_rows, "dedup": dedup},
            failure={"max_dead_fraction": 1.0},
            export=[{"format": "parquet", "path": str(folder / "out.parquet")}],
        )
        plan = split(store, spec, "run")

        # Split: each row in exactly one place; the same prompt sent once.
        sent, copies = frozen_rows(store, plan), frozen_copies(store, plan)
        ids = [r["row_id"] for r in [*sent, *copies]]
        assert sorted(ids) == list(range(len(rows)))
        assert len(sent) == (len({key_of(r) for r in rows}) if dedup else len(rows))
        assert max(s.sent for s in plan.shards) <= max_rows
        for row in sent:
            assert row["input"] == {k: rows[row["row_id"]][k] for k in ("text", "number", "tags")}

        # Reconcile: what the oracle counts.
        first_of: dict[str, int] = {}
        for row_id, row in enumerate(rows):
            first_of.setdefault(key_of(row) if dedup else str(row_id), row_id)
        asked = [first_of[key_of(row) if dedup else str(row_id)] for row_id, row in enumerate(rows)]
        commit_run(store, plan, overlap=overlap, dead=lambda i: reasons[i], parts=3)
        ledger = reconcile(store, plan.folder)
        outcomes = [outcome_of(reasons[i]).value for i in asked]
        assert {k: n for k, n in ledger.counts.items() if n} == {o: outcomes.count(o) for o in set(outcomes)}
        assert sum(ledger.counts.values()) == ledger.rows == len(rows)
        assert ledger.dedup_rows == len(rows) - len(sent)
        assert ledger.dedup_tokens == 7 * (len(rows) - len(sent))

        # Merge: each row's own columns and its own answer, or its letter; the export in input order.
        assert reconcile(store, plan.folder) == ledger
        merge(store, plan.folder)
        good = [i for i in range(len(rows)) if reasons[asked[i]] is None]
        results = table_rows(store, "job/results")
        assert [r["row_id"] for r in results] == good
        for result in results:
            row = rows[result["row_id"]]
            assert (result["carried"], result["tags"]) == (row["carried"], row["tags"])
            frozen = {k: rows[asked[result["row_id"]]][k] for k in ("text", "number", "tags")}
            assert result["output"] == f"answer to {frozen}"
        letters = table_rows(store, "dead_letters")
        assert [x["row_id"] for x in letters] == [i for i in range(len(rows)) if i not in set(good)]
        for letter in letters:
            row = rows[letter["row_id"]]
            assert json.loads(letter["input"]) == {k: row[k] for k in ("text", "number", "tags")}
            assert letter["reason"] == reasons[asked[letter["row_id"]]]
        exported = pq.read_table(folder / "out.parquet")
        assert exported["row_id"].to_pylist() == good
        assert exported.schema.field("carried").type == SCHEMA.field("carried").type
        assert standing_of(store, plan).rows == len(rows)


def test_many_batches_and_files(tmp_path: Path) -> None:
    """More rows than one batch, one row group or one bucket of the export holds."""
    store = LocalStore(tmp_path / "store")
    count = 150_000
    numbers = pa.array(range(count))
    table = pa.table({"text": [f"text {i % 100_000}" for i in range(count)], "n": numbers})
    for index, first in enumerate(range(0, count, 70_000)):
        write_input(tmp_path, table.slice(first, 70_000), f"{index}.parquet")
    given_ = {"path": str(tmp_path / "in"), "carry": ["n"]}
    export = [{"format": "parquet", "path": str(tmp_path / "out.parquet")}]
    plan = split(store, job(tmp_path, input=given_, export=export), "run")
    assert sum(s.sent for s in plan.shards) == 100_000
    publish_run(store, plan)
    out = pq.read_table(tmp_path / "out.parquet", columns=["row_id", "n", "output"])
    assert out["row_id"].to_pylist() == out["n"].to_pylist() == list(range(count))
    assert out["output"][120_000].as_py() == "answer to {'text': 'text 20000'}"
