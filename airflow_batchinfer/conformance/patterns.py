"""Regular expressions on what a model has written, each match under a limit of time.

A pattern that repeats what already repeats may take longer than anybody waits on a text that it does not fit,
and an answer cut off in the middle is such a text. Python's own `re` holds up the whole process meanwhile,
signals and watchdog included; `regex` can be given a limit, and lets other threads run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import regex
from jsonschema import FormatChecker, ValidationError
from jsonschema.protocols import Validator
from jsonschema.validators import extend

MATCH_SECONDS = 0.2
"""CPU time one match may take: a thousand times what those take that come to an end."""

_MORE = 4.0
"""So much longer is the next limit, after one that other threads have used up."""

PATTERN_FORMAT = FormatChecker()
"""Knows the patterns of a schema by what matches them here; jsonschema's own by `re`."""


@PATTERN_FORMAT.checks("regex", raises=(regex.error, ValueError))
def _compiles(pattern: object) -> bool:
    return not isinstance(pattern, str) or regex.compile(pattern) is not None


def matches(pattern: str, text: str) -> bool:
    """Whether a pattern matches a text as a whole. Raises `TimeoutError` after `MATCH_SECONDS`."""
    return _within_limit(regex.fullmatch, pattern, text)


def found(pattern: str, text: str) -> bool:
    """Whether a pattern matches anywhere in a text. Raises `TimeoutError` after `MATCH_SECONDS`."""
    return _within_limit(regex.search, pattern, text)


def _within_limit(match: Callable[..., object], pattern: str, text: str) -> bool:
    """Match for `MATCH_SECONDS`, of which at least half were this thread's.

    `regex` measures the time of the whole process, and beside threads at work its limit comes early.
    """
    limit = MATCH_SECONDS
    while True:
        began = time.thread_time()
        try:
            return match(pattern, text, timeout=limit) is not None
        except TimeoutError:
            if time.thread_time() - began >= MATCH_SECONDS / 2:
                raise
            limit *= _MORE


def with_limit(validator_class: type[Validator]) -> type[Validator]:
    """A JSON Schema validator whose keywords with patterns raise `TimeoutError` after `MATCH_SECONDS`."""
    plain: Any = validator_class.VALIDATORS["additionalProperties"]

    def pattern(validator: Any, pattern: str, instance: Any, _: Any) -> Iterator[ValidationError]:
        if validator.is_type(instance, "string") and not found(pattern, instance):
            yield ValidationError(f"{instance!r} does not match {pattern!r}")

    def pattern_properties(
        validator: Any, patterns: Mapping[str, Any], instance: Any, _: Any
    ) -> Iterator[ValidationError]:
        if not validator.is_type(instance, "object"):
            return
        for pattern, schema in patterns.items():
            for key, value in instance.items():
                if found(pattern, key):
                    yield from validator.descend(value, schema, path=key, schema_path=pattern)

    def additional_properties(
        validator: Any, additional: Any, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        patterns = schema.get("patternProperties", {})
        if patterns and validator.is_type(instance, "object"):
            instance = {k: v for k, v in instance.items() if not any(found(p, k) for p in patterns)}
            schema = {name: value for name, value in schema.items() if name != "patternProperties"}
        yield from plain(validator, additional, instance, schema)

    keywords = {
        "pattern": pattern,
        "patternProperties": pattern_properties,
        "additionalProperties": additional_properties,
    }
    limited: type[Validator] = extend(validator_class, keywords)  # type: ignore[no-untyped-call]
    return limited


def unlimited(schema: Mapping[str, Any]) -> str | None:
    """What in a schema, the `$schema` at its top aside, gets round `with_limit`; none if nothing does."""
    objects = list(_objects(schema))
    if any(isinstance(each.get("$schema"), str) for each in objects):
        # jsonschema then takes its own validator for that dialect.
        return "a `$schema` below the top cannot be followed; leave it out"
    if {"unevaluatedProperties", "patternProperties"} <= {name for each in objects for name in each}:
        # jsonschema looks for what was evaluated without asking the keywords' functions.
        return "`patternProperties` cannot be used with `unevaluatedProperties`; use `additionalProperties`"
    return None


def _objects(value: object) -> Iterator[Mapping[str, Any]]:
    """All JSON objects within a value, itself included."""
    if isinstance(value, Mapping):
        yield value
        value = list(value.values())
    for each in value if isinstance(value, list) else ():
        yield from _objects(each)
