"""The plan: what a run will do, frozen before it starts."""

from __future__ import annotations

from pydantic import Field

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.store import Store


class InputFile(Document):
    """One file of the input snapshot. `version` is an ETag, a Delta version, or a mtime in ns."""

    uri: str
    size: int
    version: str


class InputSnapshot(Document):
    """Which input the run read."""

    files: list[InputFile]
    rows: int
    columns: dict[str, str] = Field(description="Arrow type of every input column, as text.")
    carry_schema: str | None = Field(
        None, description="Base64 of the Arrow IPC schema of the carried columns, to restore exact types."
    )


class PlannedShard(Document):
    """One shard. `rows` counts input rows; `sent` those in its rows file; the rest are copies."""

    shard: int
    rows: int
    sent: int
    predicted_tokens: int
    rows_key: str = Field(description="Key of the rows file.")
    rows_bytes: int
    rows_sha256: str
    copies_key: str | None = Field(None, description="Key of the copies file, if rows were deduplicated.")
    pilot: bool = Field(False, description="It runs, and is judged, before all others.")


class KeptRows(Document):
    """Rows of an incremental run that are not sent: they keep the result of the last published run."""

    key: str = Field(description="Key of the file that lists them.")
    rows: int = Field(description="Input rows that keep their result.")
    removed: int = Field(description="Rows of the last run that are gone from the input.")
    prior_run_id: str = Field(description="The last published run.")
    prior_created_at: Timestamp = Field(
        "", description="When that run was planned: its rows by a later plan are other rows."
    )
    prior_output: str | None = Field(None, description="That run's `output.column`, if its plan is there.")


class ReplayOf(Document):
    """The run whose dead letters a replay sends again; row ids are that run's."""

    run_id: str
    folder: str
    generation: int
    created_at: Timestamp = Field(description="When that run was planned, ISO 8601.")
    fingerprint: str = Field(description="That run's.")
    reasons: list[str] = Field(description="Reasons that were asked for; empty for all.")


class Plan(Document):
    """A run's plan. Its shards' rows and the kept ones add up to `input.rows`."""

    format_version: FormatVersion = 1
    job: str
    run_id: str = Field(description="Airflow's run id (or the caller's), as it is.")
    generation: int = 1
    folder: str = Field(description="The run's folder in the store.")
    created_at: Timestamp = Field(description="ISO 8601, UTC.")
    epoch: str = Field(description="The split attempt that wrote it.")
    fingerprint: str
    spec: JobSpec
    input: InputSnapshot
    shards: list[PlannedShard]
    warnings: list[str] = Field(default_factory=list)
    kept: KeptRows | None = Field(None, description="Incremental runs: what is not sent.")
    changes: dict[str, int] = Field(
        default_factory=dict, description="Incremental runs: input rows by why they run, or `unchanged`."
    )
    replay_of: ReplayOf | None = Field(None, description="Replays: the run that is repaired.")

    @property
    def rows(self) -> int:
        """Input rows over all shards: those that this run answers."""
        return sum(s.rows for s in self.shards)

    @property
    def answers_whole_input(self) -> bool:
        """Whether every row of the input is answered here: no result is kept, and no run repaired."""
        return self.replay_of is None and not (self.kept and self.kept.rows)


def check_is_run(store: Store, folder: str) -> None:
    """Raise `InputError` if a folder holds no run; its plan may be one that cannot be read."""
    if not store.exists(RunLayout(folder).plan):
        raise InputError(f"{store.uri_of(folder)} is no run: it has no plan.json")
