"""What is wrong with a text as an answer of its task. Compiled once a job."""

from __future__ import annotations

import json
from collections.abc import Callable

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from airflow_batchinfer.conformance.patterns import PATTERN_FORMAT, matches, unlimited, with_limit
from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.spec import ChoiceTask, JsonTask, RegexTask

FaultOf = Callable[[str], str | None]
"""Says what is wrong with a text; none if it is an answer.

Raises `TimeoutError` if a pattern takes too long on it, and what Python raises at a number or a nesting
beyond its bounds.
"""

_QUOTED = 120
"""Characters of a wrong answer that its fault quotes."""


def fault_finder(task: ChoiceTask | JsonTask | RegexTask) -> FaultOf:
    """What tells this task's answers from other texts. Raises `SpecError` if the JSON Schema is none."""
    match task:
        case ChoiceTask(labels=labels):
            return _choice(frozenset(labels))
        case JsonTask(json_schema=schema):
            return _json(schema)
        case RegexTask(pattern=pattern):
            return _regex(pattern)


def _choice(labels: frozenset[str]) -> FaultOf:
    return lambda text: None if text in labels else f"{_quote(text)} is none of the labels"


def _json(schema: dict[str, object]) -> FaultOf:
    validator_class = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator_class.check_schema(schema, format_checker=PATTERN_FORMAT)  # type: ignore[call-arg]
    except jsonschema.SchemaError as error:
        raise SpecError(f"task.schema: {error.json_path}: {error.message}") from error
    # Its dialect is chosen: told again, it would be looked up at each `$ref`, and found without our limit.
    schema = {name: value for name, value in schema.items() if name != "$schema"}
    if (fault := unlimited(schema)) is not None:
        raise SpecError(f"task.schema: {fault}")
    # An empty registry: a `$ref` to a web address is an error, never a download.
    validator = with_limit(validator_class)(schema, registry=Registry())

    def fault_of(text: str) -> str | None:
        try:
            value = json.loads(text, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            return f"not JSON: {error}"
        try:
            fault = next(validator.iter_errors(value), None)
        except Unresolvable as unresolvable:
            return f"task.schema has a `$ref` that leads nowhere: {unresolvable}"
        return None if fault is None else f"{fault.json_path}: {fault.message[: 2 * _QUOTED]}"

    return fault_of


def _regex(pattern: str) -> FaultOf:
    return lambda text: (
        None if matches(pattern, text) else f"{_quote(text)} does not match task.pattern as a whole"
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"`{name}` is no JSON value")


def _quote(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "…")
