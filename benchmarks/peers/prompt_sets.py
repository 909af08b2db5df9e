"""The prompt sets: seeded, so that every peer and every run gets the same bytes.

Texts are word sequences with a natural length distribution; what a set is about is how its prompts
relate to each other. Ids start at 1 (datatrove takes an id of 0 for none).
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

MALFORMED = "malformed"
"""Stands for a row whose line is no JSON."""
DEADLY_SET = "deadly"
DEADLY = "qqq"
"""In no text of another row or set: what `meter/poison_engine.py` is told to die of."""

_WORDS = [
    "account",
    "login",
    "password",
    "reset",
    "invoice",
    "refund",
    "charge",
    "payment",
    "card",
    "order",
    "parcel",
    "delivery",
    "late",
    "damaged",
    "box",
    "printer",
    "screen",
    "update",
    "crash",
    "error",
    "export",
    "report",
    "filter",
    "dark",
    "mode",
    "button",
    "slow",
    "page",
    "session",
    "expired",
    "token",
    "customer",
    "waiting",
    "support",
    "reply",
    "manager",
    "contract",
    "seat",
    "license",
    "plan",
    "upgrade",
    "cancel",
    "trial",
    "region",
    "address",
    "cannot",
    "keeps",
    "always",
    "never",
    "after",
    "before",
    "since",
    "yesterday",
    "morning",
    "please",
    "urgent",
    "thanks",
    "regards",
    "broken",
    "works",
]


def uniform(count: int, rng: random.Random) -> Iterator[str]:
    """All texts about 100 words."""
    for _ in range(count):
        yield _text(rng, 100)


def long_tailed(count: int, rng: random.Random) -> Iterator[str]:
    """Log-normal lengths: half under 40 words, a few near 800."""
    for _ in range(count):
        yield _text(rng, min(800, max(5, int(rng.lognormvariate(3.6, 1.1)))))


def shared_prefix(count: int, rng: random.Random) -> Iterator[str]:
    """Eight documents of 180 words, each asked about many times, shuffled."""
    documents = [_text(rng, 180) for _ in range(8)]
    rows = [f"{documents[i % 8]}\n\nQuestion: {_text(rng, 12)}?" for i in range(count)]
    rng.shuffle(rows)
    yield from rows


def documents(count: int, rng: random.Random) -> Iterator[str]:
    """Sixteen documents of 400 words, each asked about several times, shuffled: more than a cache holds."""
    texts = [_text(rng, 400) for _ in range(16)]
    rows = [f"{texts[i % 16]}\n\nQuestion: {_text(rng, 12)}?" for i in range(count)]
    rng.shuffle(rows)
    yield from rows


def duplicates(count: int, rng: random.Random) -> Iterator[str]:
    """Three in ten texts are repeats of another."""
    distinct = [_text(rng, 80) for _ in range(round(count * 0.7))]
    rows = distinct + rng.choices(distinct, k=count - len(distinct))
    rng.shuffle(rows)
    yield from rows


def mixed(count: int, rng: random.Random) -> Iterator[str]:
    """A third each of long-tailed, prefix-sharing and repeated texts, shuffled: a real night's input."""
    third = count // 3
    rows = [
        *long_tailed(count - 2 * third, rng),
        *shared_prefix(third, rng),
        *duplicates(third, rng),
    ]
    rng.shuffle(rows)
    yield from rows


def over_long(count: int, rng: random.Random) -> Iterator[str]:
    """Short texts, and one in their middle that no context here holds."""
    for number in range(count):
        yield _text(rng, 6_000 if number == count // 2 else 30)


def malformed(count: int, rng: random.Random) -> Iterator[str]:
    """Short texts, and one in their middle whose line is torn."""
    for number in range(count):
        yield MALFORMED if number == count // 2 else _text(rng, 30)


def deadly(count: int, rng: random.Random) -> Iterator[str]:
    """Short texts, and one in their middle that kills an engine with the plugin `poison_engine`."""
    for number in range(count):
        yield f"{_text(rng, 15)} {DEADLY} {_text(rng, 15)}" if number == count // 2 else _text(rng, 30)


SETS: dict[str, Callable[[int, random.Random], Iterator[str]]] = {
    "uniform": uniform,
    "long-tailed": long_tailed,
    "documents": documents,
    "duplicates": duplicates,
    "mixed": mixed,
    "over-long": over_long,
    "malformed": malformed,
    DEADLY_SET: deadly,
}


def write(name: str, count: int, path: Path) -> None:
    """Write one set as JSONL of `{"id", "text"}`."""
    with path.open("w", encoding="utf-8") as file:
        for row_id, text in enumerate(SETS[name](count, random.Random(f"{name}-{count}")), start=1):
            line = json.dumps({"id": row_id, "text": text})
            file.write((line[:-4] if text == MALFORMED else line) + "\n")


def _text(rng: random.Random, words: int) -> str:
    return " ".join(rng.choices(_WORDS, k=words))
