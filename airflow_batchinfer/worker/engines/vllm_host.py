"""The process vLLM runs in: `python -m airflow_batchinfer.worker.engines.vllm_host` (see `vllm`).

It answers one worker until that says `close`, or is gone. What it does with vLLM is in `vllm_driver`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import traceback
from multiprocessing import active_children
from multiprocessing.connection import wait
from typing import TYPE_CHECKING

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.worker.engines.process import Host, Message

if TYPE_CHECKING:
    from airflow_batchinfer.worker.engines.vllm_driver import VllmDriver

_CODE_SECONDS = 1.0
"""Patience with the exit code of a process that has ended."""
_REPORT_SECONDS = 0.5
"""Progress is told this often while no row finishes."""


def main() -> None:
    """Prepare vLLM for the job, start it when told to, tell the worker, and serve it."""
    host = Host(sys.argv[1:])
    job = host.incoming.get()
    try:
        if job is None:
            return
        # Imports and configuration take seconds and no accelerator: they do not wait for the word to start.
        from airflow_batchinfer.worker.engines.vllm_driver import VllmDriver

        driver = VllmDriver(JobSpec.parse(job[1], stored=True))
        word = host.incoming.get()
        if word is None or word[0] != "start":
            return
        driver.start()
    except SpecError as error:
        host.send("bad_spec", str(error))
        return
    except Exception as error:
        traceback.print_exc()
        host.send("failed", f"{type(error).__name__}: {error}")
        return
    threading.Thread(target=_watch_children, args=(host,), name="watch-children", daemon=True).start()
    host.send("ready", driver.info())
    try:
        _serve(host, driver)
    except Exception as error:
        traceback.print_exc()
        _die(host, f"{type(error).__name__}: {error}")
    print(f"vllm engine: {json.dumps(driver.counters)}", file=sys.stderr, flush=True)


def _serve(host: Host, driver: VllmDriver) -> None:
    """Add what comes, step while there is work, report what finishes."""
    reported = time.monotonic()
    while True:
        while not host.incoming.empty() or not driver.busy:
            message = host.incoming.get()
            if message is None or message[0] == "close":
                return
            _obey(host, driver, message)
        finished = driver.step()
        if finished or time.monotonic() - reported > _REPORT_SECONDS:
            reported = time.monotonic()
            host.send("results", driver.tokens_made, finished)


def _obey(host: Host, driver: VllmDriver, message: Message) -> None:
    match message:
        case ("add", list() as requests):
            refused = [failure for r in requests if (failure := driver.add(*r)) is not None]
            if refused:
                host.send("results", driver.tokens_made, refused)
        case ("abort", list() as keys):
            driver.abort(keys)


def _watch_children(host: Host) -> None:
    """End this process as soon as one of vLLM's own does: vLLM would wait for it for ever."""
    children = {child.sentinel: child for child in active_children()}
    if not children:
        return
    ended = children[wait(list(children))[0]]  # type: ignore[index]
    until = time.monotonic() + _CODE_SECONDS
    while (code := ended.exitcode) is None and time.monotonic() < until:
        time.sleep(0.01)  # vLLM waits for it as well, and whoever comes second is told a little later
    if code is not None and code < 0:
        how = f"was ended by {signal.Signals(-code).name}"
        if -code == signal.SIGKILL:
            how += " (the kernel does that when memory runs out)"
    else:
        how = f"exited with code {code}"
    _die(host, f"vLLM's process {ended.name} {how}")


def _die(host: Host, reason: str) -> None:
    """Tell the worker why, and leave without any of vLLM's own shutdown, which may hang by now."""
    try:
        host.send("died", reason)
    finally:
        os._exit(1)


if __name__ == "__main__":
    main()
    os._exit(0)  # vLLM's own shutdown takes seconds; the worker ends the rest of the group and what it left
