"""Which Great Expectations a job has: those of its task, of its spec and of its suite; checked early."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.pipeline.frames import fault_column, frame_columns
from airflow_batchinfer.pipeline.gx import (
    ExpectationObject,
    NotAnExpectation,
    build_expectation,
    exception_of,
    is_row_by_row,
    known_types,
    validate_frame,
)
from airflow_batchinfer.pipeline.verdict import Origin
from airflow_batchinfer.run.shard import ROW_ID
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, OnFailure, RegexTask

_COLUMN_ARGUMENTS = ("column", "column_A", "column_B", "column_list", "column_set")
_SEVERITIES = ("critical", "warning", "info")
_FIELDS = frozenset({"type", "kwargs", "severity", "on_failure"})
_AGAINST_OTHERS = re.compile(r"unique$|increasing$|decreasing$|outliers$|z_scores")
"""Expectations that judge a row by the other rows: none of them alone is at fault."""

_NOT_OF_A_SAMPLE = {
    "expect_table_row_count_": "every input row is accounted for; limit those without a result by "
    "`failure.max_dead_fraction`",
    "expect_table_column": "the results have the columns that the spec says, and of those only what "
    "expectations name is read",
    "expect_column_sum_": "use `expect_column_mean_to_be_between`",
}
"""Beginnings of types that are about a whole table, and what to do instead."""


@dataclass(frozen=True)
class Expected:
    """One expectation of a job."""

    type: str
    kwargs: Mapping[str, Any]
    severity: str
    where: str
    """Its path, for errors."""
    origin: Origin
    expectation: ExpectationObject
    columns: frozenset[str]
    """Columns of the frame it needs."""
    row_by_row: bool
    """Whether it judges each row by itself, so that shards' results add up."""
    on_failure: OnFailure
    """`dead_letter` only if it is critical and a row can fail it alone."""


def check_expectations(spec: JobSpec) -> None:
    """Refuse what could only fail after the money is spent.

    Raises:
        SpecError: an expectation's type is unknown, its arguments are wrong, it names no column of the
            results or cannot be evaluated on them; or the suite cannot be read. Says which, by the spec's
            path.
    """
    if spec.validation.enabled and (spec.validation.expectations or spec.validation.suite):
        for expected in expectations_of(spec):
            _try(expected)


def expectations_of(spec: JobSpec) -> list[Expected]:
    """All expectations of a job: its task's, its spec's, its suite's. Raises `SpecError`."""
    found = [_build(spec, config, "task", "task") for config in _task_expectations(spec)]
    for i, config in enumerate(spec.validation.expectations):
        found.append(_build(spec, config, f"validation.expectations.{i}", "spec"))
    for where, config in _suite_expectations(spec):
        found.append(_build(spec, config, where, "suite"))
    return found


def _task_expectations(spec: JobSpec) -> Iterator[dict[str, Any]]:
    """What follows from the task: the worker enforces most of it; here it is proven on what it stored."""
    out, task = spec.output.column, spec.task
    yield {"type": "expect_column_values_to_be_unique", "kwargs": {"column": ROW_ID}}
    if isinstance(task, EmbedTask):
        yield {
            "type": "expect_column_unique_value_count_to_be_between",
            "kwargs": {"column": f"{out}.length", "min_value": 1, "max_value": 1},
        }
        if task.normalize:
            yield {
                "type": "expect_column_values_to_be_between",
                "kwargs": {"column": f"{out}.norm", "min_value": 0.99, "max_value": 1.01},
            }
        return
    yield {"type": "expect_column_values_to_not_be_null", "kwargs": {"column": out}}
    if isinstance(task, ChoiceTask):
        yield {
            "type": "expect_column_values_to_be_in_set",
            "kwargs": {"column": out, "value_set": list(task.labels)},
        }
    elif isinstance(task, (JsonTask, RegexTask)):
        # Not by Great Expectations' own matching: other engines of patterns refuse what the worker accepts.
        yield {"type": "expect_column_values_to_be_null", "kwargs": {"column": fault_column(spec)}}
    else:
        yield {"type": "expect_column_values_to_match_regex", "kwargs": {"column": out, "regex": r"\S"}}


def _suite_expectations(spec: JobSpec) -> Iterator[tuple[str, Any]]:
    path = spec.validation.suite
    if path is None:
        return
    try:
        suite = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise SpecError(
            f"validation.suite: {path} is not there. In a Git bundle a commit moves it: clear split with "
            "downstream, which looks for it anew and pays nothing again"
        ) from error
    except (OSError, ValueError) as error:
        raise SpecError(f"validation.suite: {path} cannot be read as JSON: {error}") from error
    if not isinstance(suite, dict) or not isinstance(suite.get("expectations"), list):
        raise SpecError(f"validation.suite: {path} is no suite: it has no list `expectations`")
    for i, config in enumerate(suite["expectations"]):
        yield f"validation.suite: {path}: expectations.{i}", config


