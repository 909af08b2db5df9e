"""`make tour`: what comes after the first run, step by step on the demo's data, Airflow and model.

A replay of the demo's over-long tickets with their middle cut out, then three nights of an incremental
job over the first tickets: all new, a few changed, and one with a changed prompt. After each step it prints
what the tables say.

    python -m scripts.tour
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from datetime import datetime
from typing import Any

import httpx
from deltalake import DeltaTable

from airflow_batchinfer.errors import InputError
from airflow_batchinfer.form import ADVANCED, form_params
from airflow_batchinfer.pipeline.replay import published_folder
from airflow_batchinfer.pipeline.standing import standing_of
from airflow_batchinfer.run.layout import DEAD_LETTERS, RunLayout, results_table, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.store import LocalStore
from scripts.airflow_stack import AirflowApi, AirflowStack, StackError
from scripts.demo import BUILD, DAG_ID, ENVIRONMENT, HOME, ROOT, SPEC, STORE, DemoError, stop_kept

REPLAY = "replay_dead_letters"
NIGHTS = "nights"
NIGHTLY_INPUT = BUILD / "demo" / "nightly.jsonl"
_NIGHTLY_ROWS = 40


def main() -> int:
    """Take the tour; the exit status."""
    stop_kept()
    store = LocalStore(STORE)
    try:
        with AirflowStack(HOME, ROOT / "dags", env=ENVIRONMENT) as stack:
            for dag_id in (DAG_ID, REPLAY):
                stack.api.wait_for_dag(dag_id)
                stack.api.fail_unfinished(dag_id)
            _replay(stack.api, store)
            _nights(stack.api, store)
    except (DemoError, StackError, httpx.HTTPError) as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    return 0


def _replay(api: AirflowApi, store: LocalStore) -> None:
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
    _say(f"Run {plan.run_id} as `make demo` left it")
    _tell_standing(store, plan)
    for title in ("Replay of its over-long tickets, cut to fit", "The same replay again"):
        _say(f"{title}: {REPLAY} with {json.dumps(conf)}")
        run_id = _run(api, REPLAY, conf)
        _tell_log(api, REPLAY, run_id, "prepare_replay", "run again")
        _tell_standing(store, plan)


def _nights(api: AirflowApi, store: LocalStore) -> None:
    lines = (ROOT / "dags" / "data" / "tickets.jsonl").read_text(encoding="utf-8").splitlines()
    tickets = [json.loads(line) for line in lines[:_NIGHTLY_ROWS]]
    night_one = {"name": NIGHTS, "input": str(NIGHTLY_INPUT), "advanced": _advanced()}
    _write(tickets)
    _say(f"Night one: {len(tickets)} tickets, `incremental: true`")
    _night(api, store, night_one)

    changed = [{**tickets[0], "text": "My invoice shows the wrong amount."}, *tickets[2:]]
    new = [{**json.loads(line)} for line in lines[_NIGHTLY_ROWS : _NIGHTLY_ROWS + 3]]
    _write([*changed, *new])
    _say("Night two: one ticket edited, one gone, three new")
    _night(api, store, night_one)

    _say("Night three: the same tickets, another system message")
    _night(api, store, night_one | {"system": "You sort support tickets. Answer with one label."})


def _advanced() -> str:
    """What the form's box of other fields holds for the sample, and what makes the job incremental."""
    return f"{form_params(SPEC)[ADVANCED].value}incremental: true\nremoved_rows: tombstone\n"


def _night(api: AirflowApi, store: LocalStore, conf: dict[str, Any]) -> None:
    run_id = _run(api, DAG_ID, conf)
    _tell_log(api, DAG_ID, run_id, "split", "rows in", "run again")
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


def _tell_log(api: AirflowApi, dag_id: str, run_id: str, task: str, *words: str) -> None:
    """The lines of a task's log that have one of the words in them."""
    for event in api.log_events(dag_id, run_id, task):
        text = str(event["event"])
        if any(word in text for word in words) and not text.startswith("::"):
            print(f"  {task} says: {text}")


def _run(api: AirflowApi, dag_id: str, conf: dict[str, Any]) -> str:
    run_id = api.trigger(dag_id, conf, run_id=f"tour-{datetime.now():%Y%m%d-%H%M%S}")
    state = api.wait(dag_id, run_id, timeout=1800)
    print(f"  {dag_id} {run_id}: {state}")
    if state != "success":
        raise DemoError(f"run {run_id} failed: {api.states(dag_id, run_id)}; its logs: {HOME / 'logs'}")
    return run_id


def _write(tickets: list[dict[str, Any]]) -> None:
    lines = (json.dumps(ticket, ensure_ascii=False) for ticket in tickets)
    NIGHTLY_INPUT.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _say(step: str) -> None:
    print(f"\n{step}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
