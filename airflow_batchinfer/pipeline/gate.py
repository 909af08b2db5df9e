"""The last word on a run: is it complete, published from what was proven, and reported?"""

from __future__ import annotations

from typing import Any

from airflow_batchinfer.errors import GateError, IncompleteRunError
from airflow_batchinfer.pipeline.accounting import Account, current_ledger
from airflow_batchinfer.pipeline.merge import MergeResult
from airflow_batchinfer.pipeline.pilot import read_pilot
from airflow_batchinfer.pipeline.report import Report
from airflow_batchinfer.pipeline.split import load_plan
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.stop import read_stop
from airflow_batchinfer.store import Store

_DOWNSTREAM = "with its downstream tasks"


def check_run(store: Store, folder: str) -> dict[str, Any]:
    """Pass only a run whose ledger is complete, whose tables and report come from that very ledger.

    Reads documents, never task states. Returns a summary small enough for XCom.

    Raises:
        IncompleteRunError: no ledger, or a ledger with open shards; says which and what to clear.
        StaleLedgerError: a commit or the plan is newer than the ledger.
        GateError: the run was stopped, validation holds the results, or merge or report are missing or
            out of date.
        CorruptError: a document is damaged.
    """
    layout = RunLayout(folder)
    ledger = _ledger(store, layout, _halted(store, folder))
    current_ledger(store, load_plan(store, folder))
    digest = ledger.digest()
    verdict = _verdict(store, layout, digest)
    account = Account(ledger, verdict.quarantine)
    _check_merge(store, layout, account)
    report = _report(store, layout, account)
    return {
        "folder": folder,
        "rows": ledger.rows,
        "counts": account.counts,
        "tokens": ledger.tokens.total,
        "judge_tokens": report.judge.tokens.total if report.judge else 0,
        "checks_passed": verdict.success,
        "accepted_rows_per_held_second": round(report.throughput.accepted_rows_per_held_second, 3),
        "report": store.uri_of(layout.report("html")),
        "results_table": report.places["results table"],
        "dead_letter_table": report.places["dead-letter table"],
    }


def _halted(store: Store, folder: str) -> str | None:
    """Why the run was stopped on purpose, if it was."""
    stop = read_stop(store, folder)
    if stop is not None:
        return f"{folder} was {stop.advice(folder)}."
    pilot = read_pilot(store, folder)
    return pilot.message if pilot is not None and not pilot.success else None


def _ledger(store: Store, layout: RunLayout, halted: str | None) -> Ledger:
    try:
        ledger = Ledger.read(store, layout.ledger)
    except FileNotFoundError as error:
        raise IncompleteRunError(
            f"{layout.folder} has no ledger: reconcile has not run. Clear reconcile {_DOWNSTREAM}."
        ) from error
    if not ledger.complete and halted is not None:
        raise GateError(halted)
    if not ledger.complete:
        problems = "; ".join(ledger.problems[:5]) or "its sums do not add up"
        raise IncompleteRunError(
            f"{layout.folder} is not complete: {problems}. Clear the failed shards {_DOWNSTREAM}."
        )
    return ledger


def _verdict(store: Store, layout: RunLayout, digest: str) -> Verdict:
    try:
        verdict = Verdict.read(store, layout.validation)
    except FileNotFoundError as error:
        raise GateError(f"{layout.folder} was not validated. Clear validate {_DOWNSTREAM}.") from error
    if verdict.ledger_sha256 != digest:
        raise GateError(
            f"{layout.folder} was validated before the newest ledger. Clear validate {_DOWNSTREAM}."
        )
    if not verdict.publish:
        raise GateError(verdict.message)
    return verdict


def _check_merge(store: Store, layout: RunLayout, account: Account) -> None:
    try:
        merged = MergeResult.read(store, layout.merge)
    except FileNotFoundError as error:
        raise GateError(
            f"{layout.folder} is complete but not published. Clear merge {_DOWNSTREAM}."
        ) from error
    if not merged.is_of(account):
        raise GateError(
            f"{layout.folder} was published from an older ledger or verdict. Clear merge {_DOWNSTREAM}."
        )


def _report(store: Store, layout: RunLayout, account: Account) -> Report:
    try:
        report = Report.read(store, layout.report("json"))
    except FileNotFoundError as error:
        raise GateError(f"{layout.folder} has no report. Clear report.") from error
    if (report.ledger_sha256, report.quarantine_sha256) != account.digests or report.status != "published":
        raise GateError(f"The report of {layout.folder} is out of date. Clear report.")
    return report
