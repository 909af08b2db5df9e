"""`PromptBuilder`: rows in, requests out. The one object the worker's preparation thread calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from airflow_batchinfer.run.outcome import Reason


@dataclass(frozen=True, slots=True)
class Prompt:
    """What one request carries: `token_ids` for a token engine, else `messages` or `text`."""

    token_ids: list[int] | None = None
    messages: list[dict[str, str]] | None = None
    text: str | None = None

    @property
    def tokens(self) -> int:
        """Prompt tokens; for a text engine a guess of one token in four characters."""
        if self.token_ids is not None:
            return len(self.token_ids)
        if self.messages is not None:
            return sum(len(m["content"]) for m in self.messages) // 4 + 1
        return len(self.text or "") // 4 + 1


@dataclass(frozen=True, slots=True)
class Prepared:
    """A row ready for the engine: one prompt, or several windows of an over-long row."""

    prompts: tuple[Prompt, ...]
    combination: Literal["concat", "list", "majority"] = "concat"
    separator: str = "\n"

    @property
    def tokens(self) -> int:
        """Prompt tokens of all its prompts."""
        return sum(prompt.tokens for prompt in self.prompts)

    def combine(self, answers: Sequence[str]) -> str:
        """The row's answer from its prompts' answers, in the order of `prompts`."""
        if len(answers) == 1:
            return answers[0]
        if self.combination == "list":
            return json.dumps(list(answers), ensure_ascii=False)
        if self.combination == "majority":
            return Counter(answers).most_common(1)[0][0]  # a tie goes to the one seen first
        return self.separator.join(answers)


@dataclass(frozen=True, slots=True)
class Rejected:
    """A row that is never sent, and why."""

    reason: Reason
    message: str
