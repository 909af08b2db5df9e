"""The table that expectations see: a shard's results as they will be published, in pandas."""

from __future__ import annotations

import json
from collections.abc import Collection
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.compute as pc

from airflow_batchinfer.pipeline.answers import ShardAnswers
from airflow_batchinfer.pipeline.sampling import sample
from airflow_batchinfer.pipeline.vectors import measure_vectors
from airflow_batchinfer.run.outcome import Outcome
from airflow_batchinfer.run.shard import CUSTOM_ID, ROW_ID
from airflow_batchinfer.spec import EmbedTask, JobSpec, JsonTask

_NUMBERS = ("finish_reason", "prompt_tokens", "output_tokens", "cached_tokens", "attempts")


def frame_columns(spec: JobSpec) -> list[str]:
    """Columns that an expectation may name: those of the results, and a few made for checking.

    A `json` answer is its text under the output column's name, and each property of the schema stands
    beside it as `output.property`. A vector is its `output.length` (numbers) and `output.norm`.
    """
    out = spec.output.column
    if isinstance(spec.task, JsonTask):
        answer = [out, *(f"{out}.{name}" for name in spec.task.json_schema.get("properties", {}))]
    elif isinstance(spec.task, EmbedTask):
        answer = [f"{out}.length", f"{out}.norm"]
    else:
        answer = [out]
    return [ROW_ID, CUSTOM_ID, *answer, *_NUMBERS, *(spec.output.carry_prefix + c for c in spec.carried)]


def build_frame(shard: ShardAnswers, columns: Collection[str], most_rows: int) -> pd.DataFrame:
    """The shard's rows that succeeded (at most `most_rows`, drawn at random), with these columns.

    Args:
        columns: some of `frame_columns`; `row_id` is always there.

    Raises:
        CorruptError: a part cannot be read, naming it.
    """
    spec = shard.plan.spec
    out = spec.output.column
    embeds = isinstance(spec.task, EmbedTask)
    prefixed = {spec.output.carry_prefix + c: c for c in spec.carried}
    carried = {name: column for name, column in prefixed.items() if name in columns}
    answers = [c for c in _NUMBERS if c in columns]
    if any(c == out or c.startswith(f"{out}.") for c in columns):
        answers.append("vector" if embeds else "output")

    outcomes = shard.input_rows(["outcome"], [])
    good = outcomes.filter(pc.equal(outcomes["outcome"], Outcome.SUCCEEDED.value))[ROW_ID].to_numpy()
    table = shard.input_rows(answers, list(carried.values()), keep=sample(np.sort(good), most_rows, seed=0))
    series: dict[str, Any] = {ROW_ID: table[ROW_ID].to_numpy()}
    if CUSTOM_ID in columns:
        series[CUSTOM_ID] = table[CUSTOM_ID].to_pandas()
    for name in answers:
        if name in _NUMBERS:
            series[name] = table[name].to_pandas()
    if "vector" in answers:
        lengths, norms = measure_vectors(table["vector"])
        series |= {f"{out}.length": lengths, f"{out}.norm": norms}
    if "output" in answers:
        series[out] = table["output"].to_pandas()
        series |= _properties(series[out], out, columns)
    for name, column in carried.items():
        series[name] = table[column].to_pandas()
    return pd.DataFrame(series)


def _properties(texts: pd.Series[Any], out: str, columns: Collection[str]) -> dict[str, list[Any]]:
    """Top-level properties of JSON answers, for the columns that name them; null where absent."""
    names = [c.removeprefix(f"{out}.") for c in columns if c.startswith(f"{out}.")]
    if not names:
        return {}
    parsed = [_object(text) for text in texts]
    return {f"{out}.{name}": [value.get(name) for value in parsed] for name in names}


def _object(text: str | None) -> dict[str, Any]:
    try:
        value = json.loads(text or "")
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
