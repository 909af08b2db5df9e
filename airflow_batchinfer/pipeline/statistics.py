"""The few statistics that quality checks need: an interval for shares, and distances of distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeVar

_K = TypeVar("_K", str, int)

_Z = 1.959964
"""95 % of a normal distribution lies within so many standard deviations."""


def wilson(count: int, of: int) -> tuple[float, float]:
    """Wilson's 95 % interval for a share seen as `count` of `of`; everything if nothing was seen."""
    if of == 0:
        return 0.0, 1.0
    share, z2 = count / of, _Z * _Z
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    return max(0.0, centre - half), min(1.0, centre + half)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and its 95 % interval by the normal approximation; no width for a single value.

    Raises:
        ValueError: there is no value.
    """
    if not values:
        raise ValueError("the mean of no values")
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, mean, mean
    variance = math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1)
    half = _Z * math.sqrt(variance / len(values))
    return mean, mean - half, mean + half


def population_stability(before: Mapping[_K, int], after: Mapping[_K, int]) -> float:
    """Population stability index of two counts; 0 is equal, above 0.2 is usually called a shift.

    Half a case is added to each kind, so that one that is new or gone weighs by how often it occurs.
    """
    kinds = before.keys() | after.keys()
    if not kinds:
        return 0.0
    total_before = sum(before.values()) + 0.5 * len(kinds)
    total_after = sum(after.values()) + 0.5 * len(kinds)
    index = 0.0
    for kind in kinds:
        p = (before.get(kind, 0) + 0.5) / total_before
        q = (after.get(kind, 0) + 0.5) / total_after
        index += (q - p) * math.log(q / p)
    return index


def jensen_shannon(before: Mapping[_K, int], after: Mapping[_K, int]) -> float:
    """Jensen-Shannon distance of two counts, 0 (equal) to 1 (nothing in common)."""
    total_before, total_after = sum(before.values()), sum(after.values())
    if not total_before or not total_after:
        return 0.0
    divergence = 0.0
    for kind in before.keys() | after.keys():
        p, q = before.get(kind, 0) / total_before, after.get(kind, 0) / total_after
        middle = (p + q) / 2
        divergence += sum(x * math.log2(x / middle) / 2 for x in (p, q) if x)
    return math.sqrt(max(0.0, divergence))
