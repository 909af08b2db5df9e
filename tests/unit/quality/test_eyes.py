from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import ExitCode, InputError
from airflow_batchinfer.pipeline.eyes import read_sheet, write_sheet
from airflow_batchinfer.pipeline.quarantine import Quarantine
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.run.layout import RunLayout
from tests.unit.quality.runs import MadeRun, make_run, make_spec, tickets

pytestmark = pytest.mark.airflow_env


@pytest.fixture
def run(root: Path) -> MadeRun:
    spec = make_spec(root, task={"type": "generate"})
    made = make_run(
        root, tickets(60), lambda row: {"output": "=1+1" if row["id"] == "T3" else "ok"}, spec=spec
    )
    made.reconcile()
    return made


def draw(run: MadeRun, rows: int) -> None:
    report = run.plan.spec.report.model_copy(update={"review_rows": rows})
    spec = run.plan.spec.model_copy(update={"report": report})
    write_sheet(run.store, run.plan.model_copy(update={"spec": spec}), Quarantine())


def lines(run: MadeRun) -> list[dict[str, str]]:
    text = run.store.read_bytes(run.layout.review("csv")).decode("utf-8-sig")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def marked(run: MadeRun, marks: list[str]) -> bytes:
    sheet = lines(run)
    text = io.StringIO()
    writer = csv.DictWriter(text, sheet[0].keys())
    writer.writeheader()
    writer.writerows({**line, "correct": mark} for line, mark in zip(sheet, marks, strict=True))
    return text.getvalue().encode()


def test_sheet_holds_prompts_and_outputs(run: MadeRun) -> None:
    draw(run, 60)
    sheet = lines(run)
    assert [int(line["row_id"]) for line in sheet] == list(range(60))
    assert sheet[5]["custom_id"] == "T5"
    assert sheet[5]["prompt"] == "[system] You sort tickets.\n\n[user] Ticket: ticket 5 about praise"
    assert sheet[5]["correct"] == ""


def test_output_is_no_formula(run: MadeRun) -> None:
    draw(run, 60)
    assert lines(run)[3]["output"] == "'=1+1"


def test_marks_become_an_accuracy_with_an_interval(run: MadeRun) -> None:
    draw(run, 10)
    review = read_sheet(run.store, run.folder, marked(run, ["yes"] * 6 + ["No", "n"] + ["", " "]))
    assert (review.sampled, review.judged, review.correct) == (10, 8, 6)
    assert review.accuracy == 0.75
    assert (review.low, review.high) == pytest.approx((0.4093, 0.9285), abs=1e-3)
    assert len(review.wrong) == 2
    assert write_report(run.store, run.folder).review == review
    html = run.store.read_bytes(run.layout.report("html")).decode()
    assert "6 of 8 marked rows are correct: 75.0%, and 95 % likely between 40.9% and 92.9%" in html


def test_sheet_in_the_store_is_read_by_default(run: MadeRun) -> None:
    draw(run, 3)
    assert read_sheet(run.store, run.folder).sentence() == "None of the 3 sampled rows is marked yet."


def test_a_begun_sheet_is_never_overwritten(run: MadeRun) -> None:
    run.store.write_bytes(run.layout.review("csv"), b"run,row_id,correct\n%s,1,yes\n" % run.folder.encode())
    write_report(run.store, run.folder)
    assert read_sheet(run.store, run.folder).correct == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"run,row_id,correct\ntickets/runs/manual-1,1,maybe\n",
            "record 2: `correct` is 'maybe'; write yes or no",
        ),
        (b"run,row_id,correct\ntickets/runs/manual-1,x,yes\n", "record 2: `row_id` is 'x'"),
        (b"id,ok\n1,yes\n", "has no column `correct`"),
        (b"row_id,correct\n1,yes\n", "has no column `run`: keep the columns"),
        (b"\xff\xfe\x00", "no CSV in UTF-8"),
    ],
)
def test_wrong_sheets_are_refused_by_line(run: MadeRun, content: bytes, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_sheet(run.store, run.folder, content)


def test_the_sheet_of_another_run_is_refused(run: MadeRun, root: Path) -> None:
    """As many rows, so the same row ids."""
    other = make_run(root, tickets(60), spec=run.plan.spec, run_id="manual-2")
    draw(run, 4)
    draw(other, 4)
    assert [line["row_id"] for line in lines(run)] == [line["row_id"] for line in lines(other)]
    with pytest.raises(
        InputError, match=r"of the run 'tickets/runs/manual-1', not of 'tickets/runs/manual-2'"
    ):
        read_sheet(run.store, other.folder, marked(run, ["yes"] * 4))
    assert read_sheet(run.store, f"{run.folder}/", marked(run, ["yes"] * 4)).correct == 4
    with pytest.raises(InputError, match=r"runs/manual-3 is no run"):
        read_sheet(run.store, "tickets/runs/manual-3", marked(run, ["yes"] * 4))


def test_the_runs_own_sheet_of_an_older_release_is_read(run: MadeRun) -> None:
    sheet = b"row_id,correct\n1,yes\n2,no\n"
    run.store.write_bytes(RunLayout(run.folder).review("csv"), sheet)
    assert read_sheet(run.store, run.folder).judged == 2
    with pytest.raises(InputError, match="no column `run`"):
        read_sheet(run.store, run.folder, sheet)


def test_command_reads_a_sheet_and_writes_the_report(
    run: MadeRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(run, 4)
    sheet = tmp_path / "sheet.csv"
    sheet.write_bytes(marked(run, ["yes"] * 4))
    where = [run.folder, "--store", run.store.uri]
    assert main(["review", "--sheet", str(sheet), *where]) == 0
    assert main(["report", *where]) == 0
    told = capsys.readouterr().out
    assert "4 of 4 marked rows are correct: 100.0%" in told
    assert told.rstrip().endswith("report.html")
    assert main(["review", "--sheet", str(tmp_path / "none.csv"), *where]) == ExitCode.BAD_INPUT
