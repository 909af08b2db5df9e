"""Where a run's objects stand in the store. All keys of the package are made here."""

from __future__ import annotations

import hashlib
import re

_LONGEST_NAME = 200

DEAD_LETTERS = "dead_letters"
"""Folder of the dead-letter table, all jobs."""


def safe_run_id(run_id: str) -> str:
    """Airflow's run id as a folder name: what is not a letter, digit, `.`, `_` or `-` becomes `-`.

    No name is `.` or `..`, and none is longer than file systems take: a hash stands for the rest of it.
    """
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", run_id).strip("-")
    if len(name) > _LONGEST_NAME:
        name = f"{name[:_LONGEST_NAME]}-{hashlib.sha256(run_id.encode('utf-8', 'replace')).hexdigest()[:8]}"
    return name if name.strip(".") else f"run{name}"


def results_table(job: str) -> str:
    """Folder of a job's results table."""
    return f"{job}/results"


def published_runs(job: str) -> str:
    """The note of a job's last published runs."""
    return f"{job}/published.json"


def runs_dir(job: str) -> str:
    """Folder of a job's runs."""
    return f"{job}/runs"


def run_dir(job: str, run_id: str, generation: int = 1) -> str:
    """Folder of one generation of a run; later generations stand beside the first."""
    suffix = "" if generation == 1 else f"~{generation}"
    return f"{runs_dir(job)}/{safe_run_id(run_id)}{suffix}"


def first_generation(folder: str) -> str:
    """The folder of the first generation of the run to which a generation's folder belongs."""
    return folder.partition("~")[0]


class RunLayout:
    """The keys of one generation of a run, below its folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder.rstrip("/")

    @property
    def plan(self) -> str:
        """The plan."""
        return f"{self.folder}/plan.json"

    @property
    def ledger(self) -> str:
        """The ledger that reconcile writes."""
        return f"{self.folder}/ledger.json"

    @property
    def validation(self) -> str:
        """The verdict on the outputs."""
        return f"{self.folder}/validation.json"

    @property
    def pilot(self) -> str:
        """The judgement on the pilot."""
        return f"{self.folder}/pilot.json"

    @property
    def merge(self) -> str:
        """What merge published."""
        return f"{self.folder}/merge.json"

    @property
    def pruned(self) -> str:
        """What merge had published, after the run was taken out of the tables again."""
        return f"{self.folder}/merge.pruned.json"

    @property
    def stop(self) -> str:
        """The stop marker: while it exists, workers drain and exit."""
        return f"{self.folder}/stop.json"

    def expectations(self, name: str) -> str:
        """Great Expectations' own results, for a shard or for the run's sample."""
        return f"{self.folder}/validation/{name}.json"

    @property
    def data_docs(self) -> str:
        """Great Expectations' page of the run."""
        return f"{self.folder}/validation/data_docs.html"

    @property
    def judges(self) -> str:
        """Folder of the judges' runs: each has a plan and shards as the run itself."""
        return f"{self.folder}/judge"

    def judge(self, key: str) -> str:
        """Folder of one judge's run over one state of the answers."""
        return f"{self.judges}/{key}"

    def quarantine(self, shard: int, sha256: str) -> str:
        """The rows of one shard that validation takes out of the results, by the file's hash."""
        return f"{self.folder}/validation/quarantine-{shard:05d}-{sha256[:16]}.parquet"

    def launches(self, shard: int) -> str:
        """Folder of what became of the pods launched for the bundle whose first shard is this."""
        return f"{self.folder}/launches/{shard:05d}"

    def launch(self, shard: int, pod: str) -> str:
        """What became of one pod."""
        return f"{self.launches(shard)}/{pod}.json"

    def review(self, extension: str) -> str:
        """The sheet that a person fills in (`csv`), and what it says (`json`)."""
        return f"{self.folder}/review.{extension}"

    def report(self, extension: str) -> str:
        """The report, `html` or `json`."""
        return f"{self.folder}/report.{extension}"

    def shard(self, shard: int) -> str:
        """Folder of one shard."""
        return f"{self.folder}/shards/{shard:05d}"

    def rows(self, shard: int, epoch: str) -> str:
        """The shard's frozen rows, as written by the split attempt `epoch`."""
        return f"{self.shard(shard)}/rows-{epoch}.parquet"

    def copies(self, shard: int, epoch: str) -> str:
        """The rows that are identical to one of the shard's rows and take its answer."""
        return f"{self.shard(shard)}/copies-{epoch}.parquet"

    def kept(self, epoch: str) -> str:
        """The rows of an incremental run that keep their earlier result."""
        return f"{self.folder}/kept-{epoch}.parquet"

    @property
    def replays(self) -> str:
        """Folder of the notes of replays of this run."""
        return f"{self.folder}/replays"

    def replay(self, run_id: str) -> str:
        """The note of one replay of this run."""
        return f"{self.replays}/{safe_run_id(run_id)}.json"

    def attempt(self, shard: int, epoch: str) -> str:
        """Folder of one attempt at a shard."""
        return f"{self.shard(shard)}/{epoch}"

    def part(self, shard: int, epoch: str, index: int) -> str:
        """One part of one attempt."""
        return f"{self.attempt(shard, epoch)}/part-{index:05d}.parquet"

    def progress(self, shard: int, epoch: str) -> str:
        """One attempt's progress."""
        return f"{self.attempt(shard, epoch)}/progress.json"

    def commit(self, shard: int, epoch: str) -> str:
        """One attempt's commit."""
        return f"{self.attempt(shard, epoch)}/commit.json"

    def suspects(self, shard: int, epoch: str) -> str:
        """What one attempt may have in the engine."""
        return f"{self.attempt(shard, epoch)}/suspects.json"
