"""Seeded random samples of rows that come out the same whatever the order of reading.

Each row's rank is a hash of the seed and its `row_id`; a sample is the rows of lowest rank. Samples
of shards therefore combine into the sample of the run, in memory of the sample's size.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

Ids = npt.NDArray[np.int64]


def ranks(row_ids: Ids, seed: int) -> npt.NDArray[np.uint64]:
    """A pseudo-random rank for each row id (SplitMix64): equal ids and seeds give equal ranks."""
    with np.errstate(over="ignore"):
        x = row_ids.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15) * np.uint64(seed + 1)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: npt.NDArray[np.uint64] = x ^ (x >> np.uint64(31))
    return mixed


def sample(row_ids: Ids, size: int, seed: int) -> Ids:
    """At most `size` of the row ids, drawn at random, in their own order."""
    if len(row_ids) <= size:
        return row_ids
    lowest = np.argpartition(ranks(row_ids, seed), size)[:size]
    chosen: Ids = row_ids[np.sort(lowest)]
    return chosen


@dataclass
class RowSample:
    """A sample of a whole run, fed shard by shard; each row comes with a tag (its shard)."""

    size: int
    seed: int
    _rows: Ids = field(default_factory=lambda: np.empty(0, np.int64))
    _tags: Ids = field(default_factory=lambda: np.empty(0, np.int64))

    def add(self, row_ids: Ids, tag: int) -> None:
        """Offer rows of one shard."""
        rows = np.concatenate([self._rows, row_ids])
        tags = np.concatenate([self._tags, np.full(len(row_ids), tag, np.int64)])
        lowest = np.argsort(ranks(rows, self.seed), kind="stable")[: self.size]
        self._rows, self._tags = rows[lowest], tags[lowest]

    def by_tag(self) -> dict[int, Ids]:
        """The sampled row ids of each tag."""
        return {int(tag): np.sort(self._rows[self._tags == tag]) for tag in np.unique(self._tags)}

    def first(self, count: int) -> RowSample:
        """A smaller sample of the same rows."""
        return RowSample(min(count, self.size), self.seed, self._rows[:count], self._tags[:count])


@dataclass
class StratifiedSample:
    """A sample of a whole run in which each stratum has its share; fed shard by shard.

    Memory: `size` rows a stratum, so strata must be few.
    """

    size: int
    seed: int
    _samples: dict[str, RowSample] = field(default_factory=dict)
    _counts: Counter[str] = field(default_factory=Counter)

    def add(self, row_ids: Ids, strata: npt.NDArray[np.str_], tag: int) -> None:
        """Offer rows of one shard, each with its stratum's name."""
        for name in np.unique(strata).tolist():
            rows = row_ids[strata == name]
            self._counts[name] += len(rows)
            self._samples.setdefault(name, RowSample(self.size, self.seed)).add(rows, tag)

    def by_tag(self) -> dict[int, Ids]:
        """The sampled row ids of each tag."""
        found: dict[int, list[Ids]] = {}
        for name, count in self._shares().items():
            for tag, rows in self._samples[name].first(count).by_tag().items():
                found.setdefault(tag, []).append(rows)
        return {tag: np.sort(np.concatenate(rows)) for tag, rows in sorted(found.items())}

    def _shares(self) -> dict[str, int]:
        """Rows of each stratum: its proportion, what rounding leaves by the largest remainder."""
        total = self._counts.total()
        size = min(self.size, total)
        exact = {name: size * count / total for name, count in sorted(self._counts.items())}
        shares = {name: int(share) for name, share in exact.items()}
        by_remainder = sorted(exact, key=lambda name: shares[name] - exact[name])
        for name in by_remainder[: size - sum(shares.values())]:
            shares[name] += 1
        return shares
