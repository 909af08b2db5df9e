from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from airflow_batchinfer.errors import GateError, IncompleteRunError
from airflow_batchinfer.pipeline.gate import check_run
from airflow_batchinfer.pipeline.report import write_report
from airflow_batchinfer.pipeline.validate import validate
from tests.unit.quality.runs import MadeRun, make_run, make_spec, tickets

pytestmark = pytest.mark.airflow_env


def test_only_a_finished_run_passes(root: Path, publish: Callable[[MadeRun], None]) -> None:
    run = make_run(root, tickets(9))
    with pytest.raises(IncompleteRunError, match=r"no ledger.*Clear reconcile"):
        check_run(run.store, run.folder)
    run.reconcile()
    with pytest.raises(GateError, match="Clear validate"):
        check_run(run.store, run.folder)
    validate(run.store, run.folder)
    with pytest.raises(GateError, match="Clear merge"):
        check_run(run.store, run.folder)
    write_report(run.store, run.folder)
    publish(run)
    with pytest.raises(GateError, match="Clear report"):
        check_run(run.store, run.folder)
    write_report(run.store, run.folder)
    summary = check_run(run.store, run.folder)
    assert summary["counts"] == {"succeeded": 9}
    assert summary["report"].endswith("report.html")


def test_incomplete_run_names_its_shards(root: Path) -> None:
    run = make_run(root, tickets(9), uncommitted=[2])
    run.reconcile()
    with pytest.raises(IncompleteRunError, match="shard 0002 has no commit"):
        check_run(run.store, run.folder)


def test_a_newer_ledger_makes_all_that_follows_stale(root: Path, publish: Callable[[MadeRun], None]) -> None:
    run = make_run(root, tickets(9))
    ledger = run.reconcile()
    validate(run.store, run.folder)
    publish(run)
    write_report(run.store, run.folder)
    newer = ledger.model_copy(update={"created_at": "2026-11-29T18:00:00+00:00"})
    newer.write(run.store, run.layout.ledger)
    with pytest.raises(GateError, match="validated before the newest ledger"):
        check_run(run.store, run.folder)
    validate(run.store, run.folder)
    with pytest.raises(GateError, match="published from an older ledger"):
        check_run(run.store, run.folder)


def test_held_results_do_not_pass(root: Path, publish: Callable[[MadeRun], None]) -> None:
    run = make_run(root, tickets(9), lambda _: {"output": "spam"}, spec=make_spec(root))
    run.reconcile()
    with pytest.raises(GateError):
        validate(run.store, run.folder)
    publish(run)
    write_report(run.store, run.folder)
    with pytest.raises(GateError, match="Results held back"):
        check_run(run.store, run.folder)
