"""Rows that fail an expectation become dead letters, and the sums still add up."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from airflow_batchinfer.cli import main
from airflow_batchinfer.errors import CorruptError, GateError, SpecError, StaleLedgerError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.pipeline.accounting import account_of, read_account
from airflow_batchinfer.pipeline.expectations import check_expectations
from airflow_batchinfer.pipeline.gate import check_run
from airflow_batchinfer.pipeline.housekeeping import delete_orphans
from airflow_batchinfer.pipeline.merge import merge
from airflow_batchinfer.pipeline.quarantine import quarantined_rows
from airflow_batchinfer.pipeline.reconcile import reconcile
from airflow_batchinfer.pipeline.replay import prepare_replay
from airflow_batchinfer.pipeline.report import build_report, write_report
from airflow_batchinfer.pipeline.split import split
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.pipeline.validate import validate
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import Store
from tests.unit.pipeline.runs import commit_run, frozen_rows, job, table_rows, write_input
from tests.unit.quality.runs import make_spec

pytestmark = pytest.mark.airflow_env

SHORT = {
    "type": "expect_column_value_lengths_to_be_between",
    "kwargs": {"column": "output", "max_value": 10},
    "on_failure": "dead_letter",
}
MAIL = {
    "type": "expect_column_values_to_be_in_set",
    "kwargs": {"column": "channel", "value_set": ["mail"]},
    "on_failure": "dead_letter",
}
TEXTS = [f"t{i}" if i % 5 else f"t{i} is long, too long" for i in range(60)]
LONG = {i for i in range(60) if not i % 5}


@pytest.fixture
def store(root: Path) -> Store:
    from airflow_batchinfer.store import LocalStore

    return LocalStore(root)


def planned(root: Path, store: Store, run_id: str = "run", texts: list[str] = TEXTS, **fields: Any) -> Plan:
    """A run over `texts` whose answers are the texts themselves; every seventh row came by phone."""
    rows = [{"text": t, "channel": "mail" if i % 7 else "phone"} for i, t in enumerate(texts)]
    write_input(root, rows)
    given = {"path": str(root / "in"), "carry": ["channel"]}
    sections: dict[str, Any] = {
        "validation": {"expectations": [SHORT]},
        "failure": {"max_dead_fraction": 0.5},
        "sharding": {"max_rows": 20},
    }
    return split(store, job(root, store=str(root), input=given, **sections | fields), run_id)


def run_to_verdict(store: Store, plan: Plan, **how: Any) -> Verdict:
    commit_run(store, plan, answer=lambda row: row["input"]["text"], **how)
    reconcile(store, plan.folder)
    return validate(store, plan.folder)


def ids(rows: list[dict[str, Any]]) -> set[int]:
    return {row["row_id"] for row in rows}


def test_failing_rows_are_dead_letters_and_the_rest_is_published(root: Path, store: Store) -> None:
    plan = planned(root, store)
    verdict = run_to_verdict(store, plan, dead=lambda i: Reason.TIMED_OUT if i == 1 else None)
    assert verdict.success
    assert verdict.message.endswith(
        "12 rows fail an expectation and are dead letters: output: value lengths to be between (12)."
    )
    check = next(c for c in verdict.checks if c.kind == SHORT["type"])
    assert (check.success, check.checked, check.unexpected, check.dead_lettered) == (True, 59, 12, 12)

    merged = merge(store, plan.folder)
    assert (merged.results, merged.dead_letters) == (47, 13)
    assert ids(table_rows(store, "job/results")) == set(range(60)) - LONG - {1}
    letters = {row["row_id"]: row for row in table_rows(store, "dead_letters")}
    assert letters.keys() == LONG | {1}
    assert (letters[5]["outcome"], letters[5]["reason"]) == ("invalid", "expectation_failed")
    assert letters[5]["message"] == (
        "output: value lengths to be between (expect_column_value_lengths_to_be_between): "
        'found output "t5 is long, too long"'
    )
    assert letters[5]["last_output"] == "t5 is long, too long"
    assert letters[1]["reason"] == "timed_out"


def test_ledger_stays_as_proven_and_the_account_adds_up(root: Path, store: Store) -> None:
    plan = planned(root, store)
    verdict = run_to_verdict(store, plan, dead=lambda i: Reason.EMPTY_OUTPUT if i == 1 else None)
    ledger = Ledger.read(store, RunLayout(plan.folder).ledger)
    assert (ledger.counts["succeeded"], ledger.counts["invalid"]) == (59, 1)
    account = account_of(store, plan.folder, ledger)
    assert sum(account.counts.values()) == 60
    assert (account.counts["succeeded"], account.counts["invalid"]) == (47, 13)
    assert account.reasons == {"empty_output": 1, "expectation_failed": 12}
    assert sum((Counter(account.counts_of(s)) for s in ledger.shards), Counter()) == Counter(
        {k: n for k, n in account.counts.items() if n}
    )
    assert verdict.profile.counts == {"succeeded": 47, "invalid": 13}
    assert verdict.profile.reasons == {"empty_output": 1, "expectation_failed": 12}


def test_again_changes_nothing(root: Path, store: Store) -> None:
    plan = planned(root, store)
    verdict = run_to_verdict(store, plan)
    first = merge(store, plan.folder)
    tables = table_rows(store, "job/results"), table_rows(store, "dead_letters")
    again = validate(store, plan.folder)
    assert again.quarantine == verdict.quarantine
    assert merge(store, plan.folder) == first
    store.delete(RunLayout(plan.folder).merge)
    merge(store, plan.folder)
    assert (table_rows(store, "job/results"), table_rows(store, "dead_letters")) == tables
    assert delete_orphans(store, "job").objects == 0


def test_the_command_line_tells_them(root: Path, store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(root, store)
    run_to_verdict(store, plan)
    assert main(["show", "--store", str(root), plan.folder]) == 0
    assert "quarantined  12 of the succeeded rows fail an expectation" in capsys.readouterr().out


def test_report_and_gate_tell_the_final_counts(root: Path, store: Store) -> None:
    plan = planned(root, store)
    run_to_verdict(store, plan)
    merge(store, plan.folder)
    report = write_report(store, plan.folder)
    assert (report.status, report.problems) == ("published", [])
    assert report.counts == {"succeeded": 48, "invalid": 12}
    assert {row.row_id for row in report.dead_letters["expectation_failed"]} <= LONG
    assert not {row.row_id for row in report.samples} & LONG
    assert check_run(store, plan.folder)["counts"]["invalid"] == 12
    standing = standing_of(store, plan)
    assert (standing.succeeded, standing.dead, standing.rows) == (48, 12, 60)
    sheet = store.read_bytes(RunLayout(plan.folder).review("csv")).decode()
    assert "too long" not in sheet


def test_copies_are_judged_by_what_they_carry(root: Path, store: Store) -> None:
    texts = ["same"] * 14 + ["other"] * 6
    plan = planned(root, store, texts=texts, validation={"expectations": [MAIL]})
    verdict = run_to_verdict(store, plan)
    phone = {0, 7, 14}
    assert verdict.quarantine.rows == 3
    assert verdict.profile.counts == {"succeeded": 17, "invalid": 3}
    assert len(frozen_rows(store, plan)) == 2, "one of each text is sent"
    merge(store, plan.folder)
    assert ids(table_rows(store, "job/results")) == set(range(20)) - phone
    assert ids(table_rows(store, "dead_letters")) == phone
    assert build_report(store, plan, read_account(store, plan.folder)).problems == []


CARRIED = {"output": "ok", "outcome": "lost", "reason": 7, "message": True, "row_id": 3, "custom_id": "c"}


def test_carried_columns_named_as_ours_are_not_taken_for_them(root: Path, store: Store) -> None:
    write_input(root, [{"text": text, **CARRIED} for text in TEXTS])
    expected = [
        {
            "type": "expect_column_values_to_be_in_set",
            "kwargs": {"column": f"in_{name}", "value_set": [value]},
        }
        for name, value in CARRIED.items()
    ]
    deadly = [e | {"on_failure": "dead_letter"} for e in expected]
    answer = {"type": "expect_column_values_to_match_regex", "kwargs": {"column": "output", "regex": "^t"}}
    spec = job(
        root,
        store=str(root),
        input={"path": str(root / "in"), "carry": list(CARRIED)},
        output={"carry_prefix": "in_"},
        validation={"expectations": [SHORT, *deadly, *expected, answer]},
        failure={"max_dead_fraction": 0.5},
        sharding={"max_rows": 20},
    )
    plan = split(store, spec, "run")
    verdict = run_to_verdict(store, plan)
    assert verdict.success
    assert verdict.quarantine.rows == len(LONG)
    merge(store, plan.folder)
    published = table_rows(store, "job/results")
    assert {row["row_id"]: row["output"] for row in published} == {
        i: text for i, text in enumerate(TEXTS) if i not in LONG
    }
    assert {row["in_output"] for row in published} == {"ok"}


def test_replay_mends_them(root: Path, store: Store) -> None:
    plan = planned(root, store)
    run_to_verdict(store, plan)
    merge(store, plan.folder)
    replay = prepare_replay(store, plan.folder, "again", reasons=["expectation_failed"])
    assert ids(frozen_rows(store, replay)) == LONG
    # Half of them fail again.
    commit_run(store, replay, answer=lambda r: "short" if r["row_id"] % 2 else r["input"]["text"])
    reconcile(store, replay.folder)
    assert validate(store, replay.folder).quarantine.rows == 6
    merge(store, replay.folder)
    assert ids(table_rows(store, "job/results", run_id="run")) == set(range(60)) - {
        i for i in LONG if not i % 2
    }
    letters = {row["row_id"]: row for row in table_rows(store, "dead_letters")}
    assert {row["status"] for i, row in letters.items() if i % 2} == {"resolved"}
    assert {row["status"] for i, row in letters.items() if not i % 2} == {"replayed"}
    standing = standing_of(store, plan)
    assert (standing.succeeded, standing.resolved, standing.dead) == (48, 6, 6)


def test_too_many_of_them_hold_the_results(root: Path, store: Store) -> None:
    plan = planned(root, store, failure={"max_dead_fraction": 0.1})
    with pytest.raises(GateError, match=r"dead letters: found 20\.0% .*mostly expectation_failed \(12\)"):
        run_to_verdict(store, plan)
    with pytest.raises(GateError):
        merge(store, plan.folder)


def test_mostly_is_still_a_limit(root: Path, store: Store) -> None:
    for share, held in ((0.9, True), (0.75, False)):
        own = SHORT | {"kwargs": {"column": "output", "max_value": 10, "mostly": share}}
        plan = planned(root, store, f"run-{share}", validation={"expectations": [own]})
        if held:
            with pytest.raises(GateError, match=r"12 of 60 values fail.*required at least 90\.0%"):
                run_to_verdict(store, plan)
        else:
            assert run_to_verdict(store, plan).quarantine.rows == 12


def test_every_row_is_looked_at_whatever_the_sample(root: Path, store: Store) -> None:
    plan = planned(root, store, validation={"expectations": [SHORT], "sample_rows": 3})
    assert run_to_verdict(store, plan).quarantine.rows == 12
    kept = json.loads(store.read_bytes(RunLayout(plan.folder).expectations("shard-00000-rows-000")))
    assert "unexpected_index_list" not in kept[0]["result"]


def test_job_wide(root: Path, store: Store) -> None:
    """`on_failure: dead_letter` goes for what is critical and judges rows alone; the rest holds."""
    warned = MAIL | {"severity": "warning"}
    del warned["on_failure"]
    mean = {"type": "expect_column_mean_to_be_between", "kwargs": {"column": "output_tokens", "max_value": 1}}
    own = SHORT | {"on_failure": "hold"}
    validation = {"on_failure": "dead_letter", "expectations": [warned]}
    plan = planned(root, store, validation=validation)
    verdict = run_to_verdict(store, plan)
    assert (verdict.quarantine.rows, verdict.publish) == (0, True)
    for number, expectation in enumerate((mean, own)):
        plan = planned(
            root, store, f"held-{number}", validation={**validation, "expectations": [expectation]}
        )
        with pytest.raises(GateError, match="held back"):
            run_to_verdict(store, plan)


def test_merge_wants_the_verdict_it_depends_on(root: Path, store: Store) -> None:
    plan = planned(root, store)
    commit_run(store, plan, answer=lambda row: row["input"]["text"])
    reconcile(store, plan.folder)
    with pytest.raises(StaleLedgerError, match=r"not validated .* clear validate"):
        merge(store, plan.folder)
    line = validate(store, plan.folder).quarantine.shards[0]
    store.write_bytes(line.key, b"something else")
    with pytest.raises(CorruptError, match="not what validate wrote: clear validate"):
        merge(store, plan.folder)
    assert table_rows(store, "job/results") == []
    validate(store, plan.folder)
    assert quarantined_rows(store, line).num_rows == line.rows
    merge(store, plan.folder)


@pytest.mark.parametrize(
    ("expectation", "message"),
    [
        (
            SHORT | {"on_failure": "bury"},
            r"expectations\.0\.on_failure: `bury` is none of hold, warn, dead_letter",
        ),
        (SHORT | {"severity": "warning"}, r"`dead_letter` is for critical expectations"),
        (
            {
                "type": "expect_column_values_to_be_unique",
                "kwargs": {"column": "output"},
                "on_failure": "dead_letter",
            },
            r"judge each row by itself, and `expect_column_values_to_be_unique` is not one",
        ),
    ],
)
def test_what_cannot_be_is_refused(root: Path, expectation: dict[str, Any], message: str) -> None:
    with pytest.raises(SpecError, match=message):
        check_expectations(make_spec(root, validation={"expectations": [expectation]}))
