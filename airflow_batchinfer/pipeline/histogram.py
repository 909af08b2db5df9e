"""Histograms of counts (tokens a row) that add up over shards and take a few hundred bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from pydantic import Field

from airflow_batchinfer.run.document import Document

_STEPS = 8
"""Buckets a power of two: a value is known to within 1/8 of itself."""


def _edges() -> npt.NDArray[np.int64]:
    small = np.arange(2 * _STEPS)
    powers = 2 ** np.arange(4, 32)
    return np.concatenate([small, (powers[:, None] * (_STEPS + np.arange(_STEPS)) // _STEPS).ravel()])


EDGES = _edges()
"""Lower edges of all buckets, ascending: 0 to 15 singly, then eight to each power of two."""


class Histogram(Document):
    """How often values fell into each bucket; `buckets` maps a bucket's lower edge to its count."""

    buckets: dict[int, int] = Field(default_factory=dict)
    count: int = 0
    total: int = 0
    minimum: int | None = None
    maximum: int | None = None

    @classmethod
    def of(cls, values: npt.NDArray[np.int64]) -> Histogram:
        """The histogram of non-negative whole numbers."""
        if len(values) == 0:
            return cls()
        index = np.searchsorted(EDGES, values, side="right") - 1
        found, counts = np.unique(index, return_counts=True)
        buckets = {int(EDGES[i]): int(n) for i, n in zip(found, counts, strict=True)}
        return cls(
            buckets=buckets,
            count=len(values),
            total=int(values.sum()),
            minimum=int(values.min()),
            maximum=int(values.max()),
        )

    def plus(self, other: Histogram) -> Histogram:
        """Both together."""
        edges = sorted(self.buckets.keys() | other.buckets.keys())
        lows = [v for v in (self.minimum, other.minimum) if v is not None]
        highs = [v for v in (self.maximum, other.maximum) if v is not None]
        return Histogram(
            buckets={e: self.buckets.get(e, 0) + other.buckets.get(e, 0) for e in edges},
            count=self.count + other.count,
            total=self.total + other.total,
            minimum=min(lows, default=None),
            maximum=max(highs, default=None),
        )

    def quantile(self, q: float) -> float:
        """The value below which the fraction `q` lies, to within a bucket; 0 if there are no values."""
        if not self.count or self.minimum is None or self.maximum is None:
            return 0.0
        below, wanted = 0, q * self.count
        for edge in sorted(self.buckets):
            inside = self.buckets[edge]
            if below + inside >= wanted:
                low, high = max(edge, self.minimum), min(_upper(edge), self.maximum)
                return low + (high - low) * (wanted - below) / inside
            below += inside
        return float(self.maximum)


def _upper(edge: int) -> int:
    """Largest value of the bucket that starts at `edge`."""
    index = int(np.searchsorted(EDGES, edge, side="right"))
    return int(EDGES[index]) - 1 if index < len(EDGES) else int(EDGES[-1])
