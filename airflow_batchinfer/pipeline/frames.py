"""The table that expectations see: a shard's results as they will be published, in pandas."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from airflow_batchinfer.conformance.answers import fault_finder
from airflow_batchinfer.outcome import Outcome
from airflow_batchinfer.pipeline.answered import answered_rows
from airflow_batchinfer.pipeline.answers import ShardAnswers, struct_field
from airflow_batchinfer.pipeline.sampling import sample
from airflow_batchinfer.pipeline.vectors import measure_vectors
from airflow_batchinfer.run.shard import CARRY, CUSTOM_ID, ROW_ID
from airflow_batchinfer.spec import EmbedTask, JobSpec, JsonTask, RegexTask

_NUMBERS = ("finish_reason", "prompt_tokens", "output_tokens", "cached_tokens", "attempts")


def frame_columns(spec: JobSpec) -> list[str]:
    """Columns that an expectation may name: those of the results, and a few made for checking.

    A `json` answer is its text under the output column's name, and each property of the schema stands
    beside it as `output.property`. What is wrong with a `json` or `regex` answer is `output fault`. A
    vector is its `output.length` (numbers) and `output.norm`. A carried column of such a name is left out.
    """
    return [*_own_columns(spec), *_carried(spec)]


def _own_columns(spec: JobSpec) -> list[str]:
    out = spec.output.column
    if isinstance(spec.task, JsonTask):
        properties = (f"{out}.{name}" for name in spec.task.json_schema.get("properties", {}))
        answer = [out, fault_column(spec), *properties]
    elif isinstance(spec.task, RegexTask):
        answer = [out, fault_column(spec)]
    elif isinstance(spec.task, EmbedTask):
        answer = [f"{out}.length", f"{out}.norm"]
    else:
        answer = [out]
    return [ROW_ID, CUSTOM_ID, *answer, *_NUMBERS]


def fault_column(spec: JobSpec) -> str:
    """The column of what is wrong with an answer; null if nothing is. No property's can have its name."""
    return f"{spec.output.column} fault"


def build_frame(shard: ShardAnswers, columns: Collection[str], most_rows: int) -> pd.DataFrame:
    """The shard's rows that succeeded (at most `most_rows`, drawn at random), with these columns.

    Args:
        shard: the shard.
        columns: some of `frame_columns`; `row_id` is always there.
        most_rows: see above.

    Raises:
        CorruptError: a part cannot be read, naming it.
    """
    spec = shard.plan.spec
    outcomes = shard.input_rows(["outcome"], [])
    good = outcomes.filter(pc.equal(outcomes["outcome"], Outcome.SUCCEEDED.value))[ROW_ID].to_numpy()
    table = shard.input_rows(
        _answer_columns(spec, columns),
        list(_wanted(spec, columns).values()),
        keep=sample(np.sort(good), most_rows, seed=0),
    )
    return _frame(spec, columns, table)


def all_frames(shard: ShardAnswers, columns: Collection[str], rows: int) -> Iterator[pd.DataFrame]:
    """All the shard's rows that succeeded, about `rows` a frame (copies included), with these columns.

    Args:
        shard: a shard with a commit.
        columns: some of `frame_columns`; `row_id` is always there.
        rows: see above.

    Raises:
        CorruptError: a part cannot be read, naming it.
    """
    assert shard.commit is not None
    spec = shard.plan.spec
    answers, carried = _answer_columns(spec, columns), list(_wanted(spec, columns).values())
    tables: list[pa.Table] = []
    for batch in answered_rows(shard.store, shard.planned, shard.commit, carried):
        wanted = {ROW_ID: batch.row_ids, CUSTOM_ID: batch.custom_ids}
        wanted |= {name: batch.answers.column(name) for name in answers}
        if carried:
            values = [batch.carried[name] for name in carried]
            wanted[CARRY] = pc.make_struct(*values, field_names=carried)
        good = pc.equal(batch.answers.column("outcome"), Outcome.SUCCEEDED.value)
        tables.append(pa.table(wanted).filter(good))
        if sum(table.num_rows for table in tables) >= rows:
            yield _frame(spec, columns, pa.concat_tables(tables))
            tables = []
    if any(table.num_rows for table in tables):
        yield _frame(spec, columns, pa.concat_tables(tables))


def _answer_columns(spec: JobSpec, columns: Collection[str]) -> list[str]:
    """Columns of parts behind some of `frame_columns`."""
    out = spec.output.column
    answers = [c for c in _NUMBERS if c in columns]
    if any(c in (out, fault_column(spec)) or c.startswith(f"{out}.") for c in columns):
        answers.append("vector" if isinstance(spec.task, EmbedTask) else "output")
    return answers


def _carried(spec: JobSpec) -> dict[str, str]:
    """Input columns by their names among `frame_columns`."""
    own = _own_columns(spec)
    prefixed = {spec.output.carry_prefix + c: c for c in spec.carried}
    return {name: column for name, column in prefixed.items() if name not in own}


def _wanted(spec: JobSpec, columns: Collection[str]) -> dict[str, str]:
    """Those of `_carried` that are among the columns."""
    return {name: column for name, column in _carried(spec).items() if name in columns}


def _frame(spec: JobSpec, columns: Collection[str], table: pa.Table) -> pd.DataFrame:
    """The frame of a table as `ShardAnswers.input_rows` makes it."""
    out = spec.output.column
    series: dict[str, Any] = {ROW_ID: table[ROW_ID].to_numpy()}
    if CUSTOM_ID in columns:
        series[CUSTOM_ID] = table[CUSTOM_ID].to_pandas()
    for name in _answer_columns(spec, columns):
        if name == "vector":
            lengths, norms = measure_vectors(table["vector"])
            series |= {f"{out}.length": lengths, f"{out}.norm": norms}
        elif name == "output":
            series[out] = table["output"].to_pandas()
            series |= _properties(series[out], out, columns)
            series |= _faults(series[out], spec, columns)
        else:
            series[name] = table[name].to_pandas()
    for name, column in _wanted(spec, columns).items():
        series[name] = struct_field(table[CARRY], column).to_pandas()
    return pd.DataFrame(series)


def _properties(texts: pd.Series[Any], out: str, columns: Collection[str]) -> dict[str, list[Any]]:
    """Top-level properties of JSON answers, for the columns that name them; null where absent."""
    names = [c.removeprefix(f"{out}.") for c in columns if c.startswith(f"{out}.")]
    if not names:
        return {}
    parsed = [_object(text) for text in texts]
    return {f"{out}.{name}": [value.get(name) for value in parsed] for name in names}


def _faults(texts: pd.Series[Any], spec: JobSpec, columns: Collection[str]) -> dict[str, pd.Series[Any]]:
    """What is wrong with each answer, if that is asked for."""
    name = fault_column(spec)
    if name not in columns or not isinstance(spec.task, (JsonTask, RegexTask)):
        return {}
    fault_of = fault_finder(spec.task)

    def fault(text: str | None) -> str | None:
        try:
            return None if text is None else fault_of(text)
        except Exception:  # beyond bounds of time or depth here, and not for the worker that accepted it
            return None

    return {name: pd.Series([fault(text) for text in texts], dtype=object)}


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
