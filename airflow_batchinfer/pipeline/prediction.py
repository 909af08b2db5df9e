"""Predicted work of a row, before any tokenizer: good enough to balance shards, never trusted."""

from __future__ import annotations

from dataclasses import dataclass

from airflow_batchinfer.spec import ChoiceTask, EmbedTask, JobSpec

BYTES_PER_TOKEN = 4
"""UTF-8 bytes of a token, about, for English text and today's vocabularies."""

MESSAGE_TOKENS = 8
"""What a chat template adds around one message, about."""


@dataclass(frozen=True)
class Prediction:
    """Tokens of a row: `constant` plus its text's bytes over `BYTES_PER_TOKEN`, plus `output`.

    A row is predicted over-long when prompt and longest answer exceed `limit`; none if no limit is known.
    """

    constant: int
    output: int
    longest_output: int
    limit: int | None


def predict(spec: JobSpec) -> Prediction:
    """The prediction for a job's rows."""
    prompt = spec.prompt
    fixed = "".join([*prompt.templates().values(), prompt.system or ""])
    fixed += "".join(example.user + example.assistant for example in prompt.examples)
    messages = len(prompt.templates()) + bool(prompt.system) + 2 * len(prompt.examples)
    longest = 0 if isinstance(spec.task, EmbedTask) else spec.sampling.max_tokens
    output = longest // 2
    if isinstance(spec.task, ChoiceTask):
        label = max(len(label.encode()) for label in spec.task.labels)
        output = longest = min(longest, label // BYTES_PER_TOKEN + 2)
    limit = spec.model.engine.get("max_model_len")
    return Prediction(
        constant=len(fixed.encode()) // BYTES_PER_TOKEN + (MESSAGE_TOKENS * messages if prompt.chat else 0),
        output=output,
        longest_output=longest,
        limit=limit if isinstance(limit, int) else None,
    )
