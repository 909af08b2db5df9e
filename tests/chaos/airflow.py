"""Faults of a real Airflow, while its tasks run shards: one stack for all cases, made by the first."""

from __future__ import annotations

import atexit
import os
import shutil
import signal
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from scripts.airflow_stack import AirflowStack
from tests.chaos.case import Case, CaseFunction
from tests.chaos.injection import note_strike
from tests.chaos.oracle import Account, LocalFiles, durable_rows, paid_again, verdict
from tests.chaos.run import ROOT, STRIKES
from tests.engines import answer_to
from tests.integration.runs import (
    StoredRun,
    job_fields,
    parent_of,
    wait_until,
    worker_of,
    write_input,
)

_DAG = "shaken_job"
_SHARDS = 4
_SHARD_ROWS = 36
_PART_ROWS = 4
_SLOW = {"delay_seconds": 1.0, "max_in_flight": 2}
"""Two rows a second and shard: a shard outlasts the start of the others, and a fault."""
_ROWS_BY_HEARTBEAT = 10
"""At this pace, in the five seconds between two heartbeats of a task."""
_SETTINGS = {
    "PYTHONPATH": str(ROOT),
    # A new scheduler takes its predecessor for dead after 30 seconds, and looks after 10 more, not after 300.
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
}


def airflow_cases() -> Iterator[Case]:
    """SIGKILL of each of Airflow's processes, and a task whose state is a lie."""
    point = f"once each of {_SHARDS} shards has a part, while they run"
    yield Case("Airflow: SIGKILL of a task's process", f"{point}; two of them, costs each a retry", (_kill,))
    crashes: tuple[tuple[str, str, CaseFunction], ...] = (
        (
            "the scheduler, its executor and the tasks' supervisors",
            "restarted; costs each task a retry",
            partial(_crash, ("scheduler",)),
        ),
        (
            "the scheduler alone",
            "restarted while the tasks run on, and starts them again; costs each a retry",
            partial(_crash, ("scheduler",), alone=True, shard_rows=4 * _SHARD_ROWS),
        ),
        (
            "the API server",
            "restarted while the tasks run on; costs no retry",
            partial(_crash, ("api-server",), retried=False),
        ),
        (
            "the DAG processor",
            "restarted while the tasks run on; costs no retry",
            partial(_crash, ("dag-processor",), retried=False),
        ),
        (
            "all of them at once",
            "restarted; costs each task a retry",
            partial(_crash, ("scheduler", "api-server", "dag-processor")),
        ),
    )
    for what, then, crash in crashes:
        # Tasks that run on while they are started again pay until Airflow refuses their next heartbeat.
        beside = _SHARDS * _ROWS_BY_HEARTBEAT if what == "the scheduler alone" else 0
        yield Case(f"Airflow: SIGKILL of {what}", f"{point}; {then}", (crash,), most_beside=beside)
    yield Case(
        "Airflow: a task's state forced to success",
        f"{point}, and its process is killed: reconcile fails the run until the task is cleared",
        (_forge,),
    )


@cache
def _stack() -> AirflowStack:
    home = Path(tempfile.mkdtemp(prefix="chaos-airflow-"))
    atexit.register(shutil.rmtree, home, ignore_errors=True)
    stack = AirflowStack(home, ROOT / "tests" / "chaos" / "dags", env=_SETTINGS)
    stack.start()
    atexit.register(stack.stop)
    stack.api.wait_for_dag(_DAG)
    return stack


