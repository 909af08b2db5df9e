"""One line of the matrix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.chaos.oracle import Account

CaseFunction = Callable[[Path], Account]


@dataclass(frozen=True)
class Case:
    """One line of the table: a fault, where it strikes, and the functions that each try it once."""

    fault: str
    where: str
    tries: tuple[CaseFunction, ...]
