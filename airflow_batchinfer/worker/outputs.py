"""Is a completion what the job asked for? One judge a job, compiled once."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import NamedTuple

import jsonschema
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

from airflow_batchinfer.errors import SpecError
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.worker.engines.base import Completion
from airflow_batchinfer.worker.patterns import MATCH_SECONDS, PATTERN_FORMAT, matches, with_limit

FINISHED = frozenset({"stop", "length"})
"""Finish reasons of a result; any other text came from a request that was cut off."""

_QUOTED = 120
"""Characters of a wrong output that its message quotes."""


class Judged(NamedTuple):
    """A completion judged: its output as it is stored, and why it is not one, if so."""

    output: str | None
    reason: Reason | None = None
    message: str | None = None


Judge = Callable[[Completion], Judged]


def output_judge(spec: JobSpec) -> Judge:
    """The judge of a job's completions, those with a finish reason in `FINISHED`.

    Raises:
        SpecError: the JSON Schema is none.
    """
    match spec.task:
        case EmbedTask():
            return _judge_vector
        case ChoiceTask(labels=labels):
            return _structured(_choice(frozenset(labels)))
        case JsonTask(json_schema=schema):
            return _structured(_json(schema))
        case RegexTask(pattern=pattern):
            return _structured(_regex(pattern))
        case _:
            return _judge_text


def _judge_text(completion: Completion) -> Judged:
    text = completion.text
    if text is None or not text.strip():
        return Judged(text, Reason.EMPTY_OUTPUT, "the output is blank")
    return Judged(text)


def _judge_vector(completion: Completion) -> Judged:
    vector = completion.vector
    if not vector:
        return Judged(None, Reason.EMPTY_OUTPUT, "the engine gave no vector")
    if not all(map(math.isfinite, vector)):
        return Judged(None, Reason.INVALID_OUTPUT, "the vector holds values that are no numbers")
    return Judged(None)


def _structured(fault_of: Callable[[str], str | None]) -> Judge:
    """A judge of text that must have a form; `fault_of` says what is wrong with it."""

    def judge(completion: Completion) -> Judged:
        raw = completion.text or ""
        text = raw.strip()
        if not text:
            return Judged(completion.text, Reason.EMPTY_OUTPUT, "the output is blank")
        try:
            fault = fault_of(raw)
            if fault is None:
                return Judged(raw)
            if text != raw and fault_of(text) is None:
                return Judged(text)
        except TimeoutError:
            fault = f"cannot be checked: a pattern took more than {MATCH_SECONDS:g} s on it"
        except Exception as error:
            # A number or a nesting beyond Python's bounds costs its row, not the shard.
            fault = f"cannot be checked: {type(error).__name__}: {error}"
        if completion.finish_reason == "length":
            return Judged(raw, Reason.TRUNCATED_OUTPUT, f"cut off by sampling.max_tokens: {fault}")
        return Judged(raw, Reason.INVALID_OUTPUT, fault)

    return judge


def _choice(labels: frozenset[str]) -> Callable[[str], str | None]:
    return lambda text: None if text in labels else f"{_quote(text)} is none of the labels"


def _json(schema: dict[str, object]) -> Callable[[str], str | None]:
    validator_class = validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        validator_class.check_schema(schema, format_checker=PATTERN_FORMAT)  # type: ignore[call-arg]
    except jsonschema.SchemaError as error:
        raise SpecError(f"task.schema: {error.json_path}: {error.message}") from error
    # Its dialect is chosen: told again, it would be looked up at each `$ref`, and found without our limit.
    schema = {name: value for name, value in schema.items() if name != "$schema"}
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


def _regex(pattern: str) -> Callable[[str], str | None]:
    return lambda text: (
        None if matches(pattern, text) else f"{_quote(text)} does not match task.pattern as a whole"
    )


def _no_constant(name: str) -> float:
    raise ValueError(f"`{name}` is no JSON value")


def _quote(text: str) -> str:
    return repr(text if len(text) <= _QUOTED else text[:_QUOTED] + "…")
