"""SIGTERM, the stop marker, a parent's death: what is paid is kept, and the exit code says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from airflow_batchinfer.errors import ExitCode
from airflow_batchinfer.run.stop import clear_stop, set_stop
from tests.unit.worker.conftest import ROOT, Run, texts

# Four at a time, so that a kill finds rows in flight.
SLOW = {"delay_seconds": 0.3, "max_in_flight": 4}


def checkpoint(grace: float) -> dict[str, float]:
    return {"grace_seconds": grace, "progress_seconds": 0.1}


def test_sigterm_without_grace_aborts_what_is_in_flight_and_keeps_what_is_done(run: Run) -> None:
    run.plan(texts(100), options=SLOW, checkpoint=checkpoint(0))
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) >= 8, worker)
    worker.send_signal(signal.SIGTERM)
    code, said = run.end_of(worker)
    assert code == ExitCode.RECLAIMED
    assert said == "batchinfer: told to leave by SIGTERM"
    assert run.durable() == set(run.paid())
    assert run.progress().state == "reclaimed"
    assert not run.files("suspects.json")
    assert not run.files("commit.json")


def test_sigterm_with_grace_lets_what_is_in_flight_finish(run: Run) -> None:
    run.plan(texts(100), options=SLOW, checkpoint=checkpoint(20))
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) >= 4, worker)
    paid_then = len(run.paid())
    worker.send_signal(signal.SIGTERM)
    assert run.end_of(worker)[0] == ExitCode.RECLAIMED
    assert run.durable() == set(run.paid())
    assert paid_then < len(run.paid()) < 50
    assert run.work()[0] == ExitCode.COMMITTED
    assert set(run.paid().values()) == {1}


def test_a_second_sigterm_ends_the_grace(run: Run) -> None:
    run.plan(texts(20, {2: "<<hang>>"}), engine="FaultyEngine", checkpoint=checkpoint(600))
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) == 19, worker)
    worker.send_signal(signal.SIGTERM)
    run.wait_until(lambda: run.state() == "draining", worker)
    worker.send_signal(signal.SIGTERM)
    assert run.end_of(worker)[0] == ExitCode.RECLAIMED
    assert run.durable() == set(range(20)) - {2}


def test_the_last_rows_within_the_grace_still_make_a_commit(run: Run) -> None:
    run.plan(texts(4), options={"delay_seconds": 5.0}, checkpoint=checkpoint(20))
    worker = run.start()
    run.wait_until(lambda: run.state() == "running" and run.progress().in_flight == 4, worker)
    worker.send_signal(signal.SIGTERM)
    assert run.end_of(worker)[0] == ExitCode.COMMITTED
    assert run.outcomes() == {"succeeded": 4}


def test_a_job_that_is_refused_while_the_worker_leaves_is_no_failure(run: Run) -> None:
    slow = {"delay_seconds": 5.0}
    marks = dict.fromkeys(range(4), "<<locked>>")
    run.plan(texts(4, marks), engine="FaultyEngine", options=slow, checkpoint=checkpoint(20))
    worker = run.start()
    run.wait_until(lambda: run.state() == "running" and run.progress().in_flight == 4, worker)
    worker.send_signal(signal.SIGTERM)
    assert run.end_of(worker)[0] == ExitCode.RECLAIMED
    assert run.files("suspects.json") == []


def test_sigterm_while_the_engine_starts(run: Run) -> None:
    run.plan(texts(4), options={"start_seconds": 600}, checkpoint=checkpoint(600))
    worker = run.start()
    run.wait_until(lambda: run.state() == "loading", worker)
    worker.send_signal(signal.SIGTERM)
    assert run.end_of(worker)[0] == ExitCode.RECLAIMED


INTERRUPTED = """
import os, signal
from airflow_batchinfer.worker import run
from airflow_batchinfer.worker.__main__ import leave, main
looks = []
def look(store, layout, shard, fingerprint):
    looks.append(shard)
    assert looks == [0]
    os.kill(os.getpid(), signal.SIGTERM)