def _build(spec: JobSpec, config: Any, where: str, origin: Origin) -> Expected:
    if not isinstance(config, dict) or not isinstance(config.get("type"), str):
        raise SpecError(f"{where}: an expectation is `{{type: expect_..., kwargs: {{...}}}}`")
    kind, kwargs = config["type"], config.get("kwargs", {})
    if origin == "spec" and (unknown := config.keys() - _FIELDS):
        raise SpecError(f"{where}.{min(unknown)}: unknown field (allowed: {', '.join(sorted(_FIELDS))})")
    if not isinstance(kwargs, dict):
        raise SpecError(f"{where}.kwargs: must be a mapping of arguments")
    severity = config.get("severity") or "critical"
    if severity not in _SEVERITIES:
        raise SpecError(f"{where}.severity: `{severity}` is none of {', '.join(_SEVERITIES)}")
    if kind not in known_types():
        close = difflib.get_close_matches(kind, known_types(), n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise SpecError(f"{where}.type: Great Expectations has no `{kind}`{hint}")
    try:
        expectation = build_expectation(kind, kwargs)
    except NotAnExpectation as error:
        raise SpecError(f"{where}.kwargs: {kind}: {error}") from error
    row_by_row = is_row_by_row(expectation)
    return Expected(
        type=kind,
        kwargs=kwargs,
        severity=severity,
        where=where,
        origin=origin,
        expectation=expectation,
        columns=_columns(spec, kwargs, where),
        row_by_row=row_by_row,
        on_failure=_on_failure(
            spec, config if origin == "spec" else {}, where, kind, row_by_row and severity == "critical"
        ),
    )


def _try(expected: Expected) -> None:
    """Refuse what could never be evaluated: a measure of the whole table, an unknown one, no pattern.

    The row is of nulls, which suit any type, or of text where there are patterns. What a condition needs of
    its columns is not known yet.
    """
    for beginning, remedy in _NOT_OF_A_SAMPLE.items():
        if expected.type.startswith(beginning):
            raise SpecError(
                f"{expected.where}.type: `{expected.type}` is about a whole table, and would see a sample: "
                f"{remedy}"
            )
    if expected.kwargs.get("row_condition"):
        return
    value = "0" if any("regex" in name or "schema" in name for name in expected.kwargs) else None
    frame = pd.DataFrame({column: [value] for column in expected.columns} | {ROW_ID: [0]})
    (result,) = validate_frame(frame, [expected.expectation], ROW_ID)
    if (error := exception_of(result)) is not None:
        raise SpecError(
            f"{expected.where}: Great Expectations cannot evaluate `{expected.type}` on the results, which "
            f"it gets as pandas frames: {error}"
        )


def _on_failure(spec: JobSpec, config: dict[str, Any], where: str, kind: str, by_row: bool) -> OnFailure:
    """What its failure does: its own field, or the job's; `hold` where rows cannot be told apart.

    Args:
        spec: the job.
        config: the expectation's fields; empty if it cannot have its own.
        where: for errors.
        kind: its type.
        by_row: whether it is critical and counts the rows that fail.
    """
    own = config.get("on_failure")
    if own is not None and own not in get_args(OnFailure):
        raise SpecError(f"{where}.on_failure: `{own}` is none of {', '.join(get_args(OnFailure))}")
    chosen: OnFailure = own or spec.validation.on_failure
    if chosen != "dead_letter" or (by_row and not _AGAINST_OTHERS.search(kind)):
        return chosen
    if own is not None:
        raise SpecError(
            f"{where}.on_failure: `dead_letter` is for critical expectations that judge each row by itself, "
            f"and `{kind}` is not one here: use `hold` or `warn`, or leave `severity` out"
        )
    return "hold"


def _columns(spec: JobSpec, kwargs: dict[str, Any], where: str) -> frozenset[str]:
    """Columns that the arguments name; all of them if a condition or query could name any."""
    available = frame_columns(spec)
    if kwargs.get("row_condition") or any("query" in name for name in kwargs):
        return frozenset(available)
    needed = {ROW_ID}
    for argument in _COLUMN_ARGUMENTS:
        value = kwargs.get(argument)
        names = [value] if isinstance(value, str) else list(value or [])
        for name in names:
            if name not in available:
                raise SpecError(
                    f"{where}.kwargs.{argument}: the results have no column `{name}` "
                    f"(they have: {', '.join(available)}; to check an input column, name it in `input.carry`)"
                )
        needed.update(names)
    return frozenset(needed)


def title(kind: str, kwargs: Mapping[str, Any]) -> str:
    """An expectation's name for people: `label: values to be in set`."""
    words = re.sub(r"^expect_(column_pair_|column_|multicolumn_|table_|compound_)?", "", kind)
    named = [kwargs[a] for a in _COLUMN_ARGUMENTS if a in kwargs]
    names = ", ".join(n if isinstance(n, str) else ", ".join(map(str, n)) for n in named)
    words = words.replace("_", " ")
    return f"{names}: {words}" if names else words
