"""Scratch folders: what killed steps left goes, and nothing else."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from airflow_batchinfer.pipeline.scratch import scratch_folder

pytestmark = pytest.mark.airflow_env


def age(folder: Path, days: float) -> Path:
    then = time.time() - days * 86_400
    os.utime(folder, (then, then))
    return folder


def test_what_a_killed_step_left_is_removed_after_a_week(scratch: Path) -> None:
    with scratch_folder("split") as folder:
        (folder / "rows").write_bytes(b"x")
        left = folder.rename(folder.with_name(folder.name + "-killed"))
        folder.mkdir()
    age(left, 6)
    with scratch_folder("merge"):
        assert left.exists()
    age(left, 8)
    with scratch_folder("merge"):
        assert not left.exists()


@pytest.mark.parametrize("name", ["batchinfer-store", "batchinfer-split-results", "tickets"])
def test_a_store_beside_it_stays(scratch: Path, name: str) -> None:
    """A folder's time changes only when something is put right into it, which stores see seldom."""
    store = scratch / name
    (store / "job").mkdir(parents=True)
    age(store, 30)
    with scratch_folder("split"):
        pass
    assert (store / "job").exists()
