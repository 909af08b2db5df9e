"""What every peer is asked to do, and the form its answers are compared in."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Job:
    """One set of prompts for one peer.

    Attributes:
        prompts: JSONL of `{"id": int, "text": str}`, in file order.
        system: the system message all rows share; empty for none.
        template: the user message, with `{text}` for the row's text.
        out: folder for the results; exists. A second start with the same folder is a resume.
        model: folder of the model.
        engine: engine arguments by vLLM's names; the same for all in an equal-arguments run, and only
            what the model needs in a defaults run.
        max_tokens: most tokens of an answer; decoding is greedy for all.
        checkpoint_rows: rows between checkpoints, of a peer that makes them only if asked; 0 for none.
    """

    prompts: str
    out: str
    model: str
    system: str
    template: str
    engine: dict[str, Any] = field(default_factory=dict)
    max_tokens: int = 64
    checkpoint_rows: int = 0

    def save(self, path: Path) -> None:
        """Write as JSON."""
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def load(cls, path: str) -> Job:
        """Read what `save` wrote."""
        return cls(**json.loads(Path(path).read_text()))

    @property
    def folder(self) -> Path:
        """Where results go."""
        return Path(self.out)

    def rows(self) -> Iterator[tuple[int, list[dict[str, str]]]]:
        """Each row's id and chat messages. Raises `json.JSONDecodeError` on a line that is no JSON."""
        for line in self.lines():
            yield self.row(line)

    def lines(self) -> Iterator[str]:
        """The input's lines."""
        with open(self.prompts, encoding="utf-8") as lines:
            yield from lines

    def row(self, line: str) -> tuple[int, list[dict[str, str]]]:
        """One line's id and chat messages. Raises `json.JSONDecodeError`."""
        row = json.loads(line)
        messages = [{"role": "user", "content": self.template.format(text=row["text"])}]
        if self.system:
            messages.insert(0, {"role": "system", "content": self.system})
        return int(row["id"]), messages


Results = dict[int, str]
"""Accepted answers by row id: those that ended with `stop` or `length`."""


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a JSONL file; a torn last line is left out, a missing file is empty."""
    if not path.exists():
        return
    with path.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue
