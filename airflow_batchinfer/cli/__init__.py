"""The command `airflow_batchinfer`: look at job specs and runs without Airflow.

Each command is a small function; a module of this package holds those of one subject and lists them in
`COMMANDS`. They work in the worker's environment too: what is heavy is imported when it is called.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import airflow_batchinfer
from airflow_batchinfer.cli import quality, runs, specs, upkeep
from airflow_batchinfer.errors import BatchInferError

_COMMANDS = [*specs.COMMANDS, *runs.COMMANDS, *upkeep.COMMANDS, *quality.COMMANDS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; without one, print the job spec's JSON Schema.

    Returns:
        The exit status: 0, or `exit_code` of the error, which goes to stderr as one message.
    """
    parsed = _parser().parse_args(arguments)
    try:
        (parsed.run if parsed.command else specs.schema)(parsed)
    except BatchInferError as error:
        print(f"batchinfer: {error}", file=sys.stderr)
        return int(error.exit_code)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="airflow_batchinfer",
        description=airflow_batchinfer.__doc__,
        epilog="Without a command: the JSON Schema of a job spec. Exit codes: see docs/failures.md.",
    )
    parser.add_argument("--version", action="version", version=airflow_batchinfer.__version__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for command in _COMMANDS:
        subparser = commands.add_parser(command.name, help=command.help, description=command.help)
        command.add_arguments(subparser)
        subparser.set_defaults(run=command.run)
    return parser