class _AirflowRun:
    """A run of several shards, triggered; what Airflow and the store say of it."""

    def __init__(self, folder: Path, shard_rows: int = _SHARD_ROWS) -> None:
        self.stack, self.api = _stack(), _stack().api
        self.api.fail_unfinished(_DAG)  # what an earlier case that failed may have left
        self._folder, self._paid_log = folder, folder / "paid.tsv"
        self._texts = [f"ticket {i}" for i in range(_SHARDS * shard_rows)]
        source = write_input(folder / "in.jsonl", self._texts)
        engine = {**_SLOW, "paid_log": str(self._paid_log)}
        fields = job_fields(
            folder / "store",
            "shaken",
            source,
            model={"backend": "tests.engines:FaultyEngine", "engine": engine},
            sharding={"max_rows": shard_rows, "max_parallel_shards": _SHARDS},
            checkpoint={"rows": _PART_ROWS, "grace_seconds": 5, "progress_seconds": 1},
        )
        self.run_id = self.api.trigger(_DAG, {"spec": fields})
        self.stored = StoredRun(folder / "store", "shaken", self.run_id)

    def strike(self, what: str, fault: Callable[[list[int]], None]) -> list[int]:
        """Let the fault happen at the point.

        Args:
            what: it is.
            fault: is given the shards whose worker runs; they are returned as well.
        """
        wait_until(lambda: all(self._parts(shard) for shard in range(_SHARDS)), "a part of each shard", 180)
        running = [s for s in range(_SHARDS) if worker_of(self.stored.layout.folder, s) is not None]
        assert running, "no shard runs any more: the fault strikes nothing"
        note_strike(self._folder / STRIKES, what)
        fault(running)
        return running

    def _parts(self, shard: int) -> list[str]:
        stored = self.stored
        return [info.key for info in stored.store.list(stored.layout.shard(shard)) if "/part-" in info.key]

    def kill_task(self, shard: int) -> None:
        """SIGKILL to the process in which Airflow runs the shard's task."""
        worker = worker_of(self.stored.layout.folder, shard)
        assert worker is not None, f"shard {shard} has no worker"
        task = parent_of(worker)
        assert b"airflow worker -- " in Path(f"/proc/{task}/cmdline").read_bytes(), "not Airflow's task"
        assert _is_below(task, self.stack.pids), "not of this Airflow"
        os.kill(task, signal.SIGKILL)

    def check_retried(self, shards: Sequence[int]) -> None:
        """Fail unless the tasks of these shards took two tries, and the others one."""
        tasks = [t for t in self.api.tasks(_DAG, self.run_id) if t["task_id"] == "infer"]
        tries = {t["map_index"]: t["try_number"] for t in tasks}
        wanted = {shard: 2 if shard in shards else 1 for shard in range(_SHARDS)}
        assert tries == wanted, f"tries by task: {tries}, not {wanted}"

    def ends(self) -> str:
        """How Airflow says that the run ended; with each task's state where it matters."""
        state = self.api.wait(_DAG, self.run_id)
        return state if state == "success" else f"{state}: {self.api.states(_DAG, self.run_id)}"

    def account(self) -> Account:
        """The oracle's word on the tables that the run itself published."""
        ended = self.ends()
        assert ended == "success", ended
        plan, files = self.stored.plan, LocalFiles(self.stored.store.uri)
        answers = {row: answer_to(plan.spec, f"Answer: {text}") for row, text in enumerate(self._texts)}
        again = paid_again(self._paid_log, durable_rows(files, plan.folder))
        return verdict(files, plan.job, plan.folder, answers, again)


def _is_below(pid: int, roots: list[int]) -> bool:
    """Whether one of `roots` is a process or has started it, through whatever generations."""
    while pid > 1 and pid not in roots:
        pid = parent_of(pid)
    return pid in roots


def _kill(folder: Path) -> Account:
    run = _AirflowRun(folder)

    def kill(running: list[int]) -> None:
        for shard in running[-2:]:
            run.kill_task(shard)

    struck = run.strike("SIGKILL of two tasks", kill)[-2:]
    found = run.account()
    run.check_retried(struck)
    return found


def _crash(
    components: tuple[str, ...],
    folder: Path,
    *,
    retried: bool = True,
    alone: bool = False,
    shard_rows: int = _SHARD_ROWS,
) -> Account:
    run = _AirflowRun(folder, shard_rows)
    what = f"SIGKILL of {', '.join(components)}"
    struck = run.strike(what, lambda _: run.stack.crash(*components, alone=alone))
    run.stack.wait_until_ready()
    found = run.account()
    run.check_retried(struck if retried else [])
    return found


def _forge(folder: Path) -> Account:
    run = _AirflowRun(folder)

    def forge(running: list[int]) -> None:
        run.api.set_state(_DAG, run.run_id, "infer", "success", map_index=running[-1])
        run.kill_task(running[-1])

    forged = run.strike("a forged state, and SIGKILL of the task", forge)[-1]
    ended = run.ends()
    states = run.api.states(_DAG, run.run_id)
    assert states[f"infer[{forged}]"] == "success", states
    assert (states["reconcile"], states["merge"]) == ("failed", "upstream_failed"), ended
    run.api.clear(_DAG, run.run_id, [["infer", forged]], only_failed=False)
    return run.account()
