"""`Command`: one subcommand, and the arguments that several of them share."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.store import Store, open_store

STORE_VARIABLE = "BATCHINFER_STORE"
"""Environment variable with the default of `--store`."""


def _no_arguments(_: argparse.ArgumentParser) -> None:
    pass


@dataclass(frozen=True)
class Command:
    """One subcommand. `run` prints its answer and raises `BatchInferError` if there is none."""

    name: str
    help: str
    run: Callable[[argparse.Namespace], None]
    add_arguments: Callable[[argparse.ArgumentParser], None] = _no_arguments


def add_store_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--store` and `--store-option`."""
    parser.add_argument(
        "--store",
        metavar="URI",
        default=os.environ.get(STORE_VARIABLE),
        help=f"folder of runs and tables: a local path or s3://bucket/prefix (default: ${STORE_VARIABLE})",
    )
    parser.add_argument(
        "--store-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="setting of an S3 store, e.g. endpoint_url=http://host:9000; never a credential",
    )


def add_folder_argument(parser: argparse.ArgumentParser) -> None:
    """Add the run's folder, and the store's arguments."""
    parser.add_argument("folder", metavar="FOLDER", help="the run's folder in the store: JOB/runs/RUN")
    add_store_arguments(parser)


def store_of(arguments: argparse.Namespace) -> Store:
    """The store that `add_store_arguments` asked for. Raises `SpecError`."""
    if not arguments.store:
        raise SpecError(f"name the store: --store URI, or {STORE_VARIABLE} in the environment")
    options = dict(_pair(option) for option in arguments.store_option)
    return open_store(arguments.store, options)


def positive(text: str) -> int:
    """A whole number from 1, as `argparse` takes it."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a number from 1")
    return number


def days(text: str) -> timedelta:
    """A length of time in days, as `argparse` takes it."""
    return timedelta(days=float(text))


def _pair(option: str) -> tuple[str, str]:
    name, equals, value = option.partition("=")
    if not equals:
        raise SpecError(f"--store-option {option}: write NAME=VALUE")
    return name, value
