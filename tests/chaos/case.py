"""One line of the matrix."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.oracle import Account

CaseFunction = Callable[[Path], Account]


@dataclass(frozen=True)
class Case:
    """One line of the table: a fault, where it strikes, and the functions that each try it once.

    Attributes:
        dead: the dead letters that every try must end with, and no others: reason by row.
        most_beside: payments beside another attempt that a try may have, where two run at once.
        strikes: whether a fault must strike in every try.
    """

    fault: str
    where: str
    tries: tuple[CaseFunction, ...]
    dead: Mapping[int, str] = field(default_factory=dict)
    most_beside: int = 0
    strikes: bool = True
