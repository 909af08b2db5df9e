"""What a worker process is told on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, field

from airflow_batchinfer.errors import SpecError


@dataclass(frozen=True, slots=True)
class Settings:
    """One worker process: which run, which of its shards, and how it is tied to its parent."""

    store: str
    folder: str
    shards: tuple[int, ...]
    store_options: dict[str, str] = field(default_factory=dict)
    parent: int | None = None
    """Die with the process that started this one: its id, or 0 for whichever it is."""


def parse_arguments(arguments: Sequence[str]) -> Settings:
    """Read the command line.

    Raises:
        SpecError: a value cannot be read. Unknown options end the process with argparse's own message.
    """
    parser = argparse.ArgumentParser(
        prog="python -m airflow_batchinfer.worker",
        description="Runs shards of a planned batch inference run.",
    )
    parser.add_argument("--store", required=True, metavar="URI", help="local folder or s3://bucket/prefix")
    parser.add_argument(
        "--store-option", action="append", default=[], metavar="KEY=VALUE", help="option of an s3:// store"
    )
    parser.add_argument("--folder", required=True, help="the run's folder in the store: <job>/runs/<run>")
    parser.add_argument("--shards", required=True, metavar="N,N", help="shards to run, one after another")
    parser.add_argument(
        "--die-with-parent",
        nargs="?",
        const=0,
        type=int,
        metavar="PID",
        help="take the parent's death for a SIGTERM; PID: the parent, in case it is gone already",
    )
    given = parser.parse_args(arguments)
    options = [option.partition("=") for option in given.store_option]
    if bad := [key for key, equals, _ in options if not key or not equals]:
        raise SpecError(f"--store-option: write it as KEY=VALUE, not `{bad[0]}`")
    try:
        shards = tuple(dict.fromkeys(int(number) for number in given.shards.split(",")))
    except ValueError as error:
        raise SpecError(f"--shards: numbers with commas between, not `{given.shards}`") from error
    return Settings(
        store=given.store,
        folder=given.folder,
        shards=shards,
        store_options={key: value for key, _, value in options},
        parent=given.die_with_parent,
    )
