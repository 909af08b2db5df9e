"""Sampling for eyes: a sheet of random rows that a person marks, read back as an accuracy."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator

from pydantic import Field

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.pipeline.answers import shards_of
from airflow_batchinfer.pipeline.quarantine import Quarantine
from airflow_batchinfer.pipeline.shown import RowPicker, ShownRow
from airflow_batchinfer.pipeline.statistics import wilson
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.plan import Plan, check_is_run
from airflow_batchinfer.store import Store

_RUN = "run"
_COLUMNS = (_RUN, "row_id", "custom_id", "prompt", "output", "correct", "comment")
_NEEDED = frozenset({_RUN, "row_id", "correct"})
_YES = frozenset({"yes", "y", "true", "1"})
_NO = frozenset({"no", "n", "false", "0"})
_FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


class Review(Document):
    """What a person found on the sample."""

    sampled: int = Field(description="Rows of the sheet.")
    judged: int = Field(description="Rows that were marked.")
    correct: int
    accuracy: float | None = Field(description="Of those marked; none if none are.")
    low: float = Field(description="Lower end of Wilson's 95 % interval.")
    high: float
    wrong: list[int] = Field(description="Row ids that were marked `no`.")

    def sentence(self) -> str:
        """The result in words."""
        if self.accuracy is None:
            return f"None of the {self.sampled} sampled rows is marked yet."
        return (
            f"{self.correct} of {self.judged} marked rows are correct: {self.accuracy:.1%}, and 95 % likely "
            f"between {self.low:.1%} and {self.high:.1%} for all rows that succeeded."
        )


def write_sheet(store: Store, plan: Plan, quarantine: Quarantine) -> None:
    """Write `review.csv`, a seeded sample of rows that succeeded, with `correct` to be filled in.

    It has `report.review_rows` rows; there is no sheet if that is 0.

    A sheet that is there is left alone: somebody may have begun to fill it in. Cells that a spreadsheet
    would take for a formula get an apostrophe in front.

    Args:
        store: the run's.
        plan: the run's.
        quarantine: what validation took out of the results.

    Raises:
        CorruptError, StoreError: the run cannot be read, or the sheet not be written.
    """
    sheet = RunLayout(plan.folder).review("csv")
    if not plan.spec.report.review_rows or store.exists(sheet):
        return
    picker = RowPicker(plan.spec.report.review_rows, 0, plan.spec.report.seed)
    opened = {}
    for shard in shards_of(store, plan, quarantine=quarantine):
        opened[shard.planned.shard] = shard
        picker.see(shard)
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(_COLUMNS)
    for row in sorted(picker.succeeded(opened), key=lambda row: row.row_id):
        writer.writerow([_plain(cell) for cell in _cells(plan.folder, row)])
    # The mark at the start makes spreadsheets read UTF-8.
    store.write_bytes(sheet, text.getvalue().encode("utf-8-sig"))


def read_sheet(store: Store, folder: str, filled: bytes | None = None) -> Review:
    """Read a filled sheet, write `review.json` for the report, and return the result.

    Args:
        filled: the sheet's content, if it was filled in elsewhere; else `review.csv` of the run is read.

    Raises:
        FileNotFoundError: the run has no sheet.
        InputError: the folder holds no run, the sheet is not the run's, or a mark is neither yes nor no;
            names the line.
    """
    check_is_run(store, folder)
    layout = RunLayout(folder)
    data = store.read_bytes(layout.review("csv")) if filled is None else filled
    try:
        reader = csv.DictReader(io.StringIO(data.decode("utf-8-sig"), newline=""))
        lines = list(reader)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"the review sheet is no CSV in UTF-8: {error}") from error
    columns = set(reader.fieldnames or ())
    if filled is None:
        columns.add(_RUN)  # an older release wrote the run's own sheet without it
    if missing := _NEEDED - columns:
        raise InputError(f"the review sheet has no column `{min(missing)}`: keep the columns of review.csv")
    marks = list(_marks(lines, layout.folder))
    judged = [(row_id, mark) for row_id, mark in marks if mark is not None]
    correct = sum(mark for _, mark in judged)
    low, high = wilson(correct, len(judged))
    review = Review(
        sampled=len(marks),
        judged=len(judged),
        correct=correct,
        accuracy=correct / len(judged) if judged else None,
        low=low,
        high=high,
        wrong=[row_id for row_id, mark in judged if not mark],
    )
    review.write(store, layout.review("json"))
    return review


def read_review(store: Store, folder: str) -> Review | None:
    """What `read_sheet` found, or none. Raises `CorruptError`."""
    return Review.find(store, RunLayout(folder).review("json"))


def _cells(folder: str, row: ShownRow) -> list[str]:
    prompt = "\n\n".join(f"[{m['role']}] {m['content']}" for m in row.prompt)
    return [folder, str(row.row_id), row.custom_id or "", prompt, row.output or "", "", ""]


def _plain(cell: str) -> str:
    return f"'{cell}" if cell.startswith(_FORMULA_STARTS) else cell


def _marks(lines: list[dict[str, str]], folder: str) -> Iterator[tuple[int, bool | None]]:
    seen: set[int] = set()
    for number, line in enumerate(lines, start=2):
        # Row ids do not tell runs apart: two nights of as many rows draw the same ones.
        if line.get(_RUN, folder) != folder:
            raise InputError(
                f"review sheet, record {number}: it is of the run {line[_RUN]!r}, not of {folder!r}; name "
                "the folder of that run, or take this run's review.csv"
            )
        mark = (line["correct"] or "").strip().lower()
        if mark and mark not in _YES | _NO:
            raise InputError(
                f"review sheet, record {number}: `correct` is {mark!r}; write yes or no, or nothing"
            )
        try:
            row_id = int(line["row_id"])
        except (TypeError, ValueError) as error:
            raise InputError(f"review sheet, record {number}: `row_id` is {line['row_id']!r}") from error
        if row_id in seen:
            raise InputError(f"review sheet, record {number}: row_id {row_id} stands twice; keep one")
        seen.add(row_id)
        yield row_id, (mark in _YES) if mark else None
