"""Which file of a Delta table's log is damaged: delta-rs says only that one is."""

from __future__ import annotations

import io
import json

import pyarrow.parquet as pq

from airflow_batchinfer.errors import BatchInferError
from airflow_batchinfer.run.parquet import UNREADABLE
from airflow_batchinfer.store import Store


def damaged_log_file(store: Store, folder: str = "") -> str | None:
    """Address of the newest damaged file that a reader of the table needs; none if none is found.

    Args:
        store: where.
        folder: the table's.
    """
    try:
        keys = sorted((info.key for info in store.list(f"{folder}/_delta_log".lstrip("/"))), reverse=True)
        for key in keys:
            if not _is_sound(store, key):
                return store.uri_of(key)
            if key.endswith(".checkpoint.parquet"):
                break  # nothing older is read
    except (BatchInferError, FileNotFoundError):  # the error that is being explained is the better one
        pass
    return None


def _is_sound(store: Store, key: str) -> bool:
    try:
        if key.endswith(".parquet"):
            pq.read_table(io.BytesIO(store.read_bytes(key)))
        elif key.endswith(".json"):
            actions = [json.loads(line) for line in store.read_bytes(key).splitlines()]
            return all(isinstance(action, dict) for action in actions)
    except (ValueError, RecursionError, *UNREADABLE):
        return False
    return True
