"""Every row has one outcome, its own columns and the right answer, against a plain oracle."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import tempfile
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.store import LocalStore
from tests.unit.fuzz.damage import fuzzed
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
SENT_TEXT = st.one_of(st.sampled_from(["", "same", "x" * 600]), TEXT)
ROW = st.fixed_dictionaries(
    {
        "text": st.one_of(st.none(), SENT_TEXT),
        "number": st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1)),
        "tags": st.one_of(st.none(), st.lists(st.one_of(st.none(), TEXT), max_size=3)),
        "real": st.one_of(st.none(), st.sampled_from([0.0, -0.0, math.nan, math.inf]), st.floats()),
        "deep": st.one_of(
            st.none(), st.fixed_dictionaries({"a": st.integers(0, 2), "b": st.lists(TEXT, max_size=2)})
        ),
        "carried": st.one_of(st.none(), TEXT),
        "price": st.one_of(st.none(), st.decimals(-(10**6), 10**6, places=2)),
        "at": st.one_of(st.none(), st.datetimes(datetime(1700, 1, 1), timezones=st.just(UTC))),
        "day": st.one_of(st.none(), st.dates()),
    }
)
SCHEMA = pa.schema(
    [
        ("text", pa.string()),
        ("number", pa.int64()),
        ("tags", pa.list_(pa.string())),
        ("real", pa.float64()),
        ("deep", pa.struct([("a", pa.int16()), ("b", pa.list_(pa.large_string()))])),
        ("carried", pa.dictionary(pa.int32(), pa.string())),
        ("price", pa.decimal128(9, 2)),
        ("at", pa.timestamp("us", "UTC")),
        ("day", pa.date32()),
    ]
)
ASKED = ("text", "number", "tags", "real", "deep")
"""Columns that the prompt reads."""
CARRIED = ("carried", "tags", "real", "deep", "price", "at", "day")
TEXT_ROW = st.fixed_dictionaries({"text": SENT_TEXT, "carried": TEXT})
REASONS = st.one_of(st.none(), st.none(), st.sampled_from(list(Reason)))
SHAPE = {
    "files": st.integers(1, 3),
    "max_rows": st.integers(1, 20),
    "dedup": st.booleans(),
    "overlap": st.integers(0, 2),
    "reasons": st.lists(REASONS, min_size=40, max_size=40),
}


def same(value: Any) -> Any:
    """A value as it can be compared, and written: NaN is itself, the zeros are two, names have an order."""
    match value:
        case dict():
            return {name: same(inner) for name, inner in sorted(value.items())}
        case list():
            return [same(inner) for inner in value]
        case float() | Decimal():
            return str(value)
        case datetime():
            return value.astimezone(UTC).isoformat()
    return value


def chosen(row: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    return {name: same(row[name]) for name in sorted(names)}


@fuzzed(25)
@given(rows=st.lists(ROW, min_size=1, max_size=40), **SHAPE)
def test_whole_run(rows: list[dict[str, Any]], files: int, **how: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        for number, some in enumerate(batched(rows, files)):
            table = pa.Table.from_pylist(some, schema=SCHEMA)
            write_input(Path(name), table, f"{number:04d}.parquet")
        check_whole_run(Path(name), rows, asked=ASKED, carry=CARRIED, **how)
        exported = pq.read_schema(Path(name) / "out.parquet")
        assert [exported.field(column).type for column in CARRIED] == [SCHEMA.field(c).type for c in CARRIED]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "jsonl.gz"])
@fuzzed(10)
@given(rows=st.lists(TEXT_ROW, min_size=1, max_size=40), **SHAPE)
def test_whole_run_over_text_files(kind: str, rows: list[dict[str, Any]], files: int, **how: Any) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "in").mkdir()
        for number, some in enumerate(batched(rows, files)):
            text = io.StringIO()
            if kind == "csv":
                lines = [("text", "carried"), *((row["text"], row["carried"]) for row in some)]
                csv.writer(text, quoting=csv.QUOTE_ALL).writerows(lines)
            else:
                text.writelines(json.dumps(row) + "\n" for row in some)
            data = text.getvalue().encode()
            path = Path(name) / "in" / f"{number:04d}.{kind}"
            path.write_bytes(gzip.compress(data) if kind.endswith(".gz") else data)
        check_whole_run(Path(name), rows, asked=("text",), carry=("carried",), **how)


def batched(rows: Sequence[dict[str, Any]], files: int) -> Iterator[list[dict[str, Any]]]:
    """The rows in order, as about so many files hold them."""
    step = -(-len(rows) // files)
    for first in range(0, len(rows), step):
        yield list(rows[first : first + step])


def check_whole_run(
    folder: Path,
    rows: list[dict[str, Any]],
    *,
    asked: Sequence[str],
    carry: Sequence[str],
    max_rows: int,
    dedup: bool,
    overlap: int,
    reasons: list[Reason | None],
) -> None:
    """Run the input in `folder/in` from split to merge, and hold each step against `rows`.

    Args:
        folder: the test's own.
        rows: what the input's files hold, in order.
        asked: columns that the prompt reads.
        carry: columns to carry along.
        max_rows: of a shard.
        dedup: whether the same prompt is sent once.
        overlap: rows of a part that stand in the next one too.
        reasons: by row id, why a row dies.
    """
    store = LocalStore(folder / "store")
    spec = job(
        folder,
        input={"path": str(folder / "in"), "carry": list(carry)},
        prompt={"template": "".join(f"{{{{ {name} }}}}" for name in asked)},
        sharding={"max_rows": max_rows, "dedup": dedup},
        failure={"max_dead_fraction": 1.0},
        export=[{"format": "parquet", "path": str(folder / "out.parquet")}],
    )
    plan = split(store, spec, "run")

    # Split: each row in exactly one place; the same prompt sent once.
    def key_of(row_id: int) -> str:
        return json.dumps(chosen(rows[row_id], asked)) if dedup else str(row_id)

    sent, copies = frozen_rows(store, plan), frozen_copies(store, plan)
    ids = [r["row_id"] for r in [*sent, *copies]]
    assert sorted(ids) == list(range(len(rows)))
    assert len(sent) == len({key_of(i) for i in ids})
    assert max(s.sent for s in plan.shards) <= max_rows
    for row in sent:
        assert same(row["input"]) == chosen(rows[row["row_id"]], asked)

    # Reconcile: what the oracle counts.
    first_of: dict[str, int] = {}
    for row_id in range(len(rows)):
        first_of.setdefault(key_of(row_id), row_id)
    sent_for = [first_of[key_of(row_id)] for row_id in range(len(rows))]
    commit_run(
        store,
        plan,
        overlap=overlap,
        dead=lambda i: reasons[i],
        parts=3,
        answer=lambda row: f"answer to {same(row['input'])}",
    )
    ledger = reconcile(store, plan.folder)
    outcomes = [outcome_of(reasons[i]).value for i in sent_for]
    assert {k: n for k, n in ledger.counts.items() if n} == {o: outcomes.count(o) for o in set(outcomes)}
    assert sum(ledger.counts.values()) == ledger.rows == len(rows)
    assert ledger.dedup_rows == len(rows) - len(sent)
    assert ledger.dedup_tokens == 7 * (len(rows) - len(sent))

    # Merge: each row's own columns and its own answer, or its letter; the export in input order.
    assert reconcile(store, plan.folder) == ledger
    merge(store, plan.folder)
    good = [i for i in range(len(rows)) if reasons[sent_for[i]] is None]
    results = table_rows(store, "job/results")
    assert [r["row_id"] for r in results] == good
    for result in results:
        assert chosen(result, carry) == chosen(rows[result["row_id"]], carry)
        assert result["output"] == f"answer to {chosen(rows[result['row_id']], asked)}"
    letters = table_rows(store, "dead_letters")
    assert [x["row_id"] for x in letters] == [i for i in range(len(rows)) if i not in set(good)]
    for letter in letters:
        row = rows[letter["row_id"]]
        assert same(json.loads(letter["input"])) == chosen(row, asked)
        assert letter["reason"] == reasons[sent_for[letter["row_id"]]]
    exported = pq.read_table(folder / "out.parquet").to_pylist()
    assert [row["row_id"] for row in exported] == good
    for row in exported:
        assert chosen(row, carry) == chosen(rows[row["row_id"]], carry)
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
