"""The stop marker: while it stands in a run's folder, its workers drain, checkpoint and exit."""

from __future__ import annotations

from datetime import UTC, datetime

from airflow_batchinfer.errors import UnreadableError
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store


class Stop(Document):
    """Who stopped the run, when and why."""

    format_version: FormatVersion = 1
    created_at: Timestamp
    by: str
    """For instance `worker, shard 0003`, or a person's name."""
    reason: str

    def advice(self, folder: str) -> str:
        """What happened and what to do, in one line."""
        return (
            f"stopped by {self.by}: {self.reason}. What is finished is kept. Fix the cause or change the "
            f"limit, run `airflow_batchinfer resume {folder}`, and clear the failed tasks with downstream"
        )


def set_stop(store: Store, folder: str, reason: str, by: str) -> Stop:
    """Set the marker; if there is one, it stays and is returned. Raises `StoreError`."""
    standing = read_stop(store, folder)
    if standing is not None:
        return standing
    stop = Stop(created_at=datetime.now(UTC).isoformat(timespec="seconds"), by=by, reason=reason)
    stop.write(store, RunLayout(folder).stop)
    return stop


def read_stop(store: Store, folder: str) -> Stop | None:
    """The marker, or none. One that cannot be read stops all the same. Raises `StoreError`."""
    key = RunLayout(folder).stop
    try:
        return Stop.find(store, key)
    except UnreadableError:
        return Stop(created_at="", by=store.uri_of(key), reason="its content is no stop marker")


def clear_stop(store: Store, folder: str) -> bool:
    """Remove the marker, so that cleared tasks resume; says whether there was one. Raises `StoreError`."""
    stood = store.exists(RunLayout(folder).stop)
    store.delete(RunLayout(folder).stop)
    return stood
