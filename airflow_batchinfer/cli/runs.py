"""Commands about runs: `runs`, `show`, `stop`, `resume`."""

from __future__ import annotations

import argparse
import getpass
import sys

from airflow_batchinfer.cli.command import Command, add_folder_argument, add_store_arguments, store_of
from airflow_batchinfer.errors import InputError, UnreadableError
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.status import RunStatus, plan_objects, run_status
from airflow_batchinfer.run.stop import clear_stop, read_stop, set_stop
from airflow_batchinfer.store import Store


def runs(arguments: argparse.Namespace) -> None:
    """Print a job's runs, oldest first: when planned, how far, and the folder."""
    store = store_of(arguments)
    plans = plan_objects(store, arguments.job)
    if not plans:
        raise InputError(f"{store.uri} holds no run of job {arguments.job}")
    lines = []
    for info in plans:
        try:
            plan = Plan.read(store, info.key)
            lines.append(f"{plan.created_at}  {_line(store, plan)}")
        except UnreadableError as error:
            print(f"batchinfer: {error}", file=sys.stderr)
    print("\n".join(sorted(lines)))


def _line(store: Store, plan: Plan) -> str:
    status = run_status(store, plan.folder)
    return f"{_stage(store, status):<12} {status.rows_done:>12,}/{plan.rows:,} rows  {plan.folder}"


def show(arguments: argparse.Namespace) -> None:
    """Print one run: its shards, its sums, and what is wrong with it."""
    from airflow_batchinfer.pipeline.accounting import read_account

    store = store_of(arguments)
    status = _status(store, arguments.folder)
    plan, layout = status.plan, RunLayout(arguments.folder)
    print(f"run          {plan.run_id} of job {plan.job}, planned {plan.created_at}")
    print(f"stage        {_stage(store, status)}")
    print(f"fingerprint  {plan.fingerprint}")
    print(f"shards       {status.shards_done} of {len(status.shards)} committed")
    print(f"rows         {status.rows_done:,} of {plan.rows:,} have an outcome")
    for outcome, rows in sorted(status.counts.items()):
        print(f"  {outcome:<11}{rows:>12,}")
    for warning in plan.warnings:
        print(f"warning      {warning}")
    stop = read_stop(store, arguments.folder)
    if stop is not None:
        print(f"stopped      {stop.advice(arguments.folder)}")
    account = read_account(store, arguments.folder)
    quarantined = account.quarantine.rows if account else 0
    if quarantined:
        print(
            f"quarantined  {quarantined:,} of the succeeded rows fail an expectation: invalid, dead letters"
        )
    for problem in account.ledger.problems if account else []:
        print(f"problem      {problem}")
    if store.exists(layout.report("html")):
        print(f"report       {store.uri_of(layout.report('html'))}")
    for shard in status.shards:
        print(shard.line())


def stop(arguments: argparse.Namespace) -> None:
    """Set a run's stop marker: its workers drain, checkpoint and exit."""
    store = store_of(arguments)
    _status(store, arguments.folder)
    print(set_stop(store, arguments.folder, arguments.reason, arguments.by).advice(arguments.folder))


def resume(arguments: argparse.Namespace) -> None:
    """Remove a run's stop marker."""
    store = store_of(arguments)
    _status(store, arguments.folder)
    if clear_stop(store, arguments.folder):
        print("The stop marker is removed. Clear the failed tasks with downstream to go on.")
    else:
        print("There was no stop marker.")


def _status(store: Store, folder: str) -> RunStatus:
    try:
        return run_status(store, folder)
    except FileNotFoundError as error:
        raise InputError(f"{store.uri_of(folder)} is no run: it has no plan.json") from error


def _stage(store: Store, status: RunStatus) -> str:
    """How far the run has come, as the store shows it."""
    layout = RunLayout(status.plan.folder)
    if read_stop(store, status.plan.folder) is not None:
        return "stopped"
    if store.exists(layout.merge):
        return "published"
    ledger = Ledger.find(store, layout.ledger)
    if ledger is not None and ledger.complete:
        return "reconciled"
    return "inferred" if status.shards_done == len(status.shards) else "inferring"


def _job_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the job's name")
    add_store_arguments(parser)


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder_argument(parser)
    parser.add_argument("--reason", required=True, help="why; shown to whoever finds the run stopped")
    parser.add_argument("--by", default=getpass.getuser(), help="who (default: you)")


COMMANDS = [
    Command("runs", "list a job's runs", runs, _job_argument),
    Command("show", "show a run's shards, sums and problems", show, add_folder_argument),
    Command("stop", "stop a run: its workers checkpoint and exit", stop, _stop_arguments),
    Command("resume", "take a run's stop marker away", resume, add_folder_argument),
]
