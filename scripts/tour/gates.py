"""Gates on the real model: a broken template, an approval, drift, and a run that turns bad half-way.

Each step prints the task's own words, and what was spent and what was not.
"""

from __future__ import annotations

from typing import Any

from airflow_batchinfer.form import ADVANCED
from airflow_batchinfer.pipeline.report.model import Report
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.plan import Plan
from airflow_batchinfer.run.stop import clear_stop, read_stop
from airflow_batchinfer.store import LocalStore
from scripts.airflow_stack import AirflowApi
from scripts.demo import BUILD, DAG_ID
from scripts.tour.stage import finish, other_fields, say, tell_log, tickets, trigger, write_rows

JOB = "gates"
INPUT = BUILD / "demo" / "gates.jsonl"
_ROWS = 90
_PILOT = {"rows": 12}


def broken(api: AirflowApi, store: LocalStore) -> None:
    """A template without its ending: the model rambles. The pilot's gate ends the run. Raises `DemoError`."""
    write_rows(INPUT, _ordinary())
    say("A broken template: no examples, and nothing that asks for a label; answers are cut at 8 tokens")
    conf = {
        "name": f"{JOB}-broken",
        "input": str(INPUT),
        "task": "generate",
        "truth": None,
        "template": "{{ text }}",
        "max_tokens": 8,
        ADVANCED: other_fields(prompt=None, pilot=_PILOT, gate={"max_length_fraction": 0.5}),
    }
    run_id = trigger(api, DAG_ID, conf)
    finish(api, DAG_ID, run_id, "failed")
    report = _report(store, conf["name"], run_id)
    assert report.pilot is not None
    print(f"  the gate says: {report.pilot.message}")
    forecast = report.pilot.forecast
    expected = forecast.tokens.expected if forecast else 0.0
    spent = report.pilot.spent_tokens
    print(
        f"  paid: {spent:,} tokens for {report.pilot.profile.rows} rows; a whole run takes about "
        f"{expected:,.0f}: {expected - spent:,.0f} are saved"
    )


def approved(api: AirflowApi, store: LocalStore) -> None:
    """The sample job; a person approves its pilot through the REST API. Raises `DemoError`."""
    say("An approval: the fleet waits for a person")
    run_id = trigger(api, DAG_ID, _labels(pilot=_PILOT, gate={"approval": "required"}))
    api.wait_for_task(DAG_ID, run_id, "judge_pilot", ["awaiting_input", "deferred"])
    for line in api.request(DAG_ID, run_id, "judge_pilot")["body"].splitlines()[:6]:
        print(f"  the request says: {line}")
    api.respond(DAG_ID, run_id, "judge_pilot", "Approve")
    print("  approved through the REST API")
    finish(api, DAG_ID, run_id)
    report = _report(store, JOB, run_id)
    if report.pilot and report.pilot.forecast:
        tokens = report.pilot.forecast.tokens
        actual = report.tokens.total
        print(
            f"  forecast {tokens.expected:,.0f} tokens ({tokens.low:,.0f} to {tokens.high:,.0f}), "
            f"actual {actual:,}"
        )
    scores = report.verdict.labels if report.verdict else None
    if scores:
        print(f"  accuracy {scores.accuracy:.1%} on {scores.rows} rows, macro F1 {scores.macro_f1:.3f}")
        for label in scores.scores:
            print(
                f"    {label.label:<16} precision {_share(label.precision):>6}  "
                f"recall {_share(label.recall):>6}  of {label.support}"
            )


def drifted(api: AirflowApi, store: LocalStore) -> None:
    """The same job with examples that all say `other`. Raises `DemoError`."""
    say("Drift: the same tickets, with examples that teach the model to say `other`")
    examples = [{"user": f"Ticket {i}\n\nLabel:", "assistant": "other"} for i in range(6)]
    run_id = trigger(api, DAG_ID, _labels(prompt={"examples": examples}))
    finish(api, DAG_ID, run_id)
    tell_log(api, DAG_ID, run_id, "validate", "drift")
    report = _report(store, JOB, run_id)
    for problem in report.warnings:
        if "drift" in problem:
            print(f"  the report says: {problem}")


def bad(api: AirflowApi, store: LocalStore) -> None:
    """Long tickets first, then short ones that ask for a story: the line is stopped. Raises `DemoError`."""
    by_length = sorted(_ordinary(), key=lambda row: len(row["text"]), reverse=True)
    long, short = by_length[: _ROWS // 3], by_length[_ROWS // 3 :]
    rows = [row | {"cue": "Label:"} for row in long]
    rows += [row | {"cue": "Write me a long story about it."} for row in short]
    write_rows(INPUT, rows)
    name = f"{JOB}-bad"
    say(f"A run that turns bad: {len(long)} tickets, then {len(short)} whose feed asks for a story")
    conf = {
        "name": name,
        "input": str(INPUT),
        "task": "generate",
        "truth": None,
        "template": "{{ text }}\n\n{{ cue }}",
        "max_tokens": 8,
        "max_rows": 200,
        ADVANCED: other_fields(
            line={"window": 16, "min_rows": 16, "max_length": 0.6},
            checkpoint={"rows": 8, "seconds": 5, "progress_seconds": 1, "grace_seconds": 0},
        ),
    }
    run_id = trigger(api, DAG_ID, conf)
    finish(api, DAG_ID, run_id, "failed")
    layout = RunLayout(run_dir(name, run_id))
    stop = read_stop(store, layout.folder)
    assert stop is not None
    print(f"  {stop.by}: {stop.reason}")
    plan = Plan.read(store, layout.plan)
    report = _report(store, name, run_id)
    done = report.rows - report.counts.get("unprocessed", 0)
    lost = report.tokens_lost
    print(f"  {done} of {plan.rows} rows have an outcome; {lost:,} tokens were paid for rows that have none")
    tell_log(api, DAG_ID, run_id, "gate", "resume")
    clear_stop(store, layout.folder)


def _labels(**changes: Any) -> dict[str, Any]:
    return {"name": JOB, "input": str(INPUT), ADVANCED: other_fields(**changes)}


def _ordinary() -> list[dict[str, Any]]:
    return [row for row in tickets() if row["text"].strip() and len(row["text"]) < 1500][:_ROWS]


def _report(store: LocalStore, job: str, run_id: str) -> Report:
    return Report.read(store, RunLayout(run_dir(job, run_id)).report("json"))


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"
