"""Progress: what one attempt has done so far, rewritten every few seconds."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Literal

from pydantic import Field

from airflow_batchinfer.errors import UnreadableError
from airflow_batchinfer.run.commit import Tokens
from airflow_batchinfer.run.document import Document, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.store import Store


class Progress(Document):
    """One attempt at one shard, earlier attempts' parts included.

    All counts but `counts` are of sent rows: a row that was sent also answers its copies, which were not.
    """

    shard: int
    epoch: str
    state: Literal["loading", "running", "draining", "committed", "reclaimed", "stopped", "failed"]
    message: str = ""
    updated_at: Timestamp
    sent: int
    done: int = Field(description="Rows with an outcome, durable or not.")
    durable: int = Field(description="Rows with an outcome in a part.")
    resumed: int = Field(0, description="Rows taken from earlier attempts' parts.")
    counts: dict[str, int] = Field(description="Input rows by outcome, copies included.")
    tokens: Tokens = Field(description="Paid by this attempt.")
    rows_per_second: float = Field(0.0, description="Over the last minute.")
    tokens_per_second: float = Field(0.0, description="Prompt and output, over the last minute.")
    in_flight: int = 0
    engine_restarts: int = 0
    held_seconds: float = 0.0
    seconds_left: float | None = Field(None, description="At the last minute's rate; none if unknown.")

    def is_silent(self, interval: float) -> bool:
        """Whether its worker is taken for dead, see `silent_after`."""
        if not self.updated_at:
            return True
        silence = datetime.now(UTC) - datetime.fromisoformat(self.updated_at)
        return silence.total_seconds() > silent_after(interval)

    def line(self) -> str:
        """One line for a log; the dead are of the input, as in the report."""
        left = "" if self.seconds_left is None else f" · {_duration(self.seconds_left)} left"
        bad = sum(self.counts.values()) - self.counts.get("succeeded", 0)
        return (
            f"shard {self.shard:04d} {self.state}: {self.done}/{self.sent} rows ({bad} dead, "
            f"{self.resumed} resumed) · {self.rows_per_second:.1f} rows/s · "
            f"{self.tokens_per_second:.0f} tokens/s · {self.in_flight} in flight · "
            f"{self.engine_restarts} restarts{left}"
        )


def latest_progress(store: Store, layout: RunLayout, shard: int) -> Progress | None:
    """The newest attempt's progress; one that cannot be read counts as none."""
    keys = [i.key for i in store.list(layout.shard(shard)) if i.key.endswith("/progress.json")]
    for key in sorted(keys, reverse=True):
        try:
            return Progress.read(store, key)
        except (UnreadableError, FileNotFoundError):
            continue
    return None


def silent_after(interval: float) -> float:
    """Seconds without news of a worker on another machine after which it is taken for dead.

    Args:
        interval: seconds between its progress.
    """
    return max(60.0, 10 * interval)


def _duration(seconds: float) -> str:
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 3600 else f"{whole // 3600} h {whole % 3600 // 60} min"
