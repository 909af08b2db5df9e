"""The order in which rows that are ready enter the engine: shared prefixes together, then longest first.

Rows that share a prefix one after another find it in the engine's cache; among those that share
nothing more, the longest first leaves the short ones to fill the gaps at the end.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeVar

from airflow_batchinfer.prompts.builder import Prompt
from airflow_batchinfer.worker.work import Row

TOKENS_WORTH_SHARING = 32
"""A shorter shared prefix is not worth an order of its own: engines cache whole blocks of 16 and more."""

CHARACTERS_WORTH_SHARING = 128
"""The same for engines that are sent text."""

_Text = TypeVar("_Text", list[int], str)


def order(rows: Sequence[Row]) -> list[Row]:
    """The rows in the order to send them."""
    if not rows:
        return []
    if rows[0].prepared.prompts[0].token_ids is not None:
        return _order([(row.prepared.prompts[0].token_ids or [], row) for row in rows], TOKENS_WORTH_SHARING)
    return _order([(_text(row.prepared.prompts[0]), row) for row in rows], CHARACTERS_WORTH_SHARING)


def _text(prompt: Prompt) -> str:
    if prompt.messages is None:
        return prompt.text or ""
    return "\0".join(message["content"] for message in prompt.messages)


def _order(rows: list[tuple[_Text, Row]], worth: int) -> list[Row]:
    """Walk the tree of prefixes: branches with several rows one after another, then the single rows."""
    texts = [text for text, _ in rows]
    shared = _shared_prefix(min(texts), max(texts))
    branches: dict[object, list[tuple[_Text, Row]]] = {}
    for text, row in rows:
        step = text[shared : shared + worth]
        branches.setdefault(step if isinstance(step, str) else tuple(step), []).append((text, row))
    if len(branches) == 1 or len(branches) == len(rows):
        return _longest_first(row for _, row in rows)
    ordered: list[Row] = []
    single: list[Row] = []
    for branch in branches.values():
        if len(branch) == 1:
            single.append(branch[0][1])
        else:
            ordered.extend(_order(branch, worth))
    return [*ordered, *_longest_first(single)]


def _shared_prefix(first: _Text, second: _Text) -> int:
    """Length of what two texts begin with alike."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def _longest_first(rows: Iterable[Row]) -> list[Row]:
    return sorted(rows, key=lambda row: row.prepared.tokens, reverse=True)
