"""`make demo`: the sample job through a real Airflow and a real vLLM, watched from here.

Starts Airflow on free ports with its home and the job's store in `.build/demo`, triggers
`dags/batch_inference.py` with the form as it stands, shows progress, and ends with the sums, samples and
places. Whatever it started it stops, also on Ctrl-C; `KEEP=1` leaves Airflow up.

    python -m scripts.demo           the run
    python -m scripts.demo stop      stop an Airflow that KEEP=1 left up
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
from deltalake import DeltaTable

from airflow_batchinfer.outcome import Reason, outcome_of
from airflow_batchinfer.pipeline.merge import MergeResult
from airflow_batchinfer.run.layout import RunLayout, run_dir
from airflow_batchinfer.run.ledger import Ledger
from airflow_batchinfer.run.status import RunStatus, run_status
from airflow_batchinfer.spec_files import load_spec
from airflow_batchinfer.store import LocalStore
from airflow_batchinfer.worker.processes import identity, is_gone
from scripts.airflow_stack import AirflowApi, AirflowStack, StackError, task_name
from scripts.live_line import LiveLine

ROOT = Path(__file__).resolve().parents[1]
BUILD = ROOT / ".build"
HOME = BUILD / "demo" / "airflow"
STORE = BUILD / "demo" / "store"
PIDS = BUILD / "demo" / "pids"

DAG_ID = "batch_inference"
SPEC = ROOT / "dags" / "tickets.yaml"

ENVIRONMENT = {
    "AIRFLOW__BATCHINFER__STORE": str(STORE),
    "AIRFLOW__BATCHINFER__WORKER_PYTHON": str(BUILD / "worker" / "bin" / "python"),
    "HF_HUB_OFFLINE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
"""For Airflow and, through it, the workers. The cache is in GiB: ample here, small for a laptop."""

_LOG_LINES = 25

_ROWS_BEFORE_A_FORECAST = 0.1
"""Share of the rows; a rate measured over fewer tells nothing about the time left."""


class DemoError(Exception):
    """The run failed: says which task, and that task's own error."""


def main(arguments: list[str]) -> int:
    """Run the demo, or stop one that was left up; the exit status."""
    signal.signal(signal.SIGTERM, _interrupt)
    stop_kept()
    if arguments == ["stop"]:
        return 0
    keep = os.environ.get("KEEP", "") not in ("", "0")
    stack = AirflowStack(HOME, ROOT / "dags", env=ENVIRONMENT)
    try:
        run_id = _run(stack)
        _tell(run_id)
        if keep:
            # By start time: Airflow's processes rename themselves and so lose their environment.
            PIDS.write_text("\n".join(f"{pid} {identity(pid)}" for pid in stack.pids))
            print(f"\nAirflow is up: {stack.api.url} (no password). `make demo-stop` ends it.")
        else:
            print("\n`make demo KEEP=1` leaves Airflow up, so that you can open its UI.")
    except KeyboardInterrupt:
        print("\nInterrupted. What is finished is in the store; stopping Airflow.", file=sys.stderr)
        keep = False
        return 130
    except (DemoError, StackError, httpx.HTTPError) as error:
        keep = False
        print(f"\n{error}", file=sys.stderr)
        return 1
    finally:
        if not keep:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            stack.stop()
    return 0


def stop_kept() -> None:
    """End the processes that an earlier demo left up."""
    if not PIDS.exists():
        return
    kept = dict(line.split(maxsplit=1) for line in PIDS.read_text().splitlines())
    left = [int(pid) for pid, process in kept.items() if is_gone(process) is False]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGTERM)
    deadline = time.monotonic() + 15
    while any(is_gone(kept[str(pid)]) is False for pid in left) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in left:
        if is_gone(kept[str(pid)]) is False:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    PIDS.unlink()
    if left:
        print("Stopped the Airflow of an earlier demo.")


def _run(stack: AirflowStack) -> str:
    """Start Airflow, trigger the DAG and watch it; the run's id. Raises `DemoError`, `StackError`."""
    with LiveLine() as line:
        line.show("starting Airflow (half a minute)")
        stack.start()
        stack.api.wait_for_dag(DAG_ID)
        stack.api.fail_unfinished(DAG_ID)
        run_id = stack.api.trigger(DAG_ID, run_id=f"demo-{datetime.now():%Y%m%d-%H%M%S}")
        line.show(f"triggered {DAG_ID}, run {run_id}")
        state = _watch(stack, run_id, line)
    if state != "success":
        raise DemoError(_failure(stack.api, run_id))
    return run_id


