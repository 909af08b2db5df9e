"""Commands about quality: `report`, `review`."""

from __future__ import annotations

import argparse
from pathlib import Path

from airflow_batchinfer.cli.command import Command, add_folder_argument, store_of
from airflow_batchinfer.errors import InputError
from airflow_batchinfer.run.layout import RunLayout


def report(arguments: argparse.Namespace) -> None:
    """Write a run's report anew, whatever state it is in, and say where it is."""
    from airflow_batchinfer.pipeline.report import write_report

    store = store_of(arguments)
    print(write_report(store, arguments.folder).headline)
    print(store.uri_of(RunLayout(arguments.folder).report("html")))


def review(arguments: argparse.Namespace) -> None:
    """Read a filled review sheet; print the accuracy and keep it for the report."""
    from airflow_batchinfer.pipeline.eyes import read_sheet

    store = store_of(arguments)
    try:
        filled = None if arguments.sheet is None else Path(arguments.sheet).read_bytes()
        print(read_sheet(store, arguments.folder, filled).sentence())
    except FileNotFoundError as error:
        raise InputError(f"there is no review sheet: {error}") from error


def _review_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--sheet", metavar="FILE", help="the filled sheet (default: review.csv of the run)")
    add_folder_argument(parser)


COMMANDS = [
    Command("report", "write a run's report anew", report, add_folder_argument),
    Command("review", "read a filled review sheet", review, _review_arguments),
]
