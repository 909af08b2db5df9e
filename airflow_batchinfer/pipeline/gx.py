"""Great Expectations, as far as this package uses it: GX Core 1.x without telemetry, bars or files."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd
    from great_expectations.data_context.data_context.ephemeral_data_context import EphemeralDataContext
    from great_expectations.expectations.expectation import Expectation

    ExpectationObject = Expectation
else:
    ExpectationObject = object

EXAMPLES = 5
"""Failing rows kept for each expectation and shard."""


class NotAnExpectation(ValueError):
    """Great Expectations refuses the arguments; the message lists them."""


@cache
def _context() -> EphemeralDataContext:
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read on import; nothing here may call home
    logging.getLogger("great_expectations").setLevel(logging.WARNING)  # it tells 200 lines on import
    import great_expectations
    from great_expectations.data_context.types.base import ProgressBarsConfig

    context = great_expectations.get_context(mode="ephemeral")
    context.enable_analytics(False)
    context.variables.progress_bars = ProgressBarsConfig(globally=False, metric_calculations=False)
    return context


@cache
def known_types() -> tuple[str, ...]:
    """Names of all expectations, plug-ins that were imported included."""
    _context()
    from great_expectations.expectations.registry import list_registered_expectation_implementations

    return tuple(sorted(list_registered_expectation_implementations()))


def build_expectation(kind: str, kwargs: Mapping[str, Any]) -> ExpectationObject:
    """The expectation with these arguments. Raises `NotAnExpectation`.

    Built one by one, since a suite drops an expectation it does not know with no more than a log line.
    """
    _context()
    from great_expectations.expectations.registry import get_expectation_impl

    try:
        return get_expectation_impl(kind)(**kwargs)
    except Exception as error:  # pydantic's own error classes come from a copy inside the package
        faults = getattr(error, "errors", None)
        if faults is None:
            raise NotAnExpectation(str(error)) from error
        lines = (f"`{'.'.join(map(str, f['loc']))}`: {f['msg']}" for f in faults())
        raise NotAnExpectation("; ".join(lines)) from error


def is_row_by_row(expectation: ExpectationObject) -> bool:
    """Whether it judges rows one by one and counts those that fail."""
    from great_expectations.expectations.expectation import (
        ColumnMapExpectation,
        ColumnPairMapExpectation,
        MulticolumnMapExpectation,
    )

    return isinstance(
        expectation, (ColumnMapExpectation, ColumnPairMapExpectation, MulticolumnMapExpectation)
    )


def validate_frame(
    frame: pd.DataFrame,
    expectations: Sequence[ExpectationObject],
    id_column: str,
    *,
    all_failing: bool = False,
) -> list[dict[str, Any]]:
    """Results of the expectations over a frame, in their order, as Great Expectations' own JSON values.

    Failing rows are named by `id_column`: a few examples, or `all_failing`, in `unexpected_index_list`. An
    expectation that raises does not stop the rest: its result says so in `exception_info`.
    """
    context = _context()
    from great_expectations import ExpectationSuite

    name = "frame"
    source = context.data_sources.add_or_update_pandas(name)
    batch = (
        source.add_dataframe_asset(name)
        .add_batch_definition_whole_dataframe(name)
        .get_batch(batch_parameters={"dataframe": frame})
    )
    suite = ExpectationSuite(name=name)
    for i, expectation in enumerate(expectations):
        suite.expectations.append(expectation.copy(update={"id": str(i)}))
    result_format = {
        "result_format": "COMPLETE" if all_failing else "SUMMARY",
        "partial_unexpected_count": EXAMPLES,
        "unexpected_index_column_names": [id_column],
    }
    validated: Any = batch.validate(suite, result_format=result_format)
    results = validated.to_json_dict()["results"]
    by_id = {int(r["expectation_config"]["id"]): r for r in results}
    return [by_id[i] for i in range(len(expectations))]


def exception_of(result: Mapping[str, Any]) -> str | None:
    """The first line of why an expectation raised, if it did; GX nests one entry a metric, or has none."""
    info = result.get("exception_info") or {}
    entries = [info] if "raised_exception" in info else list(info.values())
    for entry in entries:
        if isinstance(entry, dict) and entry.get("raised_exception"):
            return next(iter(str(entry.get("exception_message")).strip().splitlines()), "no message")
    return None


def render_sections(suite: str, run_id: str, time: str, results: Sequence[Mapping[str, Any]]) -> list[str]:
    """HTML of the sections of Great Expectations' page of validation results.

    Values in `results` go into it as they are: escape them first.
    """
    _context()
    import great_expectations
    from great_expectations.core import ExpectationSuiteValidationResult, ExpectationValidationResult
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view.view import DefaultJinjaSectionView

    made = [
        ExpectationValidationResult(
            success=result["success"],
            expectation_config=ExpectationConfiguration(
                type=result["expectation_config"]["type"], kwargs=result["expectation_config"]["kwargs"]
            ),
            result=result["result"],
            exception_info=result["exception_info"],
            meta={},
        )
        for result in results
    ]
    good = sum(result["success"] for result in results)
    validated = ExpectationSuiteValidationResult(
        success=good == len(made),
        results=made,
        suite_name=suite,
        statistics={
            "evaluated_expectations": len(made),
            "successful_expectations": good,
            "unsuccessful_expectations": len(made) - good,
            "success_percent": 100 * good / len(made) if made else None,
        },
        meta={
            "run_id": {"run_name": run_id, "run_time": time},
            "great_expectations_version": great_expectations.__version__,
            "batch_kwargs": {"data_asset_name": "results"},
        },
    )
    page: dict[str, Any] = ValidationResultsPageRenderer().render(validated).to_json_dict()
    view: Any = DefaultJinjaSectionView()
    return [
        str(view.render({"section": section, "section_loop": {"index": number}}))
        for number, section in enumerate(page["sections"], start=1)
    ]
