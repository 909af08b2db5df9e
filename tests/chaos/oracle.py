"""The oracle: it reads the store and nothing else, and counts with plain Python."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store


@dataclass(frozen=True)
class Account:
    """What became of a run's rows.

    Attributes:
        lost: input rows in neither table. doubled: rows in the tables more than once.
        paid_twice: answers paid for rows that were durable already.
        dead: rows in the dead-letter table, by reason.
    """

    lost: int
    doubled: int
    paid_twice: int
    dead: dict[str, int]


def account(store: Store, plan: Plan, paid_twice: int) -> Account:
    """Reconcile and merge, then count every input row in the two tables."""
    from airflow_batchinfer.pipeline.merge import merge
    from airflow_batchinfer.pipeline.reconcile import reconcile

    reconcile(store, plan.folder)
    merge(store, plan.folder)
    return tables(store, plan, paid_twice)


def tables(store: Store, plan: Plan, paid_twice: int = 0) -> Account:
    """Count every input row in the tables as they are."""
    from airflow_batchinfer.pipeline.tables import dataset_of, open_table

    seen: Counter[int] = Counter()
    dead: Counter[str] = Counter()
    for key in (results_table(plan.job), DEAD_LETTERS):
        opened = open_table(store, key)
        if opened is None:
            continue
        table = dataset_of(store, key, opened).to_table()
        if key == DEAD_LETTERS:
            table = table.filter(pc.not_equal(table["status"], "resolved"))  # those stand in the results
            dead.update(table.column("reason").to_pylist())
        seen.update(table.column("row_id").to_pylist())
    rows = range(plan.input.rows)
    assert set(seen) <= set(rows), f"rows that were never in the input: {sorted(set(seen) - set(rows))}"
    return Account(
        lost=sum(1 for row in rows if not seen[row]),
        doubled=sum(1 for row in rows if seen[row] > 1),
        paid_twice=paid_twice,
        dead=dict(dead),
    )


def durable_rows(store: Store, layout: RunLayout, shard: int) -> set[int]:
    """Rows that stand in a readable part of any attempt."""
    found: set[int] = set()
    for info in store.list(layout.shard(shard)):
        if "/part-" in info.key:
            try:
                table = pq.read_table(io.BytesIO(store.read_bytes(info.key)), columns=["row_id"])
                found.update(table.column(0).to_pylist())
            except (pa.ArrowException, OSError):
                continue
    return found
