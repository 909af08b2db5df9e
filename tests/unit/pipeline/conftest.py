from __future__ import annotations

from pathlib import Path

import pytest

from airflow_batchinfer.store import LocalStore, Store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return LocalStore(tmp_path / "store")


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scratch files go below the test's own folder, and none may be left behind."""
    folder = tmp_path / "scratch"
    monkeypatch.setenv("BATCHINFER_SCRATCH", str(folder))
    return folder
