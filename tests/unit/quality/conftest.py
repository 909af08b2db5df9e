from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.quality.runs import MadeRun


@pytest.fixture
def publish() -> Callable[[MadeRun], None]:
    """Leave behind what merge leaves when it published the run's ledger."""

    def write(run: MadeRun) -> None:
        from airflow_batchinfer.pipeline.accounting import account_of
        from airflow_batchinfer.run.ledger import Ledger

        ledger = Ledger.read(run.store, run.layout.ledger)
        ledger_sha256, quarantine_sha256 = account_of(run.store, run.folder, ledger).digests
        merged: dict[str, Any] = {
            "ledger_sha256": ledger_sha256,
            "quarantine_sha256": quarantine_sha256,
            "created_at": "2026-11-29T17:01:20+00:00",
        }
        run.store.write_bytes(run.layout.merge, json.dumps(merged).encode())

    return write


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"
