"""Housekeeping: delete old runs, parts that nobody names, table files that no version needs, and what
killed writers left half-written.

Runs and tables are apart: deleting a run takes its plan, shards and reports, never its rows in the
results or dead-letter table. A run without its folder cannot be replayed any more. Its generations and its
replays belong to it: they stay and go together, since what is done with one of them reads the others.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import groupby

from deltalake.exceptions import DeltaError
from pydantic import Field

from airflow_batchinfer.errors import CorruptError, SpecError, StoreError, UnreadableError
from airflow_batchinfer.pipeline.tables import delta_words, open_table
from airflow_batchinfer.pipeline.verdict import Verdict
from airflow_batchinfer.run.commit import commits_of
from airflow_batchinfer.run.document import Document
from airflow_batchinfer.run.layout import (
    DEAD_LETTERS,
    RunLayout,
    first_generation,
    results_table,
    runs_dir,
)
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.store import ObjectInfo, Store

log = logging.getLogger(__name__)

ORPHAN_AGE = timedelta(days=1)
"""Younger objects and uploads may belong to an attempt that is still at work."""

VACUUM_AGE = timedelta(days=7)
"""Table files that younger versions do not need; a reader of an older version would miss them."""


class Removed(Document):
    """What was deleted, or would be."""

    runs: list[str] = Field(default_factory=list, description="Folders of whole runs.")
    objects: int = 0
    bytes: int = 0


def delete_runs(store: Store, job: str, older_than: timedelta, *, dry_run: bool = False) -> Removed:
    """Delete a job's runs, each with its generations and replays, in none of whose folders anything was
    written for so long; tables stay as they are.

    The plan goes first, so that a run is either whole or not there; what an interrupted deletion leaves is
    a folder without a plan, which the next one takes.

    Raises:
        SpecError: `older_than` is negative: each run is older, those at work too.
        StoreError: the store cannot be read or written.
    """
    if older_than < timedelta(0):
        raise SpecError(f"older_than: give a time that is not negative (got {older_than})")
    oldest = time.time() - older_than.total_seconds()
    written = {f: max(i.modified for i in found) for f, found in _run_folders(store, job)}
    folders: list[str] = []
    objects = size = 0
    for together in _belonging_together(store, written):
        if max(written[folder] for folder in together) >= oldest:
            continue
        for folder in together:
            found = list(store.list(folder))
            folders.append(folder)
            objects += len(found)
            size += sum(info.size for info in found)
            if not dry_run:
                store.delete(RunLayout(folder).plan)
                for info in found:
                    store.delete(info.key)
                store.remove_unfinished(folder, older_than)
    return Removed(runs=folders, objects=objects, bytes=size)


def delete_orphans(
    store: Store, job: str, older_than: timedelta = ORPHAN_AGE, *, dry_run: bool = False
) -> Removed:
    """Delete, in all runs of a job, what no plan, no commit and no verdict names.

    Those are the rows files of split attempts that another one overtook, quarantines of earlier verdicts,
    and in shards that have a commit, parts that none of its commits names. A shard without a commit keeps
    all its parts: they are what it resumes from. A run of which a document cannot be read is left as it is.
    """
    oldest = time.time() - older_than.total_seconds()
    objects = size = 0
    for folder, found in _run_folders(store, job):
        try:
            plan = Plan.read(store, RunLayout(folder).plan)
            orphans = [info for info in _orphans(store, plan, found) if info.modified < oldest]
        except FileNotFoundError:
            continue
        except UnreadableError as error:
            log.warning("%s is left as it is: %s", folder, error)
            continue
        for info in orphans:
            objects += 1
            size += info.size
            if not dry_run:
                store.delete(info.key)
    return Removed(objects=objects, bytes=size)


def vacuum_tables(
    store: Store, job: str, older_than: timedelta = VACUUM_AGE, *, dry_run: bool = False
) -> Removed:
    """Delete files of the job's results table and the dead-letter table that newer versions replaced.

    Failed publications leave such files too. Rows of the current version are never touched.

    Raises:
        StoreError: a table cannot be read or written.
    """
    objects = size = 0
    for key in (results_table(job), DEAD_LETTERS):
        table = open_table(store, key)
        if table is None:
            continue
        hours = int(older_than.total_seconds() // 3600)
        try:
            # In full: a publication that was killed or tried again leaves files that no log has ever named.
            stale = table.vacuum(
                retention_hours=hours, dry_run=True, enforce_retention_duration=False, full=True
            )
        except (DeltaError, OSError) as error:
            raise StoreError(f"cannot vacuum {store.uri_of(key)}: {delta_words(error)}") from error
        paths = {f"{key}/{path}" for path in stale}  # with those that are gone and the log still names
        for info in [info for info in store.list(key) if info.key in paths]:
            objects += 1
            size += info.size
            if not dry_run:  # not by delta-rs, which stumbles over some servers' answer to many at once
                store.delete(info.key)
    return Removed(objects=objects, bytes=size)


def delete_unfinished(
    store: Store, job: str, older_than: timedelta = ORPHAN_AGE, *, dry_run: bool = False
) -> Removed:
    """Delete what killed writers left half-written, in a job's folder and in the dead-letter table.

    On S3 those are multipart uploads that were neither completed nor aborted: no listing of objects shows
    them, and they are paid for. Their sizes are not known.
    """
    return Removed(
        objects=sum(store.remove_unfinished(key, older_than, dry_run=dry_run) for key in (job, DEAD_LETTERS))
    )


def _run_folders(store: Store, job: str) -> Iterator[tuple[str, list[ObjectInfo]]]:
    """Each run's folder and its objects; a listing is sorted, so a run's objects stand together."""
    depth = runs_dir(job).count("/") + 2
    for folder, found in groupby(
        store.list(runs_dir(job)), lambda info: "/".join(info.key.split("/")[:depth])
    ):
        yield folder, list(found)


def _belonging_together(store: Store, folders: Iterable[str]) -> Iterator[list[str]]:
    """The folders of each run, its generations and its replays; of a run's generations, the newest first:
    whoever looks for the newest counts up to the first that is not there."""
    families: dict[str, list[str]] = {}
    for folder in folders:
        families.setdefault(first_generation(_repaired(store, folder) or folder), []).append(folder)
    for family in families.values():
        yield sorted(family, key=lambda folder: (len(folder), folder), reverse=True)


def _repaired(store: Store, folder: str) -> str | None:
    """The folder of the run that a replay repairs; none if it is no replay, or does not say."""
    with suppress(FileNotFoundError, CorruptError, KeyError, TypeError):
        replay_of = Plan.read_fields(store, RunLayout(folder).plan)["replay_of"]
        return str(replay_of["folder"]) if replay_of else None
    return None


def _orphans(store: Store, plan: Plan, found: list[ObjectInfo]) -> Iterator[ObjectInfo]:
    layout = RunLayout(plan.folder)
    named = {shard.rows_key for shard in plan.shards} | {s.copies_key for s in plan.shards if s.copies_key}
    if plan.kept:
        named.add(plan.kept.key)
    committed: set[str] = set()
    for shard in plan.shards:
        commits, _ = commits_of(store, layout, shard.shard)
        if commits:
            committed.add(layout.shard(shard.shard))
        named |= {part.key for commit in commits for part in commit.parts}
    with suppress(FileNotFoundError):
        named |= {line.key for line in Verdict.read(store, layout.validation).quarantine.shards}
    for info in found:
        name = info.key.rpartition("/")[2]
        if info.key in named or info.key.startswith(f"{layout.judges}/"):
            continue
        if name.startswith(("rows-", "copies-", "kept-", "quarantine-", ".writable-")) or (
            name.startswith("part-") and info.key.rsplit("/", 2)[0] in committed
        ):
            yield info
