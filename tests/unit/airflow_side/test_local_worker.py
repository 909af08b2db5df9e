import os
import sys
import time
from pathlib import Path

import pytest

from airflow_batchinfer.operators.local_worker import LocalWorker

pytestmark = pytest.mark.airflow_env


def run(code, lines, grace_seconds=0.5):
    return LocalWorker([sys.executable, "-c", code], os.environ, lines.append, grace_seconds=grace_seconds)


def wait(worker, seconds=30.0):
    deadline = time.monotonic() + seconds
    while (code := worker.wait(0.1)) is None:
        assert time.monotonic() < deadline, "the process did not end"
    return code


def alive(pid):
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_passes_on_output_and_keeps_the_workers_own_message():
    lines = []
    code = (
        "import sys, time; print('loading', flush=True);"
        "sys.stderr.write('batchinfer: bad mo'); sys.stderr.flush();"
        "time.sleep(0.5); sys.stderr.write('del ü\\n\\nleaked semaphore'); sys.exit(64)"
    )
    with run(code, lines) as worker:
        assert wait(worker) == 64
        assert worker.message == "bad model ü"
    assert lines == ["loading", "batchinfer: bad model ü", "leaked semaphore"]


def test_without_a_message_the_last_line_stands_in():
    with run("print('a'); raise SystemExit('KeyError: 1')", []) as worker:
        assert wait(worker) == 1
        assert worker.message == "KeyError: 1"


def test_terminate_reaches_the_worker_alone():
    """The engine runs in the worker's process group and must not see the signal."""
    lines = []
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(75 if child.poll() is None else 1))\n"
        "child = subprocess.Popen(['sleep', '60'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)\n"
    )
    with run(code, lines) as worker:
        while not lines:
            assert worker.wait(0.1) is None
        worker.terminate()
        assert wait(worker) == 75
        child = int(lines[0])
        assert alive(child)
    deadline = time.monotonic() + 10
    while alive(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not alive(child), "what the worker left in its session must be ended"


def test_leaving_the_block_ends_a_running_worker():
    lines = []
    code = (
        "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "print(os.getpid(), flush=True); time.sleep(60)"
    )
    with run(code, lines) as worker:
        while not lines:
            worker.wait(0.1)
    assert not alive(int(lines[0]))


def test_an_error_in_the_block_leaves_the_worker_time_to_checkpoint(tmp_path):
    """A task's time limit, or a supervisor that is gone: what is finished must become durable."""
    lines, kept = [], tmp_path / "kept"
    code = (
        f"import pathlib, signal, sys, time; kept = pathlib.Path({str(kept)!r})\n"
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), kept.touch(), sys.exit(75)))\n"
        "print('ready', flush=True); time.sleep(60)"
    )

    def fail():
        with run(code, lines, grace_seconds=30.0) as worker:
            while not lines:
                worker.wait(0.1)
            raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        fail()
    assert kept.exists()


def test_is_in_a_session_of_its_own():
    lines = []
    with run("import os; print(os.getsid(0) == os.getpid())", lines) as worker:
        wait(worker)
    assert lines == ["True"]
