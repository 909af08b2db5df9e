"""Commands about runs: `runs`, `show`, `stop`, `resume`."""

from __future__ import annotations

import argparse
import getpass
import os
import sys
from collections.abc import Iterator

from airflow_batchinfer.cli.command import (
    Command,
    add_folder_argument,
    add_store_arguments,
    positive,
    store_of,
)
from airflow_batchinfer.errors import InputError, UnreadableError
from airflow_batchinfer.run.layout import RunLayout
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.plan import Plan, check_is_run
from airflow_batchinfer.run.status import RunStatus, plan_objects, run_status, status_of
from airflow_batchinfer.run.stop import clear_stop, read_stop, set_stop
from airflow_batchinfer.store import Store


def runs(arguments: argparse.Namespace) -> None:
    """Print a job's last runs, oldest first: when planned, how far, and the folder."""
    store = store_of(arguments)
    plans = sorted(plan_objects(store, arguments.job), key=lambda info: info.modified)
    if not plans:
        raise InputError(f"{store.uri} holds no run of job {arguments.job}")
    lines = []
    for info in plans[-arguments.last :]:
        try:
            plan = Plan.read(store, info.key)
            lines.append(f"{plan.created_at}  {_line(store, plan)}")
        except UnreadableError as error:
            print(f"batchinfer: {error}", file=sys.stderr)
    for line in sorted(lines):
        print(line)


def _line(store: Store, plan: Plan) -> str:
    """A run in one line. Only of one that may still be at work the shards are read: there may be hundreds."""
    far, done = _settled(store, plan.folder), plan.rows
    if far is None:
        status = status_of(store, plan)
        far, done = _inferred(status), status.rows_done
    stage = "stopped" if read_stop(store, plan.folder) else far
    return f"{stage:<12} {done:>12,}/{plan.rows:,} rows  {plan.folder}"


def show(arguments: argparse.Namespace) -> None:
    """Print one run: its shards, its sums, and what is wrong with it."""
    from airflow_batchinfer.pipeline.accounting import read_account

    store = _store_with_run(arguments)
    status = run_status(store, arguments.folder)
    plan, layout = status.plan, RunLayout(arguments.folder)
    stop = read_stop(store, arguments.folder)
    stage = "stopped" if stop else _settled(store, arguments.folder) or _inferred(status)
    print(f"run          {plan.run_id} of job {plan.job}, planned {plan.created_at}")
    print(f"stage        {stage}")
    print(f"fingerprint  {plan.fingerprint}")
    print(f"shards       {status.shards_done} of {len(status.shards)} committed")
    print(f"rows         {status.rows_done:,} of {plan.rows:,} have an outcome")
    for outcome, rows in sorted(status.counts.items()):
        print(f"  {outcome:<11}{rows:>12,}")
    for line in _pace_and_price(store, status):
        print(line)
    for warning in plan.warnings:
        print(f"warning      {warning}")
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


def _pace_and_price(store: Store, status: RunStatus) -> Iterator[str]:
    """How fast the run goes, if it does, and what all its attempts have taken so far."""
    from airflow_batchinfer.pipeline.attempts import spent_on
    from airflow_batchinfer.pipeline.forecast import money
    from airflow_batchinfer.pipeline.words import duration

    if status.rows_per_second > 0:
        left = status.seconds_left
        yield (
            f"rate         {status.rows_per_second:,.1f} rows/s, {status.tokens_per_second:,.0f} tokens/s"
            + ("" if left is None else f": about {duration(left)} left")
        )
    spent, prices = spent_on(store, [status.plan]), status.plan.spec.cost
    tokens = spent.tokens
    yield f"tokens       {tokens.total:,} ({tokens.prompt:,} prompt, {tokens.output:,} output)"
    yield f"held         {duration(spent.held_seconds)}, all workers together"
    if prices is not None:
        yield f"cost         {money(prices, tokens, spent.held_seconds):,.2f} {prices.currency}"


def stop(arguments: argparse.Namespace) -> None:
    """Set a run's stop marker: its workers drain, checkpoint and exit."""
    store = _store_with_run(arguments)
    by = arguments.by or _user()
    print(set_stop(store, arguments.folder, arguments.reason, by).advice(arguments.folder))


def resume(arguments: argparse.Namespace) -> None:
    """Remove a run's stop marker."""
    store = _store_with_run(arguments)
    if clear_stop(store, arguments.folder):
        print("The stop marker is removed. Clear the failed tasks with downstream to go on.")
    else:
        print("There was no stop marker.")


def _user() -> str:
    """Who runs this; in a container it may be a user without a name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"user {os.getuid()}"


def _store_with_run(arguments: argparse.Namespace) -> Store:
    """The store, once it is sure that the folder holds a run, readable or not."""
    store = store_of(arguments)
    check_is_run(store, arguments.folder)
    return store


def _inferred(status: RunStatus) -> str:
    return "inferred" if status.shards_done == len(status.shards) else "inferring"


def _settled(store: Store, folder: str) -> str | None:
    """How far a run has come of which each row has an outcome; none while one may have none."""
    layout = RunLayout(folder)
    if store.exists(layout.merge):
        return "published"
    if store.exists(layout.pruned):
        return "pruned"
    ledger = Ledger.find(store, layout.ledger)
    return "reconciled" if ledger is not None and ledger.complete else None


def _runs_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("job", metavar="JOB", help="the job's name")
    parser.add_argument(
        "--last",
        metavar="N",
        type=positive,
        default=10,
        help="only the runs whose plans were written last (default: 10)",
    )
    add_store_arguments(parser)


def _stop_arguments(parser: argparse.ArgumentParser) -> None:
    add_folder_argument(parser)
    parser.add_argument("--reason", required=True, help="why; shown to whoever finds the run stopped")
    parser.add_argument("--by", help="who (default: you)")


COMMANDS = [
    Command("runs", "list a job's last runs", runs, _runs_arguments),
    Command("show", "show a run's shards, sums and problems", show, add_folder_argument),
    Command("stop", "stop a run: its workers checkpoint and exit", stop, _stop_arguments),
    Command("resume", "take a run's stop marker away", resume, add_folder_argument),
]
