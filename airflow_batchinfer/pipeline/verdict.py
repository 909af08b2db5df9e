"""The verdict: what validation found, and whether the run's results may be published."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from airflow_batchinfer.pipeline.judge_scores import JudgeScores
from airflow_batchinfer.pipeline.labels import LabelScores
from airflow_batchinfer.pipeline.profile import Profile
from airflow_batchinfer.pipeline.quarantine import Quarantine
from airflow_batchinfer.run.document import Document, FormatVersion, Timestamp

Origin = Literal["task", "spec", "suite", "limit", "drift"]
Severity = Literal["critical", "warning", "info"]


class Check(Document):
    """One check over the whole run: a Great Expectation, or one of the package's own limits."""

    name: str = Field(description="For people, e.g. `output: values to be in set`.")
    kind: str = Field(description="Type of the expectation, or the spec's field that sets the limit.")
    origin: Origin = Field(description="Who asked for it.")
    severity: Severity = "critical"
    success: bool
    observed: str = Field(description="What was measured, in words.")
    required: str = Field("", description="What was asked for, in words.")
    checked: int | None = Field(None, description="Values looked at.")
    unexpected: int | None = Field(None, description="Values that failed.")
    dead_lettered: int = Field(0, description="Rows that became dead letters because of it.")
    examples: list[dict[str, Any]] = Field(default_factory=list, description="A few that failed, by row.")
    error: str | None = Field(None, description="Why it could not be evaluated.")

    @property
    def blocks(self) -> bool:
        """Whether it failed and is severe enough to fail the run's verdict."""
        return not self.success and self.severity == "critical"


class Verdict(Document):
    """Result of validation. `publish` is what merge and the gate obey."""

    format_version: FormatVersion = 1
    created_at: Timestamp
    ledger_sha256: str = Field(description="Digest of the ledger it judged.")
    success: bool = Field(description="No critical check failed.")
    publish: bool = Field(description="No limit is broken, and no expectation unless `on_failure: warn`.")
    quarantine: Quarantine = Field(Quarantine(), description="Rows it takes out of the results.")
    message: str = Field(description="One sentence for the log; with what to do if it failed.")
    checks: list[Check]
    rows_checked: int = Field(description="Rows of the results that expectations looked at.")
    details: list[str] = Field(default_factory=list, description="Keys of Great Expectations' own JSON.")
    data_docs: str | None = Field(None, description="Key of Great Expectations' page of the run.")
    profile: Profile = Field(description="What the answers look like; the next run is compared with it.")
    judge: JudgeScores | None = Field(None, description="What the judge said of a sample.")
    labels: LabelScores | None = Field(None, description="Answers against the truth column.")
