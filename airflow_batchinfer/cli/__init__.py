"""The command `airflow_batchinfer`: look at job specs and runs without Airflow.

Each command is a small function; a module of this package holds those of one subject and lists them in
`COMMANDS`. What is heavy is imported when it is called: those that need no table work in the worker's
environment too.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import airflow_batchinfer
from airflow_batchinfer.cli import quality, runs, specs, upkeep
from airflow_batchinfer.errors import BatchInferError, SpecError

_ONLY_IN_AIRFLOWS_ENVIRONMENT = frozenset({"deltalake", "duckdb", "great_expectations", "pandas"})
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
        return _failed(error)
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in _ONLY_IN_AIRFLOWS_ENVIRONMENT:
            raise
        return _failed(
            SpecError(
                f"`{parsed.command}` needs the package `{package}`, which a worker's environment lacks: "
                "run it in Airflow's, or install `airflow-provider-batchinfer[airflow]`"
            )
        )
    return 0


def _failed(error: BatchInferError) -> int:
    print(f"batchinfer: {error}", file=sys.stderr)
    return int(error.exit_code)


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
