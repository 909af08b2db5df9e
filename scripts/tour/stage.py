"""What each part of the tour needs: start a run and wait, and say what a log says."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml

from airflow_batchinfer.form import ADVANCED, form_params
from scripts.airflow_stack import AirflowApi
from scripts.demo import HOME, ROOT, SPEC, DemoError

SAMPLE = ROOT / "dags" / "data" / "tickets.jsonl"


def say(step: str) -> None:
    """Head a step."""
    print(f"\n{step}", flush=True)


def trigger(api: AirflowApi, dag_id: str, conf: dict[str, Any]) -> str:
    """Start a run; its id."""
    return api.trigger(dag_id, conf, run_id=f"tour-{datetime.now():%Y%m%d-%H%M%S}")


def finish(api: AirflowApi, dag_id: str, run_id: str, wanted: str = "success") -> None:
    """Wait for the end of a run. Raises `DemoError` if it does not end as wanted."""
    state = api.wait(dag_id, run_id, timeout=1800)
    print(f"  {dag_id} {run_id}: {state}", flush=True)
    if state != wanted:
        raise DemoError(
            f"run {run_id} did not end in {wanted}: {api.states(dag_id, run_id)}; its logs: {HOME / 'logs'}"
        )


def tell_log(api: AirflowApi, dag_id: str, run_id: str, task: str, *words: str) -> None:
    """Print what a task's log says in the lines, and errors, that have one of the words in them."""
    for event in api.log_events(dag_id, run_id, task):
        errors = (detail["exc_value"] for detail in event.get("error_detail") or [])
        for text in (str(event["event"]), *errors):
            if any(word in text for word in words) and not text.startswith("::"):
                print(f"  {task} says: {text}")


def tickets() -> list[dict[str, Any]]:
    """The sample's rows."""
    return [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()]


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write rows as JSON lines."""
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def other_fields(**changes: Any) -> str:
    """The form's box of other fields for the sample, as YAML.

    Args:
        changes: sections in place of the sample's; none leaves a section out.
    """
    fields = yaml.safe_load(form_params(SPEC)[ADVANCED].value) | changes
    return yaml.safe_dump({name: value for name, value in fields.items() if value is not None})
