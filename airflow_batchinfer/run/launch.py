"""Launches: what became of each worker that a runtime started, so that reclaims can be counted."""

from __future__ import annotations

from pydantic import Field

from airflow_batchinfer.run.document import Document, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store

RECLAIMED = "reclaimed"
"""The fate of a worker that had to go through no fault of its own."""


class Launch(Document):
    """One ended pod. Written under the pod's name, so writing it again counts it once."""

    pod: str
    shards: list[int]
    try_number: int = Field(description="Airflow's, of the task that saw it end.")
    fate: str
    message: str = ""
    node: str | None = None
    exit_code: int | None = None
    ended_at: Timestamp = Field(description="ISO 8601, UTC; when its end was seen.")

    def record(self, store: Store, layout: RunLayout) -> None:
        """Write it to its place."""
        self.write(store, layout.launch(self.shards[0], self.pod))


def launches_of(store: Store, layout: RunLayout, shard: int) -> list[Launch]:
    """The ended pods of the bundle whose first shard is this, oldest first."""
    found = [Launch.read(store, info.key) for info in store.list(layout.launches(shard))]
    return sorted(found, key=lambda launch: launch.ended_at)


def reclaims_of(store: Store, layout: RunLayout, shard: int, try_number: int) -> int:
    """How often the bundle was reclaimed during one try of its task."""
    launches = launches_of(store, layout, shard)
    return sum(launch.fate == RECLAIMED and launch.try_number == try_number for launch in launches)
