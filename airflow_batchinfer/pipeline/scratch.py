"""Scratch space: a local folder for one step's intermediate files, gone when the step ends."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from airflow_batchinfer.errors import StoreError

SCRATCH_VARIABLE = "BATCHINFER_SCRATCH"
"""Environment variable that names the folder for scratch files; otherwise the system's own is used."""

_PREFIX = ".batchinfer-scratch-"
"""Nobody gives a folder that is to stay such a name: abandoned ones are removed by it."""

_ABANDONED_SECONDS = 7 * 24 * 3600.0
_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextmanager
def scratch_folder(step: str) -> Iterator[Path]:
    """A new empty folder on local disk, removed at the end whatever happens.

    Args:
        step: the pipeline step, for the folder's name and for messages.

    Raises:
        StoreError: the folder cannot be made, or the disk filled up while it was in use.
    """
    parent = os.environ.get(SCRATCH_VARIABLE) or tempfile.gettempdir()
    try:
        Path(parent).mkdir(parents=True, exist_ok=True)
        _remove_abandoned(Path(parent))
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{step}-", dir=parent))
    except OSError as error:
        raise StoreError(f"{step}: cannot make a scratch folder in {parent}: {error}") from error
    try:
        yield folder
    except OSError as error:
        if error.errno not in _FULL:
            raise
        raise StoreError(
            f"{step}: the disk is full (scratch files are in {parent}): free some space, or set "
            f"{SCRATCH_VARIABLE} to a folder with room for about the size of the input"
        ) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _remove_abandoned(parent: Path) -> None:
    """Remove what killed steps left behind long ago: nobody else would."""
    for folder in parent.glob(f"{_PREFIX}*"):
        try:
            abandoned = time.time() - folder.stat().st_mtime > _ABANDONED_SECONDS
        except OSError:
            continue
        if abandoned:
            shutil.rmtree(folder, ignore_errors=True)
