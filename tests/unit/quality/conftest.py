from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.quality.runs import MadeRun


@pytest.fixture
def publish() -> Callable[[MadeRun], None]:
    """Leave behind what merge leaves when it published the run's ledger."""

    def write(run: MadeRun) -> None:
        from airflow_batchinfer.pipeline.accounting import account_of
        from airflow_batchinfer.pipeline.merge import MergeResult
        from airflow_batchinfer.run.ledger import Ledger

        ledger = Ledger.read(run.store, run.layout.ledger)
        ledger_sha256, quarantine_sha256 = account_of(run.store, run.folder, ledger).digests
        MergeResult(
            created_at="2026-11-29T17:01:20+00:00",
            ledger_sha256=ledger_sha256,
            quarantine_sha256=quarantine_sha256,
            results_table=run.store.uri_of("job/results"),
            results_version=0,
            results=ledger.counts["succeeded"],
            dead_letter_table=run.store.uri_of("dead_letters"),
            dead_letters_version=0,
            dead_letters=ledger.rows - ledger.counts["succeeded"],
        ).write(run.store, run.layout.merge)

    return write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"
