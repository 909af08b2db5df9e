"""Replay and increments: the demo's over-long tickets cut to fit, then three nights of an incremental job.

The nights: all tickets new, a few changed, and one with a changed prompt. After each step the tour prints
what the tables say.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from deltalake import DeltaTable

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.form import ADVANCED
from airflow_batchinfer.pipeline.replay import published_folder
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.store import LocalStore
from scripts.airflow_stack import AirflowApi
from scripts.demo import BUILD, DAG_ID, SPEC, STORE, DemoError
from scripts.tour.stage import finish, other_fields, say, tell_log, tickets, trigger, write_rows

REPLAY = "replay_dead_letters"
NIGHTS = "nights"
NIGHTLY_INPUT = BUILD / "demo" / "nightly.jsonl"
_NIGHTLY_ROWS = 40


def replay(api: AirflowApi, store: LocalStore) -> None:
    """Repair the newest run of the demo. Raises `DemoError`."""
    job = load_spec(SPEC, str(STORE)).name
    try:
        folder = published_folder(store, job, None)
    except InputError as error:
        raise DemoError(f"{error}: run `make demo` first") from error
    plan = Plan.read(store, RunLayout(folder).plan)
    conf = {
        "job": job,
        "run": plan.run_id,
        "reasons": ["over_long"],
        "overlong": "truncate",
        "overlong_column": "text",
    }
    say(f"Run {plan.run_id} as `make demo` left it")
    _tell_standing(store, plan)
    for title in ("Replay of its over-long tickets, cut to fit", "The same replay again"):
        say(f"{title}: {REPLAY} with {json.dumps(conf)}")
        run_id = trigger(api, REPLAY, conf)
        finish(api, REPLAY, run_id)
        tell_log(api, REPLAY, run_id, "prepare_replay", "run again")
        _tell_standing(store, plan)


def nights(api: AirflowApi, store: LocalStore) -> None:
    """Three nights of an incremental job. Raises `DemoError`."""
    rows = tickets()
    first = rows[:_NIGHTLY_ROWS]
    other = other_fields(incremental=True, removed_rows="tombstone")
    night_one = {"name": NIGHTS, "input": str(NIGHTLY_INPUT), ADVANCED: other}
    write_rows(NIGHTLY_INPUT, first)
    say(f"Night one: {len(first)} tickets, `incremental: true`")
    _night(api, store, night_one)

    edited = {**first[0], "text": "My invoice shows the wrong amount."}
    write_rows(NIGHTLY_INPUT, [edited, *first[2:], *rows[_NIGHTLY_ROWS : _NIGHTLY_ROWS + 3]])
    say("Night two: one ticket edited, one gone, three new")
    _night(api, store, night_one)

    say("Night three: the same tickets, another system message")
    _night(api, store, night_one | {"system": "You sort support tickets. Answer with one label."})


def _night(api: AirflowApi, store: LocalStore, conf: dict[str, Any]) -> None:
    run_id = trigger(api, DAG_ID, conf)
    finish(api, DAG_ID, run_id)
    tell_log(api, DAG_ID, run_id, "split", "rows in", "run again")
    plan = Plan.read(store, RunLayout(run_dir(NIGHTS, run_id)).plan)
    table = DeltaTable(store.uri_of(results_table(NIGHTS)))
    rows = table.to_pyarrow_table(filters=[("run_id", "=", run_id)], columns=["change", "answered_in"])
    changes = Counter((row["change"], row["answered_in"] == run_id) for row in rows.to_pylist())
    print(f"  sent to the engine: {sum(shard.sent for shard in plan.shards)} rows")
    for (change, now), count in sorted(changes.items()):
        print(f"  {count:>4} rows {change:<20}{'answered tonight' if now else 'with the answer they had'}")


def _tell_standing(store: LocalStore, plan: Plan) -> None:
    standing = standing_of(store, plan)
    print(
        f"  {standing.rows} rows = {standing.succeeded} succeeded + {standing.resolved} resolved by replays "
        f"+ {standing.dead} dead"
    )
    letters = DeltaTable(store.uri_of(DEAD_LETTERS)).to_pyarrow_table(
        filters=[("run_id", "=", plan.run_id)], columns=["custom_id", "reason", "status"]
    )
    for letter in letters.to_pylist():
        print(f"  dead letter {letter['custom_id']:<10}{letter['reason']:<14}{letter['status']}")
