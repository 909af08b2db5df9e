"""Commands about job specs: `schema`, `validate`."""

from __future__ import annotations

import argparse
import json

from airflow_batchinfer.cli.command import Command
from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.prompts.template import PromptTemplate
from airflow_batchinfer.run.fingerprint import fingerprint
from airflow_batchinfer.spec import JobSpec
from airflow_batchinfer.spec_files import load_spec


def schema(_: argparse.Namespace) -> None:
    """Print the JSON Schema of a job spec."""
    print(json.dumps(JobSpec.model_json_schema(), indent=2))


def validate(arguments: argparse.Namespace) -> None:
    """Check a spec file, its template included; print what it comes to."""
    spec = load_spec(arguments.spec, arguments.store)
    try:
        columns = PromptTemplate(spec.prompt).columns
    except SpecError as error:
        raise SpecError(f"{arguments.spec}: {error}") from error
    if arguments.full:
        print(spec.to_yaml(), end="")
        return
    print(f"{arguments.spec} is valid.")
    print(f"job          {spec.name}")
    print(f"reads        {', '.join(columns) or 'no column'}")
    print(f"task         {spec.task.type}")
    print(f"store        {spec.store}")
    print(f"fingerprint  {fingerprint(spec)}")


def _validate_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("spec", metavar="SPEC", help="YAML or JSON file")
    parser.add_argument(
        "--store", metavar="URI", help="store of a spec that names none, and base of a relative one"
    )
    parser.add_argument("--full", action="store_true", help="print the spec with all defaults filled in")


COMMANDS = [
    Command("schema", "print the JSON Schema of a job spec", schema),
    Command("validate", "check a spec file", validate, _validate_arguments),
]
