"""Commands that look after the store: `account`, `delete`, `prune`, `sweep`."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from airflow_batchinfer.cli.command import (
    Command,
    add_folder_argument,
    add_store_arguments,
    days,
    positive,
    store_of,
)
from airflow_batchinfer.errors import InputError

if TYPE_CHECKING:
    from airflow_batchinfer.pipeline.housekeeping import Removed


def account(arguments: argparse.Namespace) -> None:
    """Print what has become of a published run's rows, replays included, counted in the tables."""
    from airflow_batchinfer.pipeline.split import load_plan
    from airflow_batchinfer.pipeline.standing import standing_of

    store = store_of(arguments)
    plan = load_plan(store, arguments.folder)
    try:
        standing = standing_of(store, plan)
    except FileNotFoundError as error:
        raise InputError(f"{store.uri_of(plan.folder)} has no ledger yet: reconcile writes it") from error
    print(f"rows         {standing.rows:>12,}")
    print(f"  succeeded  {standing.succeeded:>12,}")
    print(f"  resolved   {standing.resolved:>12,}  (by replays)")
    print(f"  dead       {standing.dead:>12,}")
    for status, letters in sorted(standing.letters.items()):
        print(f"dead letters {letters:>12,}  {status}")


def delete(arguments: argparse.Namespace) -> None:
    """Delete a job's old runs; tables stay."""
    from airflow_batchinfer.pipeline.housekeeping import delete_runs

    age, dry_run = arguments.older_than_days, arguments.dry_run
    removed = delete_runs(store_of(arguments), arguments.job, age, dry_run=dry_run)
    for folder in removed.runs:
        print(folder)
    print(_summary(removed, dry_run))


def prune(arguments: argparse.Namespace) -> None:
    """Take a job's old runs out of the tables; their folders stay."""
    from airflow_batchinfer.pipeline.housekeeping import vacuum_tables
    from airflow_batchinfer.pipeline.prune import prune_tables

    store, dry_run = store_of(arguments), arguments.dry_run
    pruned = prune_tables(store, arguments.job, arguments.keep_runs, dry_run=dry_run)
    for run_id in pruned.runs:
        print(run_id)
    for run_id, folder in pruned.held.items():
        print(f"{run_id} stays: {folder} still needs its rows")
    done = "would be deleted" if dry_run else "deleted"
    print(f"rows: {pruned.results:,} results, {pruned.dead_letters:,} dead letters {done}")
    print(f"tables: {_summary(vacuum_tables(store, arguments.job, dry_run=dry_run), dry_run)}")


def sweep(arguments: argparse.Namespace) -> None:
    """Delete parts that no commit names, table files that no version needs, and half-written leftovers."""
    from airflow_batchinfer.pipeline.housekeeping import delete_orphans, delete_unfinished, vacuum_tables

    store = store_of(arguments)
    orphans = delete_orphans(store, arguments.job, dry_run=arguments.dry_run)
    print(f"runs: {_summary(orphans, arguments.dry_run)}")
    vacuumed = vacuum_tables(store, arguments.job, dry_run=arguments.dry_run)
    print(f"tables: {_summary(vacuumed, arguments.dry_run)}")
    unfinished = delete_unfinished(store, arguments.job, dry_run=arguments.dry_run)
    print(f"half-written: {_summary(unfinished, arguments.dry_run)}")


def _summary(removed: Removed, dry_run: bool) -> str:
    done = "would be deleted" if dry_run else "deleted"
    return f"{removed.objects:,} objects, {removed.bytes:,} bytes {done}"


def _job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument("--dry-run", action="store_true", help="only say what would be deleted")
    add_store_arguments(parser)


def _delete_arguments(parser: argparse.ArgumentParser) -> None:
    _job_arguments(parser)
    parser.add_argument(
        "--older-than-days",
        metavar="DAYS",
        type=days,
        required=True,
        help="runs in whose folder, and those of their replays, nothing was written for so long",
    )


def _prune_arguments(parser: argparse.ArgumentParser) -> None:
    _job_arguments(parser)
    parser.add_argument(
        "--keep-runs",
        metavar="N",
        type=positive,
        required=True,
        help="published runs that stay, the newest ones",
    )


COMMANDS = [
    Command("account", "count a published run's rows, replays included", account, add_folder_argument),
    Command("delete", "delete a job's old runs; tables stay", delete, _delete_arguments),
    Command("prune", "take a job's old runs out of the tables", prune, _prune_arguments),
    Command("sweep", "delete orphans, replaced table files, half-written leftovers", sweep, _job_arguments),
]
