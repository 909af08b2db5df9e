"""Is a completion what the job asked for? One judge a job, compiled once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from airflow_batchinfer.conformance.answers import FaultOf, fault_finder
from airflow_batchinfer.conformance.patterns import MATCH_SECONDS
from airflow_batchinfer.outcome import Reason
from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec, JsonTask, RegexTask
from airflow_batchinfer.worker.engines.base import Completion


class Judged(NamedTuple):
    """A completion judged: its output as it is stored, and why it is not one, if so."""

    output: str | None
    reason: Reason | None = None
    message: str | None = None


Judge = Callable[[Completion], Judged]


def output_judge(spec: JobSpec) -> Judge:
    """The judge of a job's completions, those with a finish reason in `engines.base.FINISHED`.

    Raises:
        SpecError: the JSON Schema is none.
    """
    match spec.task:
        case EmbedTask():
            return _judge_vector
        case ChoiceTask() | JsonTask() | RegexTask() as task:
            return _structured(fault_finder(task))
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


def _structured(fault_of: FaultOf) -> Judge:
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
