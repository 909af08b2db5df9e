"""Kept rows: results of the last published run that an incremental run takes over."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds

from airflow_batchinfer.errors import CorruptError
from airflow_batchinfer.pipeline.answers import positions, struct_field
from airflow_batchinfer.pipeline.buckets import Buckets, side_by_side
from airflow_batchinfer.pipeline.increment import PRIOR_ROW_ID, REMOVED, UNCHANGED
from airflow_batchinfer.pipeline.results import ResultColumns, planned_at
from airflow_batchinfer.pipeline.tables import rows_where
from airflow_batchinfer.run.layout import results_table
from airflow_batchinfer.run.parquet import batch_rows, open_parquet
from airflow_batchinfer.run.plan import KeptRows, Plan
from airflow_batchinfer.run.shard import CHANGE, DIGEST
from airflow_batchinfer.store import Store


def kept_results(
    store: Store,
    plan: Plan,
    columns: ResultColumns,
    dataset: ds.Dataset | None,
    scratch: Path,
    *,
    exact: bool,
) -> Iterator[pa.RecordBatch]:
    """Rows of the results table for the plan's kept and removed rows.

    The prior run's results and the list of kept rows are brought together out of core, bucket by bucket
    of the prior row id.

    Raises:
        CorruptError: a result that was there when the run was split is gone, or has no answer.
    """
    kept = plan.kept
    if kept is None or not kept.rows + kept.removed:
        return
    gone = (
        f"the results of run {kept.prior_run_id!r} as they were when this run was split are gone from "
        f"{store.uri_of(results_table(plan.job))}"
    )
    if dataset is None:
        raise CorruptError(f"{gone}: start a new run")
    lists = _kept_lists(store, kept, scratch)
    priors = _prior_results(dataset, kept, scratch)
    for wanted, prior in side_by_side([lists, priors]):
        at, found = positions(prior["row_id"].to_numpy(), wanted[PRIOR_ROW_ID].to_numpy())
        if not found.all():
            raise CorruptError(f"{gone} in part ({(~found).sum()} rows): start a new run")
        for batch in _joined(plan, columns, wanted, prior.take(pa.array(at)), exact=exact):
            if batch.num_rows:
                yield batch


def _joined(
    plan: Plan, columns: ResultColumns, wanted: pa.Table, prior: pa.Table, *, exact: bool
) -> Iterator[pa.RecordBatch]:
    """Result rows of one bucket: those still in the input, then those that are gone."""
    kept, column = plan.kept, plan.spec.output.column
    assert kept is not None
    renamed = {
        f.name: (kept.prior_output or column) + f.name.removeprefix(column) for f in columns.outputs.fields
    }
    # The output's last column is text or a vector, and every answered row has it; a struct may be null.
    answer = columns.outputs.fields[-1].name
    gone = pc.less(wanted["row_id"], 0).combine_chunks()
    for removed in (False, True):
        mask = gone if removed else pc.invert(gone)
        own, old = wanted.filter(mask).combine_chunks(), prior.filter(mask).combine_chunks()
        count = own.num_rows
        if not count:
            continue
        kinds = {f.name: f.type for f in columns.schema}
        values = {
            name: _column(old, renamed.get(name, name), kind)
            for name, kind in kinds.items()
            if name not in columns.own_names
        }
        values |= {"row_id": own["row_id"].combine_chunks(), "custom_id": own["custom_id"].combine_chunks()}
        values["copy_of"] = pa.nulls(count, pa.int64())
        values[CHANGE] = pa.repeat(REMOVED if removed else UNCHANGED, count)
        if not removed and len(columns.carried):
            carry = own["carry"].combine_chunks()
            values |= {columns.prefix + n: struct_field(carry, n) for n in columns.carried.names}
        if removed and plan.spec.removed_rows == "tombstone":
            values |= {f.name: pa.nulls(count, kinds[f.name]) for f in columns.outputs.fields}
            values[DIGEST] = pa.nulls(count, pa.string())
        elif unanswered := values[answer].null_count:
            raise CorruptError(
                f"{unanswered} rows that were to keep the answer of run {kept.prior_run_id!r} have none in "
                f"`{renamed[answer]}`: nothing was published; start a new run with the `output.column` of "
                "that one, or under another job name"
            )
        yield columns.assemble(values, count, exact=exact)


def _column(table: pa.Table, name: str, kind: pa.DataType) -> pa.Array:
    """A column; nulls if the table has none of this name."""
    return table[name].combine_chunks() if name in table.column_names else pa.nulls(table.num_rows, kind)


def _kept_lists(store: Store, kept: KeptRows, scratch: Path) -> Buckets:
    with open_parquet(store, kept.key, "start a new run") as file:
        lists = Buckets(scratch, file.schema_arrow, PRIOR_ROW_ID)
        for batch in file.iter_batches(batch_rows(file.metadata)):
            lists.add(batch)
    lists.finish()
    return lists


def _prior_results(dataset: ds.Dataset, kept: KeptRows, scratch: Path) -> Buckets:
    where = ds.field("run_id") == kept.prior_run_id
    if kept.prior_created_at:
        where &= ds.field("run_created_at") == planned_at(kept.prior_created_at)
    priors = Buckets(scratch, dataset.schema, "row_id")
    for batch in rows_where(dataset, where):
        priors.add(batch)
    priors.finish()
    return priors
