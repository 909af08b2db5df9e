"""What became of a row, and why: the words that spec, run and reports share."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """Every input row of a finished run has exactly one."""

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    """Engine or transient error, retries used up."""
    INVALID = "invalid"
    """The output broke the schema or an expectation."""
    REJECTED = "rejected"
    """Never sent to the engine."""
    POISONED = "poisoned"
    """It kills the engine."""
    UNPROCESSED = "unprocessed"
    """No attempt has finished it; only an incomplete run has such rows."""


class Reason(StrEnum):
    """Why a row did not succeed. Each reason belongs to one outcome, see `outcome_of`."""

    EMPTY_INPUT = "empty_input"
    """Every column that the prompt reads is null or blank."""
    RENDER_ERROR = "render_error"
    """The template failed on this row."""
    OVER_LONG = "over_long"
    """Prompt and answer do not fit the model's context."""
    ENGINE_REFUSED = "engine_refused"
    """The engine would not take the request, whatever the retries."""
    GRAMMAR_REJECTED = "grammar_rejected"
    """The engine could not apply the output's grammar to this row."""
    ENGINE_ERROR = "engine_error"
    """Transient engine errors, attempts used up."""
    TIMED_OUT = "timed_out"
    """The engine ran it for longer than its deadline, attempts used up."""
    INVALID_OUTPUT = "invalid_output"
    """The output does not parse, or breaks the schema, labels or pattern."""
    TRUNCATED_OUTPUT = "truncated_output"
    """Generation hit `max_tokens` before a structured output was complete."""
    EMPTY_OUTPUT = "empty_output"
    """The output is blank."""
    EXPECTATION_FAILED = "expectation_failed"
    """The output fails an expectation whose `on_failure` is `dead_letter`; `validate` finds out."""
    ENGINE_KILLED = "engine_killed"
    """The engine dies whenever it runs this row."""


_OUTCOMES: dict[Reason, Outcome] = {
    Reason.EMPTY_INPUT: Outcome.REJECTED,
    Reason.RENDER_ERROR: Outcome.REJECTED,
    Reason.OVER_LONG: Outcome.REJECTED,
    Reason.ENGINE_REFUSED: Outcome.FAILED,
    Reason.GRAMMAR_REJECTED: Outcome.FAILED,
    Reason.ENGINE_ERROR: Outcome.FAILED,
    Reason.TIMED_OUT: Outcome.FAILED,
    Reason.INVALID_OUTPUT: Outcome.INVALID,
    Reason.TRUNCATED_OUTPUT: Outcome.INVALID,
    Reason.EMPTY_OUTPUT: Outcome.INVALID,
    Reason.EXPECTATION_FAILED: Outcome.INVALID,
    Reason.ENGINE_KILLED: Outcome.POISONED,
}


def outcome_of(reason: Reason | None) -> Outcome:
    """The outcome a reason stands for; none means the row succeeded."""
    return Outcome.SUCCEEDED if reason is None else _OUTCOMES[reason]
