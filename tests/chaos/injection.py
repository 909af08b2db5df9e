"""Faults inside a real process, at a chosen storage operation: no sleeps, no luck.

The victim process (`tests.chaos.victim`) wraps `LocalStore`'s methods before anything else runs. An
operation is counted if its name and key match; at the n-th one the fault strikes, before or after the
operation really happens. Each strike leaves a line in a file, so that a case can tell whether it came to one.
"""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import pkgutil
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal

from airflow_batchinfer.store import LocalStore

VARIABLE = "BATCHINFER_CHAOS"

WRITES = ("write_bytes", "put_file", "delete")

OPERATIONS = (*WRITES, "read_bytes", "list")

TABLE = "table"
"""Name of a commit to a Delta table as an operation."""


@dataclass(frozen=True)
class Fault:
    """What strikes a victim, and where.

    Attributes:
        do: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `enospc`, `eio`, `eacces` (a system call in the
            operation fails so: see `_CALLS`), `slow` (half a second more), `torn` (half the object is
            written without the store's care, then SIGKILL: what a disk without atomic rename would leave).
        operations: names of the store's methods that count.
        key: regular expression the key must contain.
        nth: which matching operation, from 1.
        when: before or after the operation, whether it went through or not.
        times: how many operations from the n-th on are struck.
        skew_seconds: the victim's wall clock is wrong by so much.
    """

    do: Literal["kill", "stop", "enospc", "eio", "eacces", "slow", "torn", "none"] = "none"
    operations: tuple[str, ...] = WRITES
    key: str = ""
    nth: int = 1
    when: Literal["before", "after"] = "before"
    times: int = 1
    skew_seconds: float = 0.0

    def environment(self, strikes: Path) -> dict[str, str]:
        """What the victim process needs to find the fault, and the file that gets a line a strike."""
        return {VARIABLE: json.dumps(asdict(self) | {"strikes": str(strikes)})}


