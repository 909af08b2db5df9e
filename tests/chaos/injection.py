"""Faults inside a real process, at a chosen storage operation: no sleeps, no luck.

The victim process (`tests.chaos.victim`) wraps `LocalStore`'s methods before anything else runs. An
operation is counted if its name and key match; at the n-th one the fault strikes, before or after the
operation really happens.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from airflow_batchinfer.store import LocalStore

VARIABLE = "BATCHINFER_CHAOS"

WRITES = ("write_bytes", "put_file", "delete")

TABLE = "table"
"""Name of a commit to a Delta table as an operation."""


@dataclass(frozen=True)
class Fault:
    """What strikes a victim, and where.

    Attributes:
        do: `kill` (SIGKILL to itself), `stop` (SIGSTOP), `enospc`, `eio`, `eacces` (the operation fails
            so), `slow` (half a second more), `torn` (half the object is written without the store's
            care, then SIGKILL: what a disk without atomic rename would leave).
        operations: names of the store's methods that count.
        key: regular expression the key must contain.
        nth: which matching operation, from 1.
        when: before or after the operation.
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

    def environment(self) -> dict[str, str]:
        """What the victim process needs to find the fault."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Self:
        """The fault this process was started with."""
        data = json.loads(os.environ[VARIABLE])
        return cls(**data | {"operations": tuple(data["operations"])})


def install(fault: Fault) -> None:
    """Arm the fault in this process."""
    _hurry_s3()
    if fault.skew_seconds:
        _skew(fault.skew_seconds)
    seen = 0
    pattern = re.compile(fault.key)

    def around(name: str, key: str, act: Callable[[], Any], strike: Callable[[], None]) -> Any:
        nonlocal seen
        if name not in fault.operations or not pattern.search(key):
            return act()
        seen += 1
        struck = fault.nth <= seen < fault.nth + fault.times
        if struck and fault.when == "before":
            strike()
        result = act()
        if struck and fault.when == "after":
            strike()
        return result

    def wrapped(name: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def operation(store: LocalStore, *arguments: Any) -> Any:
            key = str(arguments[1] if name == "put_file" else arguments[0])
            return around(
                name,
                key,
                lambda: inner(store, *arguments),
                lambda: _strike(fault, store, name, arguments),
            )

        return operation

    for name in ("write_bytes", "put_file", "delete", "read_bytes", "list"):
        setattr(LocalStore, name, wrapped(name, getattr(LocalStore, name)))
    if TABLE in fault.operations:
        _wrap_table_writes(fault, around)


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
            strike = partial(_strike, fault, None, TABLE, arguments)
            return around(TABLE, TABLE, lambda: inner(*arguments), strike)

        return operation

    for name in ("_create", "_write"):
        setattr(tables, name, wrapped(getattr(tables, name)))


_ERRORS = {"enospc": errno.ENOSPC, "eio": errno.EIO, "eacces": errno.EACCES}


def _strike(fault: Fault, store: LocalStore | None, name: str, arguments: tuple[Any, ...]) -> None:
    match fault.do:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "slow":
            time.sleep(0.5)
        case "torn":
            if name == "write_bytes" and store is not None:
                path = Path(store.uri_of(arguments[0]))
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(arguments[1][: len(arguments[1]) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        case "enospc" | "eio" | "eacces":
            from airflow_batchinfer.errors import StoreError

            number = _ERRORS[fault.do]
            raise StoreError(f"cannot {name} {arguments[0]}: {OSError(number, os.strerror(number))}")


def _skew(seconds: float) -> None:
    """Make epochs of this process say a wrong time."""
    from airflow_batchinfer.run import epoch

    class Skewed(datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Self:
            shifted = datetime.now(tz) + timedelta(seconds=seconds)
            return cls.fromtimestamp(shifted.timestamp(), tz)

    epoch.datetime = Skewed  # type: ignore[misc]