run.sound_commit = look
leave(main())
"""


def test_sigterm_while_the_worker_looks_at_its_shards(run: Run) -> None:
    run.plan(texts(4), texts(4, first=4), texts(4, first=8))
    code, said = run.end_of(run.start("0,1,2", program=("-c", INTERRUPTED)))
    assert (code, said) == (ExitCode.RECLAIMED, "batchinfer: told to leave by SIGTERM")
    assert not run.files("progress.json")


def test_the_stop_marker_drains_and_clearing_it_resumes(run: Run) -> None:
    run.plan(texts(60), options=SLOW, checkpoint=checkpoint(20))
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) >= 4, worker)
    set_stop(run.store, run.planned.folder, "enough", "a person")
    code, said = run.end_of(worker)
    assert code == ExitCode.STOPPED
    assert "stopped by a person: enough" in said
    assert run.durable() == set(run.paid())
    assert run.progress().state == "stopped"
    assert run.work()[0] == ExitCode.STOPPED
    clear_stop(run.store, run.planned.folder)
    assert run.work()[0] == ExitCode.COMMITTED
    assert set(run.paid().values()) == {1}


def test_sigterm_is_heeded_while_the_store_does_not_answer(run: Run) -> None:
    """A read of the stop marker that never ends, as of a silent server: the marker is a pipe."""
    run.plan(texts(200), options=SLOW, checkpoint=checkpoint(0))
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) >= 4, worker)
    marker = Path(run.store.uri_of(run.layout.stop))
    os.mkfifo(marker)
    silent_end = run.wait_for(lambda: _end_with_a_reader(marker), worker)
    try:
        worker.send_signal(signal.SIGTERM)
        run.wait_until(lambda: bool(run.parts()), worker)
        assert run.durable() == set(run.paid())
        assert len(run.durable()) < 200
        assert run.end_of(worker)[0] == ExitCode.RECLAIMED
    finally:
        os.close(silent_end)


ALL_AT_ONCE = {"delay_seconds": 5.0, "max_in_flight": 40}
"""Time to get at the store before any answer is there."""


def plan_a_stop(run: Run) -> None:
    """Rows that stop the line; the reporter looks at the store once, at the start."""
    run.plan(
        texts(60, dict.fromkeys(range(60), "<<invalid 99>>")),
        engine="FaultyEngine",
        options=ALL_AT_ONCE,
        task={"type": "choice", "labels": ["yes", "no"]},
        line={"window": 20, "min_rows": 20},
        retry={"invalid_attempts": 1},
        checkpoint={"grace_seconds": 20, "progress_seconds": 600},
    )


def test_the_line_stops_at_once_and_its_marker_is_waited_for(run: Run) -> None:
    """A store that does not answer: the marker is a pipe, and whoever looks for it waits."""
    plan_a_stop(run)
    worker = run.start()
    run.wait_until(lambda: bool(run.files("suspects.json")), worker)
    marker = Path(run.store.uri_of(run.layout.stop))
    os.mkfifo(marker)
    silent_end = run.wait_for(lambda: _end_with_a_reader(marker), worker)
    try:
        run.wait_until(lambda: len(run.durable()) == 40, worker)
        assert worker.poll() is None, "it has not left without the marker"
    finally:
        os.close(silent_end)
    code, said = run.end_of(worker)
    assert code == ExitCode.STOPPED
    assert "stopped by worker of shard 0000: 20 of the last 20 rows did not succeed" in said


def test_a_marker_that_cannot_be_written_is_told(run: Run) -> None:
    plan_a_stop(run)
    program = "from airflow_batchinfer.worker import __main__, retrying; retrying._WAIT_SECONDS = ()"
    worker = run.start(program=("-c", f"{program}; __main__.leave(__main__.main())"))
    run.wait_until(lambda: bool(run.files("suspects.json")), worker)
    Path(run.store.uri_of(run.layout.stop)).mkdir()
    code, said = run.end_of(worker)
    assert code == ExitCode.STOPPED
    assert "stopped by worker of shard 0000" in said
    assert "the other workers go on, as the stop marker cannot be written" in said
    assert len(run.durable()) == 40


def _end_with_a_reader(pipe: Path) -> int | None:
    """The writing end of a pipe that somebody is about to read."""
    try:
        return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return None


PARENT = """
import subprocess, sys, time
worker = subprocess.Popen(sys.argv[1:], stderr=subprocess.DEVNULL)
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_a_worker_dies_with_its_parent_and_its_engine_with_it(run: Run) -> None:
    run.plan(texts(200), engine="DyingEngine", options=SLOW, checkpoint=checkpoint(0))
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *run.command("0", "--die-with-parent")],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    run.wait_until(lambda: len(run.paid()) >= 4)
    engine = _children(worker)
    assert len(engine) == 1
    parent.kill()
    parent.communicate()
    run.wait_until(lambda: not _alive(worker) and not _alive(engine[0]))
    assert run.progress().state == "reclaimed"
    assert run.durable() == set(run.paid())


def test_a_parent_that_is_gone_already_is_noticed(run: Run) -> None:
    run.plan(texts(4))
    code, said = run.work("0", "--die-with-parent", "1")
    assert (code, said) == (ExitCode.RECLAIMED, "batchinfer: the parent process has ended")


def test_what_a_dead_worker_left_over_is_ended_by_the_next(run: Run) -> None:
    """An engine that ignores its worker's death: it sleeps on, with the dead worker's mark."""
    from airflow_batchinfer.worker.processes import OWNER, identity

    gone = identity().rsplit(":", 2)[0] + ":4194304:1"
    leftover = subprocess.Popen(["sleep", "600"], env={**os.environ, OWNER: gone}, start_new_session=True)
    mine = subprocess.Popen(["sleep", "600"], env={**os.environ, OWNER: identity()})
    elsewhere = subprocess.Popen(["sleep", "600"], env={**os.environ, OWNER: "another-host:1:4194304:1"})
    try:
        run.plan(texts(4))
        assert run.work()[0] == 0
        assert leftover.wait(10) == -signal.SIGKILL
        assert mine.poll() is None
        assert elsewhere.poll() is None
    finally:
        for process in (leftover, mine, elsewhere):
            process.kill()
            process.wait()


def _children(pid: int) -> list[int]:
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_killed_worker_takes_its_engine_along(run: Run) -> None:
    run.plan(texts(200), engine="DyingEngine", options=SLOW)
    worker = run.start()
    run.wait_until(lambda: len(run.paid()) >= 4, worker)
    (engine,) = _children(worker.pid)
    worker.kill()
    worker.communicate()
    deadline = time.monotonic() + 10
    while _alive(engine):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_no_thread_holds_up_the_end_of_the_process() -> None:
    program = (
        "import threading; from airflow_batchinfer.worker.__main__ import leave; "
        "threading.Thread(target=threading.Event().wait).start(); print('said', end=''); leave(75)"
    )
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, timeout=60, cwd=ROOT)
    assert (done.returncode, done.stdout) == (75, b"said")