def _watch(stack: AirflowStack, run_id: str, line: LiveLine) -> str:
    """Show progress until the run is over; its state."""
    while (state := stack.api.run_state(DAG_ID, run_id)) not in ("success", "failed"):
        stack.check()
        line.show(_progress(stack.api, run_id))
        time.sleep(1.0)
    return state


def _progress(api: AirflowApi, run_id: str) -> str:
    running = sorted({t["task_id"] for t in api.tasks(DAG_ID, run_id) if t["state"] == "running"})
    task = ", ".join(running) or "scheduling"
    try:
        status = run_status(LocalStore(STORE), _folder(run_id))
    except FileNotFoundError:
        return task
    return f"{task}: {_progress_of(status)}"


def _progress_of(status: RunStatus) -> str:
    parts = [
        f"{status.shards_done}/{len(status.shards)} shards",
        f"{status.rows_done}/{status.plan.rows} rows",
    ]
    if status.rows_per_second > 0:
        parts += [f"{status.rows_per_second:.1f} rows/s", f"{status.tokens_per_second:,.0f} tokens/s"]
    settled = status.rows_done >= status.plan.rows * _ROWS_BEFORE_A_FORECAST
    if status.seconds_left and settled and status.shards_done < len(status.shards):
        parts.append(f"about {status.seconds_left:.0f} s left")
    loading = sum(s.state == "loading" for s in status.shards)
    if loading:
        parts.append(f"{loading} engines starting" if loading > 1 else "an engine is starting")
    return " · ".join(parts)


def _failure(api: AirflowApi, run_id: str) -> str:
    """The first failed task, its own error, and what its log said before."""
    failed = [t for t in api.tasks(DAG_ID, run_id) if t["state"] == "failed"]
    if not failed:
        return f"Run {run_id} failed, and no task of it did."
    first = min(failed, key=lambda t: t["end_date"] or "")
    events = api.log_events(DAG_ID, run_id, first["task_id"], first["map_index"])
    said = [str(e["event"]) for e in events if not str(e["event"]).startswith("::")]
    errors = [f"{d['exc_type']}: {d['exc_value']}" for e in events for d in e.get("error_detail") or []]
    return "\n".join(
        [
            *said[-_LOG_LINES:],
            "",
            f"Task {task_name(first)} of run {run_id} failed:",
            *(errors or ["its log holds no exception"]),
            f"Its logs: {HOME / 'logs'}",
        ]
    )


def _tell(run_id: str) -> None:
    """Print sums, samples and places. Raises `DemoError` if the sums are not the input's rows."""
    store, layout = LocalStore(STORE), RunLayout(_folder(run_id))
    ledger = Ledger.read(store, layout.ledger)
    merged = MergeResult.read(store, layout.merge)
    print(f"\nRun {run_id}: {ledger.rows} input rows, each with one outcome\n")
    for outcome, rows in sorted(ledger.counts.items(), key=lambda item: -item[1]):
        reasons = _reasons(ledger, outcome)
        print(f"  {outcome:<12}{rows:>6}{reasons}")
    total = sum(ledger.counts.values())
    print(f"  {'sum':<12}{total:>6}")
    if total != ledger.rows:
        raise DemoError(f"the outcomes add up to {total}, not to the {ledger.rows} input rows")
    print("\nFive results (of a model of 135 million parameters: expect wrong labels)\n")
    for line in _samples(merged.results_table, run_id):
        print(f"  {line}")
    print(f"\nresults table      {merged.results_table}")
    print(f"dead-letter table  {merged.dead_letter_table}")
    print(f"report             {store.uri_of(layout.report('html'))}")


def _reasons(ledger: Ledger, outcome: str) -> str:
    found = {r: n for r, n in ledger.reasons.items() if outcome_of(Reason(r)) == outcome}
    return "   " + ", ".join(f"{reason} {rows}" for reason, rows in sorted(found.items())) if found else ""


def _samples(table: str, run_id: str) -> list[str]:
    """A small table of five results of the run, spread over it."""
    columns = ["custom_id", "subject", "label", "true_label"]
    found = DeltaTable(table).to_pyarrow_table(filters=[("run_id", "=", run_id)], columns=columns)
    rows: list[dict[str, Any]] = found.to_pylist()
    picked = rows[:: max(1, len(rows) // 5)][:5]
    texts = [columns, *([_cell(row[c]) for c in columns] for row in picked)]
    widths = [max(len(text[i]) for text in texts) for i in range(len(columns))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(t, widths, strict=True)) for t in texts]


def _cell(value: Any) -> str:
    text = " ".join(str("" if value is None else value).split())
    return text if len(text) <= 44 else text[:43] + "…"


def _folder(run_id: str) -> str:
    return run_dir(load_spec(SPEC, str(STORE)).name, run_id)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