def install() -> None:
    """Arm in this process the fault that it was started with."""
    data = json.loads(os.environ[VARIABLE])
    strikes = Path(data.pop("strikes"))
    fault = Fault(**data | {"operations": tuple(data["operations"])})
    _hurry_s3()
    if fault.skew_seconds:
        _skew(fault.skew_seconds)
        note_strike(strikes, f"skew {fault.skew_seconds:g}")
    if fault.do in _CALLS:
        _let_calls_fail()
    seen = 0
    pattern = re.compile(fault.key)

    def around(name: str, key: str, act: Callable[[], Any], strike: Callable[[], Any]) -> Any:
        """Do an operation; `strike` strikes, and says what to do in the place of `act`, if anything."""
        nonlocal seen
        if fault.do == "none" or name not in fault.operations or not pattern.search(key):
            return act()
        seen += 1
        if not fault.nth <= seen < fault.nth + fault.times:
            return act()
        if fault.when == "before":
            note_strike(strikes, f"{fault.do} before {name} {key}")
            return (strike() or act)()
        try:
            return act()
        finally:
            note_strike(strikes, f"{fault.do} after {name} {key}")
            strike()

    def wrapped(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def operation(store: LocalStore, *arguments: Any) -> Any:
            key = str(arguments[1] if name == "put_file" else arguments[0])

            def act() -> Any:
                result = inner(store, *arguments)
                return iter(list(result)) if name == "list" else result  # all of it, here

            return around(name, key, act, lambda: _strike(fault, store, name, arguments, act))

        return operation

    for name in OPERATIONS:
        setattr(LocalStore, name, wrapped(name, getattr(LocalStore, name)))
    if TABLE in fault.operations:
        _wrap_table_writes(fault, around)


def note_strike(strikes: Path, what: str) -> None:
    """Set down that a fault strikes now."""
    descriptor = os.open(strikes, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(descriptor, f"{what}\n".encode())
    os.close(descriptor)


def _hurry_s3() -> None:
    """Retries that give up in seconds, and uploads in parts of the least size that S3 takes."""
    from airflow_batchinfer.store import s3

    s3._MAX_ATTEMPTS = 3
    s3._MULTIPART_BYTES = 5 * 1024 * 1024


def _wrap_table_writes(fault: Fault, around: Callable[..., Any]) -> None:
    """delta-rs writes tables by itself, past the store: each of its commits is one operation."""
    from airflow_batchinfer.pipeline import tables

    def wrapped(inner: Callable[..., Any]) -> Callable[..., Any]:
        def operation(*arguments: Any) -> Any:
            act = partial(inner, *arguments)
            return around(TABLE, TABLE, act, lambda: _strike(fault, None, TABLE, arguments, act))

        return operation

    for name in ("_create", "_write"):
        setattr(tables, name, wrapped(getattr(tables, name)))


def _strike(
    fault: Fault, store: LocalStore | None, name: str, arguments: tuple[Any, ...], act: Callable[[], Any]
) -> Callable[[], Any] | None:
    """Strike; returns what to do in the place of the operation, none for the operation itself."""
    match fault.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            # To this very thread: one to the process stops it by way of the main thread, a little later.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        case "slow":
            time.sleep(0.5)
        case "torn":
            if name == "write_bytes" and store is not None:
                path = Path(store.uri_of(arguments[0]))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        case "enospc" | "eio" | "eacces":
            return partial(_with_failing_call, fault.do, name, act)
    return None


_CALLS = {
    "enospc": ("write", errno.ENOSPC),
    "eio": ("fsync", errno.EIO),
    "eacces": ("open", errno.EACCES),
}
"""The system call that fails during the operation, and how. The store itself is as it is."""

_failing = threading.local()


def _with_failing_call(kind: str, name: str, act: Callable[[], Any]) -> Any:
    call, number = _CALLS[kind]
    if name == TABLE:  # delta-rs makes its calls past Python: what it raises of them is an OSError as well
        raise OSError(number, os.strerror(number))
    _failing.call, _failing.number, _failing.met = call, number, False
    try:
        return act()
    finally:
        _failing.call = ""
        assert _failing.met, f"{name} makes no call to {call}: nothing failed"


def _let_calls_fail() -> None:
    """Have the calls of `_CALLS` raise what the kernel would, in an operation that is struck."""

    def due(call: str) -> bool:
        due = getattr(_failing, "call", "") == call
        _failing.met = getattr(_failing, "met", False) or due
        return due

    def fail(path: Any) -> None:
        raise OSError(_failing.number, os.strerror(_failing.number), str(path))

    def failing(call: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any, **named: Any) -> Any:
            if due(call):
                fail(arguments[0])
            return inner(*arguments, **named)

        return called

    def opened(file: Any, mode: str = "r", *arguments: Any, **named: Any) -> Any:
        if due("open"):
            fail(file)
        if "w" in mode and due("write"):
            file = "/dev/full"  # the kernel's own: each write to it fails with ENOSPC
        return real_open(file, mode, *arguments, **named)

    real_open = io.open
    io.open = opened  # type: ignore[assignment]
    os.fsync = failing("fsync", os.fsync)
    os.scandir = failing("open", os.scandir)  # type: ignore[assignment]
    os.unlink = failing("open", os.unlink)  # what it takes is leave to change the folder


def _skew(seconds: float) -> None:
    """Put this process's wall clock wrong: `time.time`, and `datetime` in all of the package's modules."""
    import airflow_batchinfer.run
    import airflow_batchinfer.worker

    by = timedelta(seconds=seconds)
    right = time.time
    time.time = lambda: right() + seconds  # type: ignore[assignment]

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return datetime.now(tz) + by

    for package in (airflow_batchinfer.run, airflow_batchinfer.worker):
        for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    for name, loaded in list(sys.modules.items()):
        if name.startswith("airflow_batchinfer.") and getattr(loaded, "datetime", None) is datetime:
            loaded.datetime = Skewed  # type: ignore[attr-defined]
